"""Screens of a terminal as a picture that moves, and as one that does not."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tools.terminal_svg import Cell, Frame, lines_shown, shorten, svg


def line(text: str, color: str = "default") -> tuple[Cell, ...]:
    return tuple(Cell(letter, color) for letter in text.ljust(8))


EMPTY = line("")
FRAMES = [
    Frame(0.0, (line("$ a"), EMPTY)),
    Frame(1.0, (line("$ ab"), EMPTY)),
    Frame(9.0, (line("$ ab"), line("<&>", "red"))),
]


def test_a_line_is_shown_once_for_as_long_as_it_stays() -> None:
    told = [
        ("".join(cell.text for cell in one.line).rstrip(), one.begin_s, one.end_s) for one in lines_shown(FRAMES, 10)
    ]
    assert told == [("$ a", 0, 1), ("$ ab", 1, 10), ("<&>", 9, 10)]


def test_long_pauses_are_shortened_and_short_ones_kept() -> None:
    assert [frame.at_s for frame in shorten(FRAMES, 2.0)] == [0.0, 1.0, 3.0]


def test_without_animation_the_last_screen_is_seen() -> None:
    picture = svg(FRAMES, "a title", hold_s=1.0)
    seen = dict(re.findall(r"#l(\d+)\{visibility:(\w+)", picture))
    texts = {
        element.attrib["id"].removeprefix("l"): "".join(element.itertext())
        for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {texts[number]: state for number, state in seen.items()} == {
        "$ a": "hidden",
        "$ ab": "visible",
        "<&>": "visible",
    }


def test_each_line_has_its_moments_in_the_animation() -> None:
    picture = svg(FRAMES, "a title", hold_s=1.0)
    assert "@keyframes k0{0.00%{visibility:visible}10.00%{visibility:hidden}}" in picture
    assert "@keyframes k1{0%{visibility:hidden}10.00%{visibility:visible}}" in picture
    assert "@keyframes k2{0%{visibility:hidden}90.00%{visibility:visible}}" in picture


def test_a_picture_runs_nothing_and_asks_nobody() -> None:
    picture = svg(FRAMES, 'a "title" & <more>')
    assert ElementTree.fromstring(picture).attrib["aria-label"] == 'a "title" & <more>'
    assert not re.search(r"<script|href|url\(|@import", picture)
