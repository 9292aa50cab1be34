"""Recorded calls, driven again."""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig, ControlPlaneError
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.policies import SchedulePolicy
from minisgl.scheduler.trace import RecordingControlPlane, TraceError, parse_trace, read_trace, replay
from minisgl.scheduler.wrapped import make_faulty
from minisgl.step import Abort, Draft, Events, TokenBudget
from tests.helpers.e2e import serving, until
from tests.helpers.forking import run
from tests.helpers.parity import draw_arrival
from tests.helpers.scheduler import arrival

CONFIG = ControlPlaneConfig(24, 4, 4, 16, 64, (2,), graph_sizes=(1, 2, 4))


def load(plane: ControlPlane, num_steps: int = 60) -> None:
    """Random requests with a few aborts; tokens are drawn too."""
    rng = random.Random(7)
    sequences: list[list[int]] = []
    for step in range(num_steps):
        events = Events()
        if rng.random() < 0.4:
            events.add(draw_arrival(rng.randint, step, 64, sequences))
        if rng.random() < 0.1:
            events.add(Abort(rng.randrange(num_steps)))
        plan = plane.schedule(step, events)
        plane.commit(step, np.array([rng.randrange(3) for _ in range(plan.num_rows)], np.int32))


def record(path: Path, config: ControlPlaneConfig = CONFIG) -> None:
    with path.open("wb") as file:
        load(RecordingControlPlane(make_control_plane("python", config), config, file))


@pytest.mark.parametrize("policy", ["fcfs", "srpf"])
@pytest.mark.parametrize("name", ["python", "rust_hotpath"])
def test_a_trace_gives_the_same_decisions_again(tmp_path: Path, name: str, policy: SchedulePolicy) -> None:
    config = replace(CONFIG, schedule_policy=policy)
    record(tmp_path / "trace", config)
    trace = read_trace(tmp_path / "trace")
    assert trace.config == config and len(trace.calls) == 120
    found = replay(trace, make_control_plane(name, trace.config))
    assert found.num_steps == 60 and found.digests == replay(trace, make_control_plane("python", config)).digests
    assert len(set(found.digests)) > 60


@pytest.mark.parametrize("name", ["python", "rust_hotpath"])
def test_drafts_from_outside_are_in_the_trace(tmp_path: Path, name: str) -> None:
    config = replace(CONFIG, max_draft_len=3)
    drafts = [Draft(1, 4, (1, 1, 1)), Draft(1, 6, (1, 1)), Draft(1, 7, ())]
    with (tmp_path / "trace").open("wb") as file:
        plane = RecordingControlPlane(make_control_plane("python", config), config, file)
        for step in range(6):
            events = [arrival(1, [5, 6, 7], max_tokens=20)] if step == 0 else drafts[step - 1 : step]
            plan = plane.schedule(step, Events(list(events)))
            plane.commit(step, np.ones(plan.num_rows, np.int32))
    assert plane.stats().num_accepted_total >= 4
    trace = read_trace(tmp_path / "trace")
    given = [event for _, call in trace.calls if isinstance(call, Events) for event in call]
    assert given[1:] == drafts
    found = replay(trace, other := make_control_plane(name, config))
    assert not found.error and found.digests == replay(trace, make_control_plane("python", config)).digests
    assert other.stats() == plane.stats()


def test_a_call_that_breaks_the_control_plane_is_in_the_trace(tmp_path: Path) -> None:
    with (tmp_path / "trace").open("wb") as file, pytest.raises(ControlPlaneError):
        load(RecordingControlPlane(make_faulty(make_control_plane("python", CONFIG), "commit:9:before"), CONFIG, file))
    assert [step for step, _ in read_trace(tmp_path / "trace").calls][-2:] == [9, 9]


def test_a_trace_that_was_cut_off_is_read_up_to_the_cut(tmp_path: Path) -> None:
    record(tmp_path / "trace")
    whole = (tmp_path / "trace").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-3])
    assert len(read_trace(tmp_path / "cut").calls) == 119
    (tmp_path / "none").write_bytes(b"\x05\x00\x00\x00hello" + whole)
    with pytest.raises(TraceError, match="none"):
        read_trace(tmp_path / "none")


def test_a_trace_from_before_drafts_is_one_without(tmp_path: Path) -> None:
    """Its frames are as long as they were then."""
    record(tmp_path / "trace")
    data, at, old = (tmp_path / "trace").read_bytes(), 0, b""
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        frame = msgspec.msgpack.decode(data[at + 4 : at + 4 + size])
        if frame[0] == "trace":
            assert frame.pop() == 0
        if frame[0] == "schedule":
            for event in frame[2]:
                if event[0] == "arrival":
                    event.pop()
                if event[0] == "stored":  # of a later version than drafts
                    event[-3] = False
        packed = msgspec.msgpack.encode(frame)
        old += len(packed).to_bytes(4, "little") + packed
        at += 4 + size
    assert len(old) < len(data)
    trace = parse_trace(old, "old")
    assert trace.config == CONFIG and trace.config.max_draft_len == 0
    found = replay(trace, make_control_plane("python", CONFIG))
    arrivals = [event for _, given in trace.calls if isinstance(given, Events) for event in given]
    assert not found.error and not any(getattr(event, "no_drafts", False) for event in arrivals)


def shadow_calls(url: str) -> dict[str, float]:
    """Return the calls that a server's shadow compared, by result."""
    text = httpx.get(url + "/metrics").text
    return {
        result: float(value) for result, value in re.findall(r'^minisgl:shadow_calls_total.*"(\w+)"} (\S+)', text, re.M)
    }


def test_a_server_records_what_replay_drives(tmp_path: Path) -> None:
    """`serve --record-trace` with a shadow, then `minisgl replay` on both."""
    trace, report = tmp_path / "trace", tmp_path / "report"
    shadow = ("--shadow", "--shadow-report", str(report))
    flags = ("--engine", "echo", "--num-pages", "64", "--max-step-ms", "9", "--record-trace", str(trace), *shadow)
    with serving(*flags) as server:
        for index in range(8):
            body = {"prompt": "a prompt " * index + "end", "max_tokens": 20, "n": 3}
            assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200
        until(lambda: shadow_calls(server.url)["equal"] > 40, "no call was equal")
        counts = shadow_calls(server.url)
        assert (counts["different"], counts["failed"]) == (0, 0)
    assert not report.exists()
    said = [line for line in server.lines if "shadow: " in line]
    assert "python gets the calls of rust_hotpath" in said[0] and "of every step are compared" in said[0]
    assert len(said) == 2 and "equal, 0 different, 0 failed" in said[1]
    first = next(given for _, given in read_trace(trace).calls if isinstance(given, Events))
    assert isinstance(first.items[0], TokenBudget), "what a step may take is in the trace"
    command = [sys.executable, "-m", "minisgl", "replay", str(trace), "--repeat", "2"]
    done = run(command)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["first_difference"] is None and result["calls"] > 40
    assert "\nequal: " in done.stdout and f" {result['calls']} calls, every plan, array and count" in done.stdout
    assert set(result["us_per_step"]) == {"python", "rust_hotpath"}
    assert f"shadow: {result['calls']} calls were compared: " in said[1], "the last calls are counted, too"
    wrong = run([*command[:4], str(tmp_path / "no")])
    assert wrong.returncode == 2 and "no" in wrong.stderr
