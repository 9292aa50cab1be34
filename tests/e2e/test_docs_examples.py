"""What README.md and the pages for users tell people to type, typed.

A comment before a block says what is to be seen (`prints: TEXT`) or why it is not run (`not run: REASON`). Shell blocks
run in bash with `minisgl` on the path, Python blocks as scripts, YAML blocks are read as by `minisgl serve --config`.
The examples' server stands at a free port instead of theirs, measurements are short, and the path is that of an
activated environment: the environment's folder and the system's.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from minisgl import envs
from tests.helpers.deploy import served
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.meaning import BEGINNINGS, FRANCE, embedded_model
from tests.helpers.seconds import WAIT_S

ROOT = Path(__file__).parents[2]
FOR_USERS = (*("batches", "cache", "other-apis", "quick-start", "structured-output", "vectors"),)
PAGES = ("README.md", *(f"docs/{name}.md" for name in FOR_USERS))
BLOCK = re.compile(r"(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)```", re.DOTALL)
ADDRESS = "http://127.0.0.1:1919"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
OWN_PORT = "1920"  # of a server that an example starts
SHORTER = {
    "minisgl bench ab ": "minisgl bench ab --pairs 1 --duration 0.1 ",
    "minisgl doctor  ": "minisgl doctor --help  ",
}
"""Commands of the README that take long, and what is run in their place: the quick start runs `minisgl doctor`."""


@dataclass(frozen=True)
class Block:
    place: str
    language: str
    text: str
    note: str

    @property
    def runs(self) -> bool:
        return not self.note.startswith("not run: ")


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text[: found.start("language")].count("\n") + 1
        yield Block(f"{page}:{line}", found["language"], found["text"], found["note"] or "")


BLOCKS = [block for page in PAGES for block in blocks(page)]
TYPED = [block for block in BLOCKS if block.runs and block.language in ("sh", "python")]
FILES = [block for block in BLOCKS if block.language == "yaml"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    embedded_model()
    state = str(tmp_path_factory.mktemp("state"))
    with serving("--model", "smollm2", "--num-pages", "1024", "--state-dir", state) as running:
        yield running


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("block", TYPED, ids=lambda block: block.place)
def test_an_example_does_what_it_says(server: ServerProcess, block: Block, tmp_path: Path) -> None:
    command = tmp_path / "minisgl"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m minisgl "$@"\n')
    command.chmod(0o755)
    text = block.text.replace(ADDRESS, server.url).replace(OWN_PORT, str(free_port()))
    for command_of_page, shorter in SHORTER.items():
        text = text.replace(command_of_page, shorter)
    typed = ["bash", "-euo", "pipefail", "-c", text] if block.language == "sh" else [sys.executable, "-c", text]
    env = {**os.environ, "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{SYSTEM_PATH}"}
    done = subprocess.run(
        typed,
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=env,
        timeout=WAIT_S,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert block.note.startswith("prints: "), f"{block.place}: say what it prints"
    assert block.note.removeprefix("prints: ") in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("block", FILES, ids=lambda block: block.place)
def test_a_file_of_settings_is_accepted(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(block.text)
    config = served(monkeypatch, ["serve", "--config", str(file)])
    assert config.port == 8000 and config.engine.max_running_requests == 32


def test_line_of_rust_that_the_readme_changes_is_there(tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if "maturin develop" in block.text)
    command, file = block.text.splitlines()[0].partition("#")[0].strip().rsplit(maxsplit=1)
    (copy := tmp_path / "file.rs").write_text(before := (ROOT / file).read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run(["bash", "-c", f"{command} {copy}"], check=True)
    pairs = zip(before.splitlines(), copy.read_text(encoding="utf-8").splitlines(), strict=True)
    assert sum(one != two for one, two in pairs) == 1


def test_each_page_has_examples_that_run() -> None:
    for page in PAGES:
        assert any(block.place.startswith(page) for block in TYPED), page


def test_examples_ask_what_the_model_is_sure_of_and_have_an_end() -> None:
    """Tokens without a limit, or an answer that hangs on how a machine rounds, would be somebody's first impression."""
    for block in TYPED:
        if re.search(r"completions|generate|minisgl chat", block.text):
            assert re.search(r"max[-_]tokens", block.text), f"{block.place}: say max_tokens"
        if block.note == "prints: Paris":
            assert any(known in block.text for known in (FRANCE, *BEGINNINGS)), f"{block.place}: ask something sure"


def test_every_block_is_known() -> None:
    assert {block.language for block in BLOCKS} <= {"sh", "python", "yaml", "json", "mermaid"}


def test_every_variable_is_on_the_operations_page() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert {name for name in envs.ALL if f"| `{name}` |" not in page} == set()
