"""docs/files.md says what the code reads, and names tests that are there."""

from __future__ import annotations

import re

from tools.write_files_page import PAGE, written


def test_the_page_is_what_would_be_written() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "run: python -m tools.write_files_page"


def test_the_tests_that_it_names_are_there() -> None:
    named = set(re.findall(r"`(tests/\S+\.(?:py|rs))(?:::\S+)?`", PAGE.read_text(encoding="utf-8")))
    assert named and all((PAGE.parents[1] / one).is_file() for one in named)
