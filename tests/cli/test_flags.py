"""The help: every flag stands in a named group, says what it does, and shows its default."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minisgl import cli
from minisgl.cli import chat, generate, serve
from minisgl.cli.flags import ENGINE, SERVER, engine_config
from tests.helpers.deploy import served

PARSERS: dict[str, Callable[..., argparse.ArgumentParser]] = {
    "serve": serve.add_parser,
    "chat": chat.add_parser,
    "generate": generate.add_parser,
}

WHOLE = ("help", "config")  # flags of the whole command, in no group


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


def test_a_default_that_a_command_or_a_file_sets_is_shown_instead() -> None:
    parser = parser_of("serve")
    parser.set_defaults(max_running_requests=7)
    text = re.sub(r"\s+", " ", parser.format_help())
    assert "the others wait (default: 7)" in text and "(default: 64, on a CUDA device" not in text


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["generate", "-h"], ["chat", "-h"]])
def test_help_ends_well(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 0 and "minisgl" in capsys.readouterr().out


def test_no_abbreviations(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--por", "1"]) == 2
    assert "--por: unknown flag: did you mean --port?" in capsys.readouterr().err


def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("serve", "chat", "generate", "doctor"))


def test_serve_shows_a_number_of_flags_that_one_can_read() -> None:
    shown = [action.option_strings for _, action in flags(parser_of("serve")) if action.option_strings]
    assert len(shown) <= 60, "hide what few need: `hidden` of cli/flags.py, and a row of docs/operations.md"


def test_flags_that_compare_schedulers_stand_under_one_heading() -> None:
    heading = "scheduler: A/B, shadow and traces"
    shown = [action.option_strings[0] for title, action in flags(parser_of("serve")) if title == heading]
    companions = ["--shadow-report", "--shadow-every-n", "--shadow-max-diffs"]
    assert shown == ["--cpu-backend", "--shadow", *companions, "--record-trace"]


def test_flags_of_a_shadow_win_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_CPU_BACKEND_SHADOW_EVERY_N", "5")
    monkeypatch.setenv("MINISGL_CPU_BACKEND_SHADOW_MAX_DIFFS", "7")
    args = parser_of("serve").parse_args(["--shadow", "--shadow-every-n", "3", "--shadow-report", "a"])
    debug = engine_config(args).debug
    assert (debug.shadow, debug.shadow_every_n, debug.shadow_max_diffs, debug.shadow_report) == (True, 3, 7, "a")
    assert engine_config(parser_of("serve").parse_args([])).debug.shadow_every_n == 5


def test_hidden_flags_are_on_the_operations_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    hidden = [one for group in (ENGINE | SERVER).values() for one in group if not one.shown]
    assert hidden and [one.flags[0] for one in hidden if f"| `{one.flags[0]}" not in page] == []


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (["a"], "a"),
        (["--port", "1", "a"], "a"),
        (["--model", "a"], "a"),
        (["a", "--model-path", "a"], "a"),
        (["--config", "FILE"], "c"),
        (["--config", "FILE", "a"], "a"),
        (["--config", "FILE", "--model", "a"], "a"),
        ([], "smollm2"),
    ],
)
def test_the_model_is_a_word_or_a_flag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], model: str
) -> None:
    (tmp_path / "c.yaml").write_text("model: c\n")
    typed = [str(tmp_path / "c.yaml") if one == "FILE" else one for one in arguments]
    assert served(monkeypatch, ["serve", *typed]).engine.model == model


@pytest.mark.parametrize("arguments", [["a", "--model", "b"], ["--model", "b", "a"]])
def test_two_models_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert cli.main(["serve", *arguments]) == 2
    assert "--model b: is also given as a" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["python", "rust_hotpath", "rust_parts:radix"])
def test_the_variable_chooses_the_scheduler_and_the_flag_wins(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("MINISGL_CPU_BACKEND", name)
    assert served(monkeypatch, ["serve"]).engine.cpu_backend == name
    assert served(monkeypatch, ["serve", "--cpu-backend", "rust_parts"]).engine.cpu_backend == "rust_parts"
