"""docs/house.md draws the rooms as they are, on one screen."""

from __future__ import annotations

from tools.write_house_page import PAGE, drawn, written


def test_the_page_is_what_would_be_written() -> None:
    assert PAGE.read_text(encoding="utf-8") == written(), "run: python -m tools.write_house_page"


def test_the_page_fits_on_one_screen() -> None:
    lines = written().splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 132


def test_a_room_stands_above_the_rooms_that_it_calls() -> None:
    rooms = {"a": {"b", "d"}, "b": {"c"}, "c": set[str](), "d": set[str]()}
    assert drawn(rooms) == " 2 a  b d\n 1 b  c\n 0 c\n 0 d\n"
    assert drawn(rooms, left_out=("d",)) == " 2 a  b\n 1 b  c\n 0 c\n"
