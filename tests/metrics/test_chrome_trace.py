"""Chrome traces of the step loop and of the event loop."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from minisgl.metrics.chrome_trace import DEVICE, LOOP, ChromeTrace
from minisgl.metrics.server_metrics import Metrics
from minisgl.metrics.steps import step_timers
from tests.helpers.sim import Sim, constant, request


def test_a_chrome_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    sim = Sim(constant(10.0))
    sim.loop.timers = step_timers(3, said.append)
    sim.run([request(0, 3, 10)])
    file = tmp_path / f"minisgl-profile-engine-{os.getpid()}.json"
    assert len(said) == 1 and file.name in said[0]
    events = json.loads(file.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["pid"] == os.getpid() for event in complete)
    forwards = [event for event in complete if event["tid"] == DEVICE]
    assert [event["args"]["step"] for event in forwards] == [0, 1, 2]
    assert [event["dur"] for event in forwards] == [pytest.approx(10_000)] * 3
    for phase in ("schedule", "launch", "wait", "commit", "send"):
        steps = [event["args"]["step"] for event in complete if event["tid"] == LOOP and event["name"] == phase]
        assert steps[:3] == [0, 1, 2], phase
    loop = sorted((e["ts"], e["dur"]) for e in complete if e["tid"] == LOOP)
    assert all(a + d <= b + 0.01 for (a, d), (b, _) in itertools.pairwise(loop))  # none overlaps the next


def test_a_trace_that_ends_early_or_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    sim = Sim()
    sim.loop.timers = step_timers(1000, said.append)
    sim.run([request(0, 3, 4)])
    assert not said
    sim.loop.timers.close()
    sim.loop.timers.close()
    assert len(said) == 1 and len(list(tmp_path.iterdir())) == 1
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    sim = Sim()
    sim.loop.timers = step_timers(2, said.append)
    gone.rmdir()
    sim.run([request(0, 3, 4)])
    assert len(said) == 2 and "cannot be written" in said[1] and len(sim.tokens[0]) == 4


def test_the_event_loop_in_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    metrics = Metrics(lambda: None, lambda: None, lambda: True, trace=ChromeTrace(2, "http", said.append))
    for _ in range(2):
        metrics.tokenize.add(1_000_000)
        metrics.detokenize.add(5)
        metrics.dispatch.add(2_000_000)
    (file,) = tmp_path.iterdir()
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["dur"]) for event in events] == 2 * [("tokenize", 1000), ("dispatch", 2000)]
    assert metrics.dispatch.count == 2 and metrics.dispatch.total_ns == 4_000_000
