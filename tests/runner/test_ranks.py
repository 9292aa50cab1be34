"""Rank 0's side without processes: what is sent when, what is waited for, what an end means."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl.distributed import ALONE, GroupError
from minisgl.engine.api import EngineStepError, SlotAssignment, StepHandle
from minisgl.engine.echo import EchoEngine
from minisgl.runner.rank_messages import NewBuffers, RankStep, decode
from minisgl.runner.ranks import RankDied, RankEngine
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.step import Events, StepBuffers, StepPlan

PLANE = ControlPlaneConfig(40, 4, 8, 24, 150, (256,))


class FakeRanks:
    """Two ranks; `acks` are what they will say, in order."""

    def __init__(self) -> None:
        self.processes = [None, None]
        self.log: list[str] = []
        self.in_flight: list[int] = []
        self.acks: list[int] = []
        self.dead = ""

    def check(self) -> None:
        if self.dead:
            raise RankDied(self.dead)

    def explain(self, error: GroupError) -> RankDied:
        return RankDied(f"rank 1 is gone ({error})")

    def send(self, frame: bytes) -> None:
        message = decode(frame)
        assert isinstance(message, NewBuffers | RankStep)
        self.log.append("buffers" if isinstance(message, NewBuffers) else f"step {message.plan[0]}")
        if isinstance(message, RankStep):
            self.in_flight.append(message.in_flight)

    def receive_ack(self, *, block: bool) -> int | None:
        if not self.acks:
            if block:
                raise TimeoutError
            return None
        step = self.acks.pop(0)
        self.log.append(f"ack {step}")
        return step

    def kill(self) -> None:
        self.log.append("killed")

    def close(self) -> None:
        self.log.append("closed")


def _engine(ranks: FakeRanks, inner: Any = None) -> RankEngine:
    echo = EchoEngine(num_pages=40, page_size=4, max_rows=8, max_seq_len=150, context_len=150, worker_thread=False)
    return RankEngine(inner or echo, ALONE, ranks)  # type: ignore[arg-type]


def _steps(count: int) -> tuple[list[StepPlan], StepBuffers]:
    """Plans without rows: what they hold does not matter here."""
    plane = make_control_plane("python", PLANE)
    plans = []
    for step in range(count):
        plans.append(plane.schedule(step, Events()))
        plane.commit(step, np.empty(0, np.int32))
    return plans, plane.buffers


def test_a_ring_entry_is_sent_again_when_every_rank_is_done_with_it() -> None:
    ranks = FakeRanks()
    engine = _engine(ranks)
    plans, buffers = _steps(4)
    assert [plan.ring_index for plan in plans] == [0, 1, 0, 1]
    engine.launch(plans[0], buffers, ())
    engine.launch(plans[1], buffers, ())
    assert ranks.log == ["buffers", "step 0", "step 1"]
    ranks.acks = [0, 1]  # one rank is slower
    with pytest.raises(TimeoutError):
        engine.launch(plans[2], buffers, ())
    assert "step 2" not in ranks.log
    ranks.acks = [0]
    engine.launch(plans[2], buffers, ())
    assert ranks.log[-2:] == ["ack 0", "step 2"]
    ranks.acks = [2, 1]
    engine.launch(plans[3], buffers, ())
    assert ranks.log[-3:] == ["ack 2", "ack 1", "step 3"]


def test_ranks_hear_how_many_steps_rank_0_has_not_waited_for() -> None:
    ranks = FakeRanks()
    engine = _engine(ranks)
    plans, buffers = _steps(4)
    first = engine.launch(plans[0], buffers, ())
    second = engine.launch(plans[1], buffers, ())
    first.wait()
    ranks.acks = [0, 0]
    third = engine.launch(plans[2], buffers, ())
    second.wait()
    third.wait()
    third.wait()
    ranks.acks = [1, 1]
    engine.launch(plans[3], buffers, ())
    assert ranks.in_flight == [0, 1, 1, 0]


def test_new_buffers_are_announced() -> None:
    ranks = FakeRanks()
    engine = _engine(ranks)
    for _ in range(2):
        plans, buffers = _steps(1)
        engine.launch(plans[0], buffers, ())
        ranks.acks = [0, 0]
    assert [line for line in ranks.log if "ack" not in line] == ["buffers", "step 0", "buffers", "step 0"]


class Broken:
    """An engine whose steps end with `error`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        def wait() -> None:
            raise self._error

        return SimpleNamespace(wait=wait)  # type: ignore[return-value]


def test_a_broken_collective_says_which_rank_is_gone() -> None:
    plans, buffers = _steps(1)
    engine = _engine(FakeRanks(), Broken(GroupError("connection closed")))
    with pytest.raises(RankDied, match=r"rank 1 is gone \(connection closed\)"):
        engine.launch(plans[0], buffers, ()).wait()


@pytest.mark.parametrize(("error", "killed"), [(EngineStepError("not finite"), False), (RuntimeError("bug"), True)])
def test_only_an_error_that_all_ranks_have_leaves_them_alive(error: Exception, killed: bool) -> None:
    ranks = FakeRanks()
    plans, buffers = _steps(1)
    with pytest.raises(type(error), match=str(error)):
        _engine(ranks, Broken(error)).launch(plans[0], buffers, ()).wait()
    assert ("killed" in ranks.log) == killed


class Refuses:
    """An engine whose launches end with an error."""

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        raise RuntimeError("out of memory")


def test_a_launch_that_fails_on_rank_0_alone_ends_the_others() -> None:
    ranks = FakeRanks()
    plans, buffers = _steps(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        _engine(ranks, Refuses()).launch(plans[0], buffers, ())
    assert ranks.log[-1] == "killed"


def test_what_a_broken_collective_gave_is_not_believed() -> None:
    """It is aborted when a rank is gone, and ends then as if all were well."""
    ranks = FakeRanks()
    plans, buffers = _steps(1)
    handle = _engine(ranks).launch(plans[0], buffers, ())
    ranks.dead = "tensor-parallel rank 1 was ended by signal 9"
    with pytest.raises(RankDied, match="rank 1 was ended by signal 9"):
        handle.wait()


def test_nothing_is_launched_when_a_rank_is_gone() -> None:
    ranks = FakeRanks()
    ranks.dead = "tensor-parallel rank 1 ended with exit code 3"
    plans, buffers = _steps(1)
    with pytest.raises(RankDied, match="exit code 3"):
        _engine(ranks).launch(plans[0], buffers, ())
    assert not ranks.log
