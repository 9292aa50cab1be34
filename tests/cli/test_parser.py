"""Every setting that cannot be, by every way to set it: one line that names what was set and what is valid, code 2, and
nothing is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl import cli, envs
from minisgl.cli import flags
from minisgl.cli.parser import Number
from minisgl.config import RANGES, ConfigError
from minisgl.engine import loading
from minisgl.llm import LLM
from minisgl.runner import build
from minisgl.runner.launch import EngineProcess

TABLES = [one for group in (*flags.ENGINE.values(), *flags.SERVER.values()) for one in group]
WORDS = {
    **dict.fromkeys(
        ("cpu_backend", "device", "attention_backend", "kv_dtype", "dtype", "quantization", "routing"), "x"
    ),
    **dict.fromkeys(("tool_call_parser", "reasoning_parser", "adaptive_max_tokens", "memory", "cache_size"), "x"),
    **dict.fromkeys(("weights_cache", "state_quota", "lora", "tp", "dp", "speculative"), "x"),
}
"""A wrong word for each flag of words that has no list of choices."""

VARIABLES = {
    envs.CPU_BACKEND: ("rust", "unknown scheduler 'rust'; valid: python, rust_hotpath"),
    envs.FRONTEND: ("go", "must be rust or python"),
    envs.NO_EXTENSION: ("maybe", "must be 0 or 1"),
    envs.CPU_ISA: ("mmx", "must be one of scalar, avx2"),
    envs.SHADOW: ("2", "must be 0 or 1"),
    envs.SHADOW_REPORT: ("/nowhere/x", "its folder does not exist"),
    envs.SHADOW_EVERY_N: ("0", "must be a number, at least 1"),
    envs.SHADOW_MAX_DIFFS: ("-1", "must be a number, at least 1"),
    envs.TRANSPORT_LATENCY_STATS: ("x", "must be 0 or 1"),
    envs.DISABLE_OVERLAP_SCHEDULING: ("x", "must be 0 or 1"),
    envs.CACHE: (__file__, "is not a folder"),
    envs.ECHO_FAIL_STEPS: ("1;2", "must be numbers separated by commas"),
    envs.ECHO_STATES: ("x", "must be a number, at least 0"),
    envs.FAULTY_CONTROL_PLANE: ("commit", "must be like commit:40:after"),
    envs.HEAD_WAIT: ("x", "must be a whole number of seconds"),
    envs.SHELL_MAX_TOKENS: ("1.5", "must be a whole number"),
    envs.SHELL_TEMPERATURE: ("nan", "must be a number"),
    envs.SHELL_TOP_K: ("x", "must be a whole number"),
    envs.SHELL_TOP_P: ("x", "must be a number"),
    envs.API_KEY: ("\u00e9", "must be printable ASCII"),
}
ANY = {envs.DATA, envs.STEP_DELAY_FILE}
"""Variables of tests, with paths that need not be there."""


def wrong(one: flags.Setting) -> Iterator[str]:
    """Values that the flag cannot have."""
    action = one.add_to(argparse.ArgumentParser(), shown=False)
    if action.choices:
        yield "nosuch"
    if isinstance(action.type, Number):
        yield from ("abc", "", "nan") if action.type.kind is float else ("abc", "1.5", "")
    if one.dest in RANGES:
        least = RANGES[one.dest].low
        yield f"{least:.0f}" if RANGES[one.dest].above else f"{least - 1:.0f}"
        if one.dest not in ("memory", "cache_size", "weights_cache", "state_quota"):
            yield f"{RANGES[one.dest].high + 1:.0f}"
    if one.dest in WORDS:
        yield WORDS[one.dest]


CASES = [(flag, value) for one in TABLES for flag in one.flags for value in wrong(one)]


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*_: object, **__: object) -> Any:
        raise AssertionError("something is loaded before the setting is refused")

    monkeypatch.setattr(EngineProcess, "start", loads)
    monkeypatch.setattr(build, "build_engine", loads)
    monkeypatch.setattr(loading, "load_engine", loads)


def said(capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    """The one line of a command that ends with code 2."""
    assert cli.main(list(typed)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_the_tables_are_whole() -> None:
    assert set(VARIABLES) | ANY == set(envs.ALL)
    actions = [one.add_to(argparse.ArgumentParser(), shown=False) for one in TABLES]
    assert {action.dest for action in actions if isinstance(action.type, Number)} <= set(RANGES)


@pytest.mark.parametrize(("flag", "value"), CASES)
def test_a_wrong_flag(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, "serve", flag, value)
    assert line.startswith(f"minisgl serve: {flag} {value or repr(value)}: "), line
    assert "must be" in line or "valid: " in line or "none of" in line, line


@pytest.mark.parametrize("flag", sorted({flag for flag, _ in CASES}))
def test_a_wrong_line_of_a_file(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = next(value for one, value in CASES if one == flag and value)
    file = tmp_path / "server.yaml"
    file.write_text(
        f"host: 127.0.0.1\n{flag[2:]}: {[value] if flag.startswith('--lora') and 'x' in value else value}\n"
    )
    assert said(capsys, "serve", "--config", str(file)).startswith(f"minisgl serve: {file}:2: {flag[2:]}: ")


@pytest.mark.parametrize("command", [("serve",), ("generate", "x")])
@pytest.mark.parametrize("name", VARIABLES)
def test_a_wrong_variable(
    name: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in (envs.API_KEY, envs.HEAD_WAIT) and command != ("serve",):
        return
    value, why = VARIABLES[name]
    monkeypatch.setenv(name, value)
    line = said(capsys, *command, "--engine", "echo")
    assert line.startswith(f"minisgl {command[0]}: {name}") and why in line, line


def test_conflict_names_how_each_setting_was_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("engine: cpu\ncache-size: 5GB\n")
    assert said(capsys, "serve", "--config", str(file)) == (
        f"minisgl serve: {file}:2: cache-size: 5000000000: needs --cache-dir, the folder to limit"
    )
    assert said(capsys, "serve", "--max-model-len", "9", "--engine", "cpu", "--tp-size", "2") == (
        "minisgl serve: --tp-size 2: cannot be used with --engine cpu: choose --engine torch, or leave it out"
    )


@pytest.mark.parametrize(
    ("field", "value"), [("cpu_backend", "rust"), ("device", "tpu"), ("max_seq_len", 0), ("memory_ratio", 2.0)]
)
def test_a_wrong_setting_of_an_llm(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}={value}: "):
        LLM("smollm2", **{field: value})


def test_a_wrong_variable_of_an_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.CPU_BACKEND, "rust")
    with pytest.raises(ConfigError, match=r"^MINISGL_CPU_BACKEND=rust: unknown scheduler"):
        LLM("smollm2")


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (("sevre",), "minisgl: sevre: unknown command: did you mean serve?"),
        (("serve", "--modle", "x"), "minisgl serve: --modle: unknown flag: did you mean --model?"),
        (("serve", "--prot=80"), "minisgl serve: --prot: unknown flag: did you mean --port?"),
        (("--modle", "x"), "minisgl serve: --modle: unknown flag: did you mean --model?"),
        (("bench", "sevre"), "minisgl bench: sevre: unknown command: did you mean serve?"),
        (("bench", "serve", "--concurency", "3"), "minisgl bench serve: --concurency: unknown flag: did you mean"),
        (("cache", "inof", "x"), "minisgl cache: inof: unknown command: did you mean info?"),
        (("serve", "--port"), "minisgl serve: --port: expected one argument"),
        (("doctor", "--jsn"), "minisgl doctor: --jsn: unknown flag: did you mean --json?"),
        (("serve", "a", "b"), "minisgl serve: b: unexpected argument: see minisgl serve --help"),
        ((), "minisgl: the following arguments are required: COMMAND (see minisgl --help)"),
    ],
)
def test_unknown_names_are_rejected(typed: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, *typed).startswith(line)


def test_the_help_is_short_and_begins_with_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 50 and "COMMAND" in lines[5], lines
