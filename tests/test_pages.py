"""Pages that people read: their links and pictures lead somewhere, and each page is found from an index.

Invariants: what a page of today names is there today. Records (`worklog/`, `benchmark/runs/`) are of their day.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from minisgl import cli
from minisgl.cli import bench
from minisgl.models.architectures import ARCHITECTURES, ENCODERS
from minisgl.models.towers import FAMILIES

ROOT = Path(__file__).parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("deploy/**/*.md"),
    ROOT / "benchmark" / "README.md",
    *ROOT.glob("tests/**/README.md"),
    ROOT / "worklog" / "README.md",
]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def links(page: Path) -> list[str]:
    return LINK.findall(CODE.sub("", text_of(page)))


@cache
def anchors(page: Path) -> set[str]:
    """Return those of headings, as GitHub makes them: lower case, punctuation gone, blanks as dashes."""
    without = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(without)}


def of_this_repository(page: Path) -> list[tuple[str, Path, str]]:
    """Link, file, anchor."""
    told = []
    for link in links(page):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            told.append((link, (page.parent / path).resolve() if path else page, anchor))
    return told


SOURCES = {".py", ".pyi", ".rs", ".js", ".sh", ".yaml", ".yml", ".json", ".toml", ".service"}
EXAMPLES = {"minisgl/a/b.py", "tests/a/test_b.py", "tests/a/test_b_topic.py", "test_MODULE.py", "test_MODULE_TOPIC.py"}
EXAMPLES |= {"worklog/2026-01-01-x.md"}
THEIRS = {"bench_qwen.py"}


def listed() -> list[Path]:
    """Return the files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_files_of_code_that_pages_and_comments_name_exist() -> None:
    files = [file.relative_to(ROOT) for file in listed()]
    ends = {"/".join(file.parts[at:]) for file in files for at in range(len(file.parts))}
    code = [ROOT / one for one in files if re.match(r"(python|rust|tests|benchmark|tools)/.*\.(pyi?|rs)$", str(one))]
    named = re.compile(r"`([\w./-]+\.(?:py|rs))`")
    absent = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in [*PAGES, *code]
        if file.exists()
        for name in named.findall(text_of(file))
        if name.lstrip("./") not in ends | EXAMPLES | THEIRS
    }
    assert absent == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        link
        for link, file, anchor in of_this_repository(page)
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file))
    ]
    assert broken == []


def test_pages_that_records_and_code_name_are_there() -> None:
    """Check the links of every `.md` file to pages and their headings, and the names of pages in all other files.

    A run that was removed is listed where the runs are; records may still name it.
    """
    gone = []
    runs = ROOT / "benchmark" / "runs"
    listed_runs = text_of(runs / "README.md")
    for file in listed():
        if file.suffix == ".md":
            pages = [(page, anchor) for link, page, anchor in of_this_repository(file) if ".md" in link]
            gone += [
                (file, page)
                for page, anchor in pages
                if (not page.exists() or (anchor and anchor not in anchors(page)))
                and not (page.is_relative_to(runs) and page.relative_to(runs).parts[0] in listed_runs)
            ]
        elif file.suffix in SOURCES:
            names = re.findall(r"\b(?:docs|worklog)/[\w.-]+\.md", text_of(file))
            gone += [(file, name) for name in names if not (ROOT / name).exists() and name not in EXAMPLES]
    assert gone == []


def test_every_page_of_docs_is_in_its_index() -> None:
    index = {file for _, file, _ in of_this_repository(ROOT / "docs" / "README.md")}
    assert {page.name for page in ROOT.glob("docs/*.md") if page not in index} == {"README.md"}


def test_every_picture_is_shown_by_a_page() -> None:
    """One that nobody shows is one that nobody makes again."""
    known = [*PAGES, *ROOT.glob("worklog/*.md")]
    shown = {file for page in known for _, file, _ in of_this_repository(page)}
    assert {picture.name for picture in (ROOT / "docs" / "img").iterdir() if picture not in shown} == set()


def test_pictures_say_what_they_show() -> None:
    """To who hears a page, too."""
    silent = {page.name for page in PAGES if re.search(r"!\[\s*\]\(", CODE.sub("", text_of(page)))}
    assert silent == set()


def test_the_readme_is_short() -> None:
    readme = text_of(ROOT / "README.md")
    assert readme.count("\n") < 200


def test_every_note_is_listed() -> None:
    listed = {file for _, file, _ in of_this_repository(ROOT / "worklog" / "README.md")}
    assert {note.name for note in (ROOT / "worklog").glob("**/2*.md") if note not in listed} == set()


def test_commits_that_records_name_are_in_the_history_or_in_the_list_of_lost_ones() -> None:
    told = text_of(ROOT / "worklog" / "README.md").partition("## Commits that are not in the history")[2]
    lost = re.findall(r"`([0-9a-f]{7})`", told.partition("## ")[0])
    found = subprocess.run(
        ["git", "log", "--format=%h", "--abbrev=7"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if found.returncode or len(found.stdout.split()) < 100:
        pytest.skip("the history is not here")
    known = {*found.stdout.split(), *lost}
    records = [
        *ROOT.glob("worklog/**/*.md"),
        *ROOT.glob("kanban/**/*.md"),
        *ROOT.glob("benchmark/runs/**/README.md"),
        *PAGES,
    ]
    names = re.compile(r"(?<![\w/.-])(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,10}(?![\w.-])")
    named = {name[:7]: page.name for page in records for name in names.findall(text_of(page))}
    assert {name: page for name, page in named.items() if name not in known} == {}


def test_board_and_cards_agree_on_lanes() -> None:
    """The board lists each card that is not done, in the folder where it lies, and the card says its lane."""
    statuses = {"backlog": "in the backlog", "todo": "to do", "in-progress": "in progress", "done": "done"}
    board = ROOT / "kanban" / "BOARD.md"
    cards = {card: statuses[card.parent.name] for card in ROOT.glob("kanban/*/*.md")}
    listed = [file for _, file, _ in of_this_repository(board)]
    assert sorted(listed) == sorted(card for card, status in cards.items() if status != "done")
    wrong = {card.name for card, status in cards.items() if f"| status | {status}" not in text_of(card)}
    assert wrong == set()


def test_what_a_finished_card_left_open_is_on_another_card() -> None:
    for card in ROOT.glob("kanban/done/*.md"):
        left = text_of(card).partition("## Left")[2].partition("\n## ")[0]
        if left:
            (link,) = LINK.findall(left)
            assert (card.parent / link).is_file(), card.name


def test_the_readme_names_what_is_there() -> None:
    """The table beside others, against the flags of `minisgl serve` and the models that are native."""
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", text_of(ROOT / "README.md"), re.MULTILINE))
    flags = subprocess.run(
        [sys.executable, "-m", "minisgl", "serve", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    speculative, adapters, images = rows["speculative decoding, LoRA, images"].split(", ")
    assert (speculative == "n-grams / small models / MTP") == ("ngram:K|model:FILE[:K]|mtp" in flags)
    assert (adapters == "yes") == ("--lora" in flags)
    assert images == "[some families](docs/images.md)" and FAMILIES
    on_torch = sum(known.on_torch for known in ARCHITECTURES.values())
    told = f"{len(ARCHITECTURES) - len(ENCODERS)} architectures, of which {on_torch} on torch, too"
    assert rows["models"].startswith(told), told
    features = text_of(ROOT / "docs" / "features.md")
    assert [name for name in ARCHITECTURES if f"`{name}`" not in features] == []


FOREIGN = {
    *("--extra", "--implementation", "--index-url", "--no-deps", "--no-index", "--only-binary", "--platform"),
    *("--python-version", "--torch-backend", "--locked", "--profile", "--rm", "--target", "--time", "--now"),
    *("--kill-who", "--patch-file", "--strict", "--address", "--head", "--build"),
    *("--chain-limit", "--functions", "--key", "--openai-api-base", "--openai-api-key", "--edit-format"),
    *("--retry", "--retry-connrefused"),
}
"""Flags of other programs that pages name: pip, uv, maturin, docker, systemctl, kubectl, Ray, cmake, llm, aider, and
curl."""


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Every command has these, other projects' spellings too, or a program in benchmark/ and tests/ has."""
    known = set()
    for module in (
        cli.serve,
        cli.chat,
        cli.generate,
        cli.model,
        cli.replay,
        cli.verify,
        *map(import_module, bench.COMMANDS.values()),
    ):
        commands = argparse.ArgumentParser().add_subparsers()
        module.add_parser(commands)
        for parser in commands.choices.values():
            known |= {option for action in parser._actions for option in action.option_strings}
    for program in [*ROOT.glob("benchmark/**/*.py"), *ROOT.glob("tests/gpu/*.py"), ROOT / "tests" / "conftest.py"]:
        text = text_of(program)
        known |= set(
            re.findall(r'"(--[a-z][a-z0-9-]+)"', text.replace("{letter}", "a") + text.replace("{letter}", "b"))
        )
    return known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_flags_that_a_page_names_exist(page: Path, flags: set[str]) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w*-])", text_of(page)))
    assert named - flags - FOREIGN == set()


def num_lines(file: Path, function: str) -> int:
    """Lines of the function of that name in a file of Python or Rust; the longest one where several have it."""
    text = text_of(file)
    if file.suffix == ".py":
        nodes = [one for one in ast.walk(ast.parse(text)) if isinstance(one, FUNCTIONS) and one.name == function]
        return max((one.end_lineno or 0) - one.lineno + 1 for one in nodes)
    bodies = re.findall(rf"^( *)((?:pub(?:\([a-z]+\))? )?(?:async )?fn {function}\b.*?\n)\1\}}$", text, re.M | re.S)
    return max(body.count("\n") + 1 for _, body in bodies)


def items(text: str) -> list[str]:
    """Return the items of a numbered list, each as one line."""
    found = re.findall(r"^\d+\. (.+(?:\n +.+)*)$", text, re.M)
    return [re.sub(r"\n +", " ", item) for item in found]


def functions_of(text: str) -> list[tuple[str, list[str]]]:
    """Each linked file with the names in backticks that come after it."""
    parts = re.split(r"\[[^\]]+\]\(([^)#]+)\)", text)
    return [(file, re.findall(r"`(\w+)`", names)) for file, names in zip(parts[1::2], parts[2::2], strict=True)]


def test_the_trace_of_a_request_names_what_is_there() -> None:
    page = text_of(ROOT / "docs" / "request.md")
    steps = items(page.partition("## Ten steps")[2].partition("\n## ")[0])
    assert len(steps) == 10
    for file, names in (found for step in steps for found in functions_of(step)):
        source = (ROOT / "docs" / file).read_text(encoding="utf-8")
        for name in names:  # a type may stand elsewhere: the file uses it
            is_type = name[0].isupper()
            assert re.search(rf"\b{name}\b" if is_type else rf"\b(?:def|fn) {name}\b", source), f"{file}: {name}"
    in_python = "".join(part for step in steps for part in step.split("- ") if part.startswith("Python: "))
    files = {re.sub(r"(tokenizer)/.*", r"\1", file) for file, _ in functions_of(in_python)}
    assert len(files) <= 12, sorted(files)
    types = re.findall(r"`(\w+)`", page.partition("The types that mean the request")[2].partition("(")[0])
    assert 0 < len(types) <= 6 and all(one in in_python for one in types)


def test_the_way_of_a_request_is_short() -> None:
    """The README names functions: after a link its file's, a linked one that file's own."""
    section = text_of(ROOT / "README.md").partition("## Read this code")[2].partition("\n## ")[0]
    total = 0
    steps = items(section)
    for line in steps:
        file = LINK.findall(line)[0]
        named = re.findall(r"(?:\[`(\w+)`\]\(([^)]+)\))|`(\w+)`", line)
        assert named, line
        total += sum(num_lines(ROOT / (own or file), linked or plain) for linked, own, plain in named)
    assert len(steps) == 10 and 500 < total <= 900
