"""`--log-level debug` tells what each step computes and sends; below it nothing stands in the way of a step."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl.runner.build import ECHO_CONTEXT_LEN
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig, metadata_time_ns
from minisgl.scheduler.wrapped import NarratingControlPlane
from minisgl.step import Events
from tests.helpers.scheduler import arrival

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=0)


def told(capsys: pytest.CaptureFixture[str], level: str, prompts: list[str]) -> list[str]:
    with LLM("none", engine="echo", log_level=level, page_size=4, max_prefill_length=8) as llm:
        for prompt in prompts:
            llm.generate(prompt, GREEDY, progress=False)
    return capsys.readouterr().err.splitlines()


def test_each_step_is_narrated(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_below_level_debug_no_step_is_narrated(capsys: pytest.CaptureFixture[str], level: str) -> None:
    assert told(capsys, level, ["hello"]) == []


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
    assert metadata_time_ns(plane) > 0, "it is measured like one that nobody narrates"
