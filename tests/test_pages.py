"""Pages that people read: their links and pictures lead somewhere, and each page is found from an index.

Keeps true: what a page of today names is there today. Records (`worklog/`, `benchmark/runs/`) are of their day.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("deploy/**/*.md"),
    ROOT / "benchmark" / "README.md",
    ROOT / "worklog" / "README.md",
]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def links(page: Path) -> list[str]:
    return LINK.findall(CODE.sub("", text_of(page)))


def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them: lower case, punctuation gone, blanks as dashes."""
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        link
        for link, file, anchor in of_this_repository(page)
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file))
    ]
    assert broken == []


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


def test_the_readme_is_short_and_its_walk_has_ten_files() -> None:
    readme = text_of(ROOT / "README.md")
    assert readme.count("\n") < 200
    walk = re.split(r"^## ", readme, flags=re.MULTILINE)
    (steps,) = (part for part in walk if part.startswith("Read this code in 30 minutes"))
    files = re.findall(r"^\d+\. \[`([^`]+)`\]\(([^)]+)\)", steps, re.MULTILINE)
    assert len(files) == 10
    assert all(target.endswith(name) and (ROOT / target).is_file() for name, target in files)


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`: c\n[x](gone.md) `[y](code.md)` [z](#a-b-c) [w](https://example.com/a)\n")
    assert [(link, file.exists()) for link, file, _ in of_this_repository(page)] == [
        ("gone.md", False),
        ("#a-b-c", True),
    ]
    assert anchors(page) == {"a-b-c"}
