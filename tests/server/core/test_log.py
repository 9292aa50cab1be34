"""Levels of a server's log."""

from __future__ import annotations

import logging
import re

import pytest

from minisgl.server.core import log

SHOWN = {"warning": "warning: warning", "error": "error: error"}


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["step", "line", "warning", "error"]),
        ("info", ["line", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_levels_of_a_server(capsys: pytest.CaptureFixture[str], level: str, shown: list[str]) -> None:
    log.set_up("text", access=True, level=level)
    log.narrate(["step"])
    log.say("line")
    log.warn("warning")
    log.complain("error")
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines] == [SHOWN.get(one, one) for one in shown]


@pytest.mark.parametrize("times", [True, False])
def test_a_line_begins_with_the_time_but_where_another_program_shows_it(
    capsys: pytest.CaptureFixture[str], times: bool
) -> None:
    log.set_up("text", access=True, times=times)
    log.say("ready. Try:")
    log.say("  curl x")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d ready\. Try:" if times else r"ready\. Try:", first) and second == "  curl x"


def test_a_warning_of_an_engine_process_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("text", access=True, times=False)
    for text in ("warning: shadow: first difference in commit(3)", "loaded"):
        log.report(text)
    log.set_up("json", access=True)
    log.report("warning: shadow: differs")
    *lines, last = capsys.readouterr().err.splitlines()
    assert lines == ["warning: shadow: first difference in commit(3)", "loaded"]
    assert '"level": "warning", "logger": "minisgl.server", "event": "shadow: differs"' in last


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("text", access=True, times=False)
    log.say("a\x1b]0;owned\x07 b\x9b2J, Grüße, 漢字\nnext\u202e")
    logging.getLogger("minisgl.access").info("request", extra={"fields": {"path": "/\x1b[2J", "key": "größer"}})
    assert capsys.readouterr().err == (
        "a\\x1b]0;owned\\x07 b\\x9b2J, Grüße, 漢字\nnext\\u202e\n" + 'request path="/\\u001b[2J" key=größer\n'
    )
