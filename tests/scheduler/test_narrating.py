"""`--log-level debug` tells what each step computes and sends; below it nothing stands in the way of a step. And
`generate` shows text while it comes."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from minisgl import LLM, SamplingParams, cli
from minisgl.llm import RequestOutput
from minisgl.runner.build import ECHO_CONTEXT_LEN
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.narrating import NarratingControlPlane
from minisgl.server import log
from minisgl.step import Events
from tests.helpers.scheduler import arrival

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=0)


def told(capsys: pytest.CaptureFixture[str], level: str, prompts: list[str]) -> list[str]:
    with LLM("none", engine="echo", log_level=level, page_size=4, max_prefill_length=8) as llm:
        for prompt in prompts:
            llm.generate(prompt, GREEDY, progress=False)
    return capsys.readouterr().err.splitlines()


def test_each_step_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "debug", ["0123456789", "0123456789"])
    assert lines[:4] == [
        "request 0 arrives: 10 prompt tokens",
        "step 0: request 0 starts, 0 tokens cached",
        "step 0: prefill of request 0, 8 tokens: 8 of 10 are done",
        "step 1: prefill of request 0, 2 tokens: 10 of 10 are done",
    ]
    assert "step 2: decode, 1 row, a token each" in lines and "step 2: sent, a token each: request 0" in lines
    ends = [line for line in lines if "ends" in line]
    assert [re.sub(r"step \d+", "step", line) for line in ends] == [
        "step: request 0 ends: length",
        "step: request 1 ends: length",
    ]
    assert any(re.fullmatch(r"step \d+: request 1 starts, 8 tokens cached", line) for line in lines)
    assert any(re.fullmatch(r"step \d+: prefill of request 1, 2 tokens: 10 of 10 are done", line) for line in lines)


def test_what_is_told_is_measured_as_well() -> None:
    with LLM("none", engine="echo", log_level="debug") as llm:
        llm.generate("hello", GREEDY, progress=False)
        assert isinstance(llm._control_plane, NarratingControlPlane)
        timers = llm._loop.timers
        assert timers.metadata.count == timers.schedule.count > 0


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_below_it_nothing_is_told_of_steps(capsys: pytest.CaptureFixture[str], level: str) -> None:
    assert told(capsys, level, ["hello"]) == []
    with LLM("none", engine="echo", log_level=level) as llm:
        assert not isinstance(llm._control_plane, NarratingControlPlane)


@pytest.mark.parametrize(("level", "shown"), [("info", True), ("warning", True), ("error", False)])
def test_warnings_of_the_offline_api_have_a_level(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str, shown: bool
) -> None:
    monkeypatch.setenv("MINISGL_PYNCCL_MAX_BUFFER_SIZE", "1")
    assert bool(told(capsys, level, [])) is shown


def test_many_requests_of_a_step_are_one_line(control_plane: Callable[[ControlPlaneConfig], ControlPlane]) -> None:
    lines: list[str] = []
    config = ControlPlaneConfig(
        num_pages=64, page_size=4, max_running_requests=16, max_prefill_length=256, context_len=ECHO_CONTEXT_LEN
    )
    plane = NarratingControlPlane(control_plane(config), lines.extend)
    plan = plane.schedule(0, Events([arrival(i, range(i, i + 3)) for i in range(10)]))
    plane.commit(0, np.full(plan.num_rows, 7, np.int32))
    assert lines[-1] == "step 0: sent, a token each: requests 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    plane.schedule(1, Events())
    assert lines[-1] == "step 1: decode, 10 rows, a token each"


@pytest.fixture
def loggers() -> Iterator[None]:
    names = ("minisgl", "minisgl.access", "uvicorn")
    before = {name: (logging.getLogger(name).level, list(logging.getLogger(name).handlers)) for name in names}
    yield
    for name, (level, handlers) in before.items():
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).handlers[:] = handlers


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["step", "line", "warning", "error"]),
        ("info", ["line", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_levels_of_a_server(loggers: None, capsys: pytest.CaptureFixture[str], level: str, shown: list[str]) -> None:
    log.set_up("text", access=True, level=level)
    log.narrate(["step"])
    log.say("line")
    log.warn("warning")
    log.complain("error")
    assert capsys.readouterr().err.split() == shown


# --- text while it comes ---


def test_text_is_told_while_it_comes() -> None:
    pieces: list[tuple[str | None, str]] = []
    with LLM("none", engine="echo") as llm:

        def take(output: RequestOutput, piece: str) -> None:
            assert output.text.startswith("".join(one for of, one in pieces if of == output.prompt) + piece)
            pieces.append((output.prompt, piece))

        outputs = llm.generate(["one", "two"], GREEDY, progress=False, on_text=take)
        assert len(pieces) > 2
        for output in outputs:
            assert "".join(piece for of, piece in pieces if of == output.prompt) == output.text
        pieces.clear()
        llm.generate("three", GREEDY, progress=False)
        assert pieces == []


def test_who_takes_the_text_may_fail() -> None:
    with LLM("none", engine="echo") as llm:

        def fail(output: RequestOutput, piece: str) -> None:
            raise BrokenPipeError

        with pytest.raises(BrokenPipeError):
            llm.generate(["one", "two"], GREEDY, progress=False, on_text=fail)
        assert len(llm.generate("one", GREEDY, progress=False)[0].token_ids) == 4


class Screen(io.StringIO):
    """What has been flushed, each time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def test_generate_shows_text_while_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    flags = ["--engine", "echo", "--max-tokens", "24", "--raw", "--sampling-seed", "0"]
    assert cli.main(["generate", "hello", *flags]) == 0
    with LLM("none", engine="echo") as llm:
        params = SamplingParams(temperature=0, max_tokens=24, seed=0)
        whole = llm.generate("hello", params, progress=False)[0].text
    assert screen.getvalue() == whole + "\n"
    assert len([seen for seen in dict.fromkeys(screen.seen) if 0 < len(seen) < len(whole)]) > 3


def test_generate_ends_when_nobody_reads() -> None:
    command = [sys.executable, "-m", "minisgl", "generate", "hi", "--engine", "echo", "--max-tokens", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1
