"""Docstrings begin with what the thing is or does, so that the first line stands alone in the result of a search.

A first word such as What, As, Who, Its or Of begins a fragment whose subject is out of sight. At most 2 % of a room's
docstrings may have one; CONTRIBUTING.md has the rules, `python tools/sample_docstrings.py SEED` draws a blind reading.

Invariants: a failure lists each docstring that counts against its room.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.test_lines import room_of
from tools.sample_docstrings import Docstring, docstrings, of_python, of_rust

LIMIT = 0.02
NO_SUBJECT = frozenset(
    re.findall(
        r"\w+",
        """
        also and as at before behind beside between both but by for from here how if in it its likewise more neither
        nobody none not of on one only same see so such that their them there these they this those to under unless
        until what whatever when where wherever which while who whoever whose why with
        """,
    )
)


def has_no_subject(text: str) -> bool:
    """Return whether a docstring's first word belongs to no subject and no verb."""
    words = text.split()
    return bool(words) and re.sub(r"\W", "", words[0]).lower() in NO_SUBJECT


def test_at_most_two_percent_of_a_rooms_docstrings_have_no_subject() -> None:
    rooms: dict[str, list[Docstring]] = defaultdict(list)
    for item in docstrings():
        rooms[room_of(item.file)].append(item)
    assert {room_of(Path("python/minisgl/llm.py")), room_of(Path("rust/minisgl-core/src/lib.rs"))} <= rooms.keys()
    found = list[str]()
    for room, items in sorted(rooms.items()):
        worst = [item for item in items if has_no_subject(item.text)]
        if len(worst) > max(1, LIMIT * len(items)):
            found.append(f"{room}: {len(worst)} of {len(items)}:")
            found += [f"{item.file}:{item.line}: {item.text.splitlines()[0]}" for item in worst]
    assert not found, "\n".join(found)


def test_docstrings_are_found_with_their_signatures() -> None:
    source = '"""A page."""\nclass Page:\n    def free(\n        self,\n    ) -> None:\n        """Free it."""\n'
    assert [(item.signature, item.text) for item in of_python(source, Path("page.py"))] == [
        ("(module)", "A page."),
        ("def free( self, ) -> None:", "Free it."),
    ]
    rust = ["//! Pages.", "", "/// Frees the page.", "#[inline]", "pub fn free(", "    page: u32,", ") {", "}"]
    assert [(item.line, item.signature, item.text) for item in of_rust(rust, Path("page.rs"))] == [
        (1, "(module)", "Pages."),
        (3, "pub fn free( page: u32, ) {", "Frees the page."),
    ]


@pytest.mark.parametrize(("text", "counts"), [("What it is.", True), ("`None`: it is free.", True), ("A page.", False)])
def test_only_the_first_word_of_a_docstring_is_judged(text: str, counts: bool) -> None:
    assert has_no_subject(text) is counts
