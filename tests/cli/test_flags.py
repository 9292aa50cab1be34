"""The help: every flag stands in a named group, says what it does, and shows its default."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator

import pytest

from minisgl import cli
from minisgl.cli import chat, generate, serve

PARSERS: dict[str, Callable[..., argparse.ArgumentParser]] = {
    "serve": serve.add_parser,
    "chat": chat.add_parser,
    "generate": generate.add_parser,
}

WHOLE = ("help", "config", "shell")  # flags of the whole command, in no group


def parser_of(name: str) -> argparse.ArgumentParser:
    return PARSERS[name](argparse.ArgumentParser().add_subparsers())


def flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.help != argparse.SUPPRESS:
                yield group.title or "", action


@pytest.mark.parametrize("name", PARSERS)
def test_every_flag_is_explained_in_a_group(name: str) -> None:
    for title, action in flags(parser_of(name)):
        assert action.help, f"{action.option_strings} has no help"
        if action.option_strings and action.dest not in WHOLE:
            assert title != "options", f"{action.option_strings} is in no group"


@pytest.mark.parametrize("name", PARSERS)
def test_every_default_is_shown(name: str) -> None:
    parser = parser_of(name)
    text = re.sub(r"\s+", " ", parser.format_help())
    for _, action in flags(parser):
        if action.default not in (None, False, argparse.SUPPRESS):
            assert f"(default: {action.default})" in text, action.option_strings
        elif action.default is None and action.option_strings and action.dest not in WHOLE:
            assert "(default" in (action.help or ""), f"{action.option_strings}: what happens without it?"


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["generate", "-h"], ["chat", "-h"]])
def test_help_ends_well(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 0 and "minisgl" in capsys.readouterr().out


def test_no_abbreviations(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "--por", "1"])
    assert end.value.code == 2 and "--por" in capsys.readouterr().err


def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("serve", "chat", "generate", "doctor"))
