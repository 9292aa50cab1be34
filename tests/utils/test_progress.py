"""Progress: whole lines off a terminal, one bar at a time on it, and long steps say how far they are."""

from __future__ import annotations

import io

from minisgl.utils.progress import LINE_INTERVAL_S, Display, track


def test_track_reports_the_beginning_and_the_end_and_yields_everything() -> None:
    reports: list[tuple[str, int, int]] = []
    assert list(track(lambda text, done=0, total=0: reports.append((text, done, total)), "step", "abc", 3)) == [*"abc"]
    assert reports[0] == ("step", 0, 3) and reports[-1] == ("step", 3, 3)


def test_off_a_terminal_a_step_is_a_line_and_a_long_one_says_how_far_it_is() -> None:
    lines: list[str] = []
    now = 0.0
    display = Display(lines.append, None, clock=lambda: now)
    for done in range(5):
        display("loading", done, 4)
    assert lines == ["loading"]
    display("again", 0, 4)
    now = LINE_INTERVAL_S
    display("again", 1, 4)
    display("again", 2, 4)
    display("done")
    assert lines == ["loading", "again", "again: 25 %", "done"]


def test_on_a_terminal_a_step_is_a_bar_that_a_line_ends() -> None:
    lines: list[str] = []
    screen = io.StringIO()
    display = Display(lines.append, screen)
    display("loading", 0, 4)
    display("loading", 2, 4)
    assert "loading:  50%" in screen.getvalue() and lines == []
    display("found")
    assert lines == ["found"] and screen.getvalue().endswith("\r")  # the bar is wiped before the line
    display("next", 4, 4)
    assert "next: 100%" in screen.getvalue()


def test_large_totals_are_shown_as_bytes() -> None:
    screen = io.StringIO()
    Display(lambda line: None, screen)("downloading", 1_500_000, 3_000_000)
    assert "1.50M/3.00M" in screen.getvalue() and "B/s" in screen.getvalue()
