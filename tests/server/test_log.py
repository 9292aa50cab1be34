"""Levels of a server's log."""

from __future__ import annotations

import logging

import pytest

from minisgl.server import log


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
    assert capsys.readouterr().err.split() == shown


def test_no_text_reaches_a_terminal_as_its_codes(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("text", access=True)
    log.say("a\x1b]0;owned\x07 b\x9b2J, Grüße, 漢字\nnext\u202e")
    logging.getLogger("minisgl.access").info("request", extra={"fields": {"path": "/\x1b[2J", "key": "größer"}})
    assert capsys.readouterr().err == (
        "a\\x1b]0;owned\\x07 b\\x9b2J, Grüße, 漢字\nnext\\u202e\n" + 'request path="/\\u001b[2J" key=größer\n'
    )
