"""Variables of the older engine are named at start with what does their work here, and the page says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minisgl import cli, envs
from minisgl.cli.flags import ENGINE, SERVER
from minisgl.supervisor import start as supervisor
from minisgl.utils.older_variables import OLDER

PAGE = Path(__file__).parents[2] / "docs" / "from-mini-sglang.md"
HEADING = "\n## Variables of the older engine\n"


def test_page_has_the_table_of_the_code() -> None:
    part = PAGE.read_text(encoding="utf-8").split(HEADING, 1)[1].split("\n## ", 1)[0]
    on_page = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", part, re.MULTILINE))
    assert {name: text.replace("`", "") for name, text in on_page.items()} == OLDER


def test_table_has_every_variable_of_the_older_engine() -> None:
    if (data := envs.data_dir()) is None or not (listed := data / "engine-variables.md").is_file():
        pytest.skip("the list of its variables is not here")
    rows = [row for row in listed.read_text(encoding="utf-8").splitlines() if row.startswith("| ")]
    names = {name for row in rows for name in re.findall(r"\b[A-Z_]{9,}\b", row.split("|")[1])}
    assert names == set(OLDER) and len(names) == 37


def test_flags_of_the_table_exist() -> None:
    known = {flag for group in (*ENGINE.values(), *SERVER.values()) for one in group for flag in one.flags}
    assert {flag for text in OLDER.values() for flag in re.findall(r"--[a-z-]+", text)} <= known


def test_start_names_the_variables_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(supervisor, "run_server", lambda config, *warnings: said.extend(warnings) or 0)
    for name in OLDER:
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["serve", "--engine", "echo"]) == 0 and said == []
    monkeypatch.setenv("WARM_PREFIXES", "You are||kind")
    monkeypatch.setenv("CUDA_GRAPH_MAX_SEQ_LEN", "512")
    monkeypatch.setenv("MODEL_NAME", "")
    assert cli.main(["serve", "--engine", "echo"]) == 0
    assert [(line.split()[0], line.rpartition("here: ")[2]) for line in said] == [
        (name, OLDER[name]) for name in ("WARM_PREFIXES", "CUDA_GRAPH_MAX_SEQ_LEN")
    ]
