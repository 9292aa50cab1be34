"""What a loop tells of its steps while somebody looks, and that it tells nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from minisgl.engine.echo import EchoEngine
from minisgl.message import WATCH_S, AddRequest, FromEngine, StepView, Watch, Watched
from minisgl.runner import watching
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.step import FinishReason

Make = Callable[[ControlPlaneConfig], ControlPlane]


class Run:
    """A loop on the echo engine; `sent` is what came out of it."""

    def __init__(self, make: Make, *, num_pages: int = 64, max_rows: int = 4, budget: int = 8) -> None:
        config = ControlPlaneConfig(num_pages, 4, max_rows, budget, 200, ())
        self.plane = make(config)
        self.engine = EchoEngine(
            num_pages=num_pages, page_size=4, max_rows=max_rows, max_seq_len=200, context_len=200, eos_ids=()
        )
        self.sent: list[FromEngine] = []
        self.loop = StepLoop(self.plane, self.engine, self._send)

    def _send(self, messages: Sequence[FromEngine]) -> None:
        self.sent += messages

    def rest(self) -> None:
        while not self.loop.idle:
            self.loop.step([])

    @property
    def watched(self) -> list[Watched]:
        return [one for one in self.sent if isinstance(one, Watched)]

    @property
    def steps(self) -> list[StepView]:
        return [step for one in self.watched for step in one.steps]


def add(req_id: int, length: int, max_tokens: int, first: int = 0) -> AddRequest:
    tokens = np.arange(first, first + length, dtype=np.int32)
    return AddRequest(req_id, tokens.tobytes(), SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(watching.Watching.__init__, "__defaults__", (lambda: now[0],))
    monkeypatch.setattr(watching.Recent.__init__, "__defaults__", (lambda: -1.0,))  # it keeps nothing
    return now


def test_views_have_the_rows_of_a_request(control_plane: Make, clock: list[float]) -> None:
    """A prompt of 10 tokens under a budget of 8 is two chunks; then two decodes make three tokens."""
    run = Run(control_plane)
    run.loop.step([Watch(True, False), add(5, 10, 3)])
    run.rest()
    rows = [row for step in run.steps for row in step.rows]
    assert rows == [(5, False, 8, 0, 8), (5, False, 2, 0, 10), (5, True, 1, 0, 11), (5, True, 1, 0, 12)]
    assert [step.admitted for step in run.steps if step.admitted] == [[(5, 0)]]
    assert [step.finished for step in run.steps if step.finished] == [[(5, FinishReason.LENGTH)]]
    numbers = [step.step for step in run.steps]
    assert numbers == sorted(set(numbers)) and len(numbers) == 4
    assert all(len(step.phases) == 4 and min(step.phases) >= 0 for step in run.steps)
    assert [step.num_waiting for step in run.steps] == [0] * 4 and run.steps[-1].num_free_pages <= 64


def test_views_have_the_cached_tokens(control_plane: Make, clock: list[float]) -> None:
    run = Run(control_plane)
    run.loop.step([add(1, 9, 2)])
    run.rest()
    run.loop.step([Watch(True, False), add(2, 9, 2)])
    run.rest()
    assert run.steps[0].rows == [(2, False, 1, 8, 9)] and run.steps[0].admitted == [(2, 8)]


def test_views_have_retractions_by_request(control_plane: Make, clock: list[float]) -> None:
    run = Run(control_plane, num_pages=8, budget=32)
    run.plane.reserve_ratio = 0  # type: ignore[attr-defined]  # admit whatever has room for its prompt
    run.loop.step([Watch(True, False), add(1, 8, 20), add(2, 8, 20, 100), add(3, 7, 20, 50)])
    run.rest()
    total = run.plane.stats().num_retracted_total
    assert total > 0
    assert sum(step.num_retracted for step in run.steps) == total
    told = [req_id for step in run.steps for req_id in step.retracted]
    assert len(told) == total and set(told) <= {1, 2, 3}
    readmitted = [req_id for step in run.steps for req_id, _ in step.admitted]
    assert sorted(readmitted) == sorted([1, 2, 3, *told])
    assert sorted(req_id for step in run.steps for req_id, _ in step.finished) == [1, 2, 3]


def test_without_watchers_nothing_is_built_or_sent(
    control_plane: Make, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("somebody looks")

    monkeypatch.setattr(watching.Watching, "committed", never)
    run = Run(control_plane)
    run.loop.step([add(1, 10, 5)])
    run.rest()
    assert not run.watched and run.loop._watching is None


def test_views_end_when_no_watcher_renews(control_plane: Make, clock: list[float]) -> None:
    run = Run(control_plane)
    run.loop.step([Watch(True, True), add(1, 10, 5)])
    run.rest()
    assert run.watched
    clock[0] += WATCH_S + 0.1
    before, told = len(run.watched), len(run.steps)
    run.loop.step([add(2, 10, 5)])
    run.rest()
    assert len(run.watched) == before and run.loop._watching is None
    run.loop.step([Watch(True, False), add(3, 10, 5)])
    run.rest()
    assert [step.step for step in run.steps[told : 2 * told]] == [step.step for step in run.steps[:told]]  # the recent
    assert {row[0] for step in run.steps[2 * told :] for row in step.rows} == {3}


def test_frames_are_few_and_bounded_and_say_what_is_missing(control_plane: Make, clock: list[float]) -> None:
    run = Run(control_plane)
    run.loop.step([Watch(True, False), add(1, 4, 100)])
    run.rest()  # the clock stands still: the first goes at once, the others when it rests
    first, last = run.watched
    assert len(first.steps) == 1 and first.at == 0
    assert len(last.steps) == watching.MAX_STEPS and last.at + len(last.steps) == 100


@pytest.mark.parametrize("steps", [False, True])
def test_each_request_for_the_tree_gets_one_view(control_plane: Make, clock: list[float], steps: bool) -> None:
    run = Run(control_plane, budget=64)
    run.loop.step([add(1, 17, 2)])
    run.rest()
    run.loop.step([Watch(steps, True)])
    (found,) = [one.tree for one in run.watched if one.tree is not None]
    assert (found.num_nodes, found.num_tokens) == (1, 16)
    ((number, parent, tokens, depth, locks, age, children, pinned, saved, begins),) = found.nodes
    assert (parent, tokens, depth, locks, children, pinned) == (0, 16, 16, 0, 0, False)
    assert number > 0 and not saved and age >= 0 and begins == list(range(16))
    run.loop.step([])
    assert len([one for one in run.watched if one.tree is not None]) == 1
    run.loop.step([Watch(False, True), add(2, 30, 1)])
    run.rest()
    assert [one.tree.num_nodes for one in run.watched if one.tree is not None] == [1, 2]


def test_rows_beyond_the_limit_of_a_view_are_counted(
    control_plane: Make, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MAX_ROWS", 2)
    run = Run(control_plane, budget=32)
    run.loop.step([Watch(True, False), *(add(i, 4, 3, 10 * i) for i in range(4))])
    run.rest()
    assert {(len(step.rows), step.num_rows_left_out) for step in run.steps} == {(2, 2)}


def test_a_later_watcher_gets_the_last_steps(
    control_plane: Make, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps that follow each other too fast only some are kept, and none is told twice."""
    kept_at = [0.0]

    def later() -> float:
        kept_at[0] += watching.KEEP_EVERY_S / 2 + 1e-6
        return kept_at[0]

    monkeypatch.setattr(watching.Recent.__init__, "__defaults__", (later,))
    run = Run(control_plane)
    run.loop.step([add(5, 10, 9)])
    run.rest()
    assert run.watched == []
    run.loop.step([Watch(True, False), add(6, 3, 2, first=50)])
    run.rest()
    rows = [[(row[0], row[4]) for row in step.rows] for step in run.steps]
    assert rows == [[(5, 8)], [(5, 11)], [(5, 13)], [(5, 15)], [(5, 17)], [(6, 3)], [(6, 4)]]
    assert [one.at for one in run.watched][:1] == [0]


def test_steps_stored_without_watchers_are_bounded(control_plane: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "KEEP_EVERY_S", 0.0)
    run = Run(control_plane)
    run.loop.step([add(5, 10, watching.MAX_STEPS + 20)])
    run.rest()
    run.loop.step([Watch(True, False)])
    run.rest()
    assert len(run.steps) == watching.MAX_STEPS
    assert run.steps[-1].finished and run.steps[-1].rows[0][0] == 5
