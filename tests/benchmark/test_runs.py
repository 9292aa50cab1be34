"""The records of runs: none is larger than a repository should carry, and one that is gone can be found."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "benchmark" / "runs"
LARGEST = 1 << 20  # bytes of a file that is not compressed: `gzip -9 -n raw.json`


def test_large_files_are_compressed() -> None:
    large = [file for file in RUNS.rglob("*") if file.suffix in (".json", ".md") and file.stat().st_size > LARGEST]
    assert large == []


def test_a_run_that_a_page_or_note_quotes_is_here_or_in_the_list_of_those_in_the_history() -> None:
    listed = set(re.findall(r"^\| `(\S+)` \|", (RUNS / "README.md").read_text(encoding="utf-8"), re.M))
    here = {folder.name for folder in RUNS.iterdir() if folder.is_dir()}
    pages = [
        *ROOT.glob("*.md"),
        *(file for top in ("docs", "worklog", "kanban") for file in (ROOT / top).rglob("*.md")),
    ]
    quoted = {
        name: page.name
        for page in pages
        for name in re.findall(r"benchmark/runs/(\d{4}-\d\d-\d\d-[\w.-]*[\w-])", page.read_text(encoding="utf-8"))
    }
    assert listed and not listed & here
    assert {name: page for name, page in quoted.items() if name not in listed | here} == {}
