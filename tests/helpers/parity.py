"""Comparison of two schedulers under the same random events: every plan, live array, output and count must be equal.

Nothing is computed: sampled tokens are drawn like the events. `Draw` is a function (low, high) -> int, so that the same
runs come from a seed or from hypothesis, which shrinks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from time import perf_counter
from typing import Any

import numpy as np

from minisgl.scheduler.api import ControlPlaneConfig, ControlPlaneError
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.digest import live_regions
from minisgl.scheduler.reference import ReferenceControlPlane
from minisgl.step import (
    Arrival,
    Event,
    EventError,
    Events,
    ForwardFailed,
    RingEntry,
    StepPlan,
)

Draw = Callable[[int, int], int]
PLAN_FIELDS = tuple(one.name for one in fields(StepPlan))
OUTPUT_ARRAYS = ("req_ids", "tokens", "reasons", "rows")


class Divergence(AssertionError):
    """First difference between the schedulers, with the calls that led to it."""

    def __init__(self, what: str, config: ControlPlaneConfig, log: list[tuple[int, object]]) -> None:
        calls = "\n".join(f"  {step}: {data}" for step, data in log)
        super().__init__(f"{what}\n{config}\n{calls}")


@dataclass
class Pair:
    """Two schedulers under comparison. `log` holds the last `keep` calls: the events of a schedule, or the tokens of a
    commit. `seconds` is the time spent in each scheduler."""

    config: ControlPlaneConfig
    keep: int | None = None
    backend: str = "rust_hotpath"
    ours: Any = field(init=False)
    theirs: Any = field(init=False)
    log: deque[tuple[int, object]] = field(init=False)
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def __post_init__(self) -> None:
        self.ours, self.theirs = ReferenceControlPlane(self.config), make_control_plane(self.backend, self.config)
        self.log = deque(maxlen=self.keep)

    def schedule(self, step: int, events: list[Event]) -> StepPlan:
        """Schedule on both and compare. Events that both refuse with the same text are retried without their pins."""
        self.log.append((step, events))
        plan, other = self._both(lambda plane: plane.schedule(step, Events(list(events))))
        self._same("refusal", *(str(one) if isinstance(one, EventError) else None for one in (plan, other)))
        if isinstance(plan, EventError):
            return self.schedule(step, without_pins(events))
        for name in PLAN_FIELDS:
            self._same(f"plan.{name}", getattr(plan, name), getattr(other, name))
        regions = zip(
            RingEntry.__slots__,
            live_regions(plan, self.ours.buffers.ring[plan.ring_index]),
            live_regions(other, self.theirs.buffers.ring[plan.ring_index]),
            strict=True,
        )
        for name, one, two in regions:
            self._same_array(name, one, two)
        self._same_counts()
        return plan  # type: ignore[no-any-return]

    def commit(self, step: int, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> list[int]:
        """Commit on both and compare; return the ids of requests that ended."""
        self.log.append((step, tokens.tolist()))
        output, other = self._both(lambda plane: plane.commit(step, tokens))
        for name in OUTPUT_ARRAYS:
            self._same_array(f"output.{name}", getattr(output, name), getattr(other, name))
        self._same_counts()
        return output.req_ids[output.reasons != 0].tolist()  # type: ignore[no-any-return]

    def _same_counts(self) -> None:
        self._same("stats", self.ours.stats(), self.theirs.stats())
        self._same("drafts wanted", self.ours.drafts_wanted(), self.theirs.drafts_wanted())

    def check(self) -> None:
        self.check_pages()
        self._same("tree", sorted(self.ours.tree_pages()), sorted(self.theirs.tree_pages()))
        self._same("states", sorted(self.ours.tree_states()), sorted(self.theirs.tree_states()))
        paths = [np.array([*path, 5], np.int32) for path, _ in self.ours.tree_pages()[:3]]
        self._same(
            "cached",
            *(
                [one.cached_pages(path, space) for path in paths for space in range(3)]
                for one in (self.ours, self.theirs)
            ),
        )
        self._same("tree view", self.ours.tree_view(5), self.theirs.tree_view(5))

    def check_pages(self) -> None:
        """Compare everything but the trees, whose paths grow with the square of long prompts."""
        self.theirs.check()
        self._same("free pages", self.ours.free_pages(), self.theirs.free_pages())
        self._same("ratio", self.ours.reserve_ratio, self.theirs.reserve_ratio)

    def _both(self, call: Callable[[Any], Any]) -> tuple[Any, Any]:
        results = []
        for i, (name, plane) in enumerate((("python", self.ours), (self.backend, self.theirs))):
            began = perf_counter()
            try:
                results.append(_unless_refused(call, plane))
            except (ControlPlaneError, ValueError) as error:
                raise Divergence(f"{name} fails: {error}", self.config, list(self.log)) from error
            self.seconds[i] += perf_counter() - began
        return results[0], results[1]

    def _same_array(self, what: str, one: np.ndarray[Any, Any], two: np.ndarray[Any, Any]) -> None:
        if one.dtype != two.dtype or one.tobytes() != two.tobytes():
            self._same(what, (one.dtype, one.tolist()), (two.dtype, two.tolist()))

    def _same(self, what: str, one: object, two: object) -> None:
        if one != two:
            raise Divergence(f"{what}: {one} != {two}", self.config, list(self.log))


def _unless_refused(call: Callable[[Any], Any], plane: Any) -> Any:
    """Return the result of a call, or the error by which it refused a pin."""
    try:
        return call(plane)
    except EventError as error:
        if error.field != "pin":
            raise
        return error


def draw_arrival(draw: Draw, req_id: int, limit: int, sequences: list[list[int]]) -> Arrival:
    """Draw a request with a vocabulary of three and a prompt that extends an earlier one, so that prefixes collide;
    some prompts repeat themselves, so that drafts are found."""
    start: list[int] = []
    if sequences and draw(0, 2):
        chosen = sequences[draw(0, len(sequences) - 1)]
        start = chosen[: draw(0, len(chosen))]
    tokens = start + [draw(0, 2) for _ in range(draw(0 if start else 1, min(limit, 40)))]
    if draw(0, 2) == 0:
        tokens += tokens[-draw(1, 4) :] * 6
    tokens = tokens[: limit + 1]
    generated = draw(0, min(3, len(tokens) - 1)) if draw(0, 5) == 0 else 0
    stored_from = draw(0, 3) if draw(0, 3) == 0 else 0
    return Arrival(
        req_id,
        np.array(tokens, np.int32),
        len(tokens) - generated,
        max_tokens=generated + (1, 2, 8, 40, 10**12)[draw(0, 4)],
        num_generated=generated,
        stop_ids=((), (1,), (0, 7))[draw(0, 2)] if draw(0, 3) == 0 else (),
        min_tokens=draw(0, 4) if draw(0, 3) == 0 else 0,
        ignore_eos=draw(0, 1) == 0,
        priority=draw(-1, 1) if draw(0, 3) == 0 else 0,
        no_overlap=draw(0, 7) == 0,
        no_match=draw(0, 7) == 0,
        background=draw(0, 3) == 0,
        namespace=draw(0, 2) if draw(0, 3) == 0 else 0,
        no_drafts=draw(0, 7) == 0,
        stored_from=stored_from,
        stored_to=draw(0, len(tokens)) if draw(0, 2) == 0 else 0,
    )


def without_pins(events: Sequence[Event]) -> list[Event]:
    return [replace(event, pin=False) if isinstance(event, Arrival) else event for event in events]


class Player:
    """Drives a pair through steps, with or without overlap. `live` are the ids that have not ended."""

    def __init__(self, config: ControlPlaneConfig, overlap: bool, backend: str = "rust_hotpath") -> None:
        self.pair = Pair(config, backend=backend)
        self.live: list[int] = []
        self.overlap = overlap
        self._step = 0
        self._in_flight: list[StepPlan] = []
        self._failed = False

    def schedule(self, events: Sequence[Event], ratio: int | None) -> None:
        if ratio is not None:
            self.pair.ours.reserve_ratio = self.pair.theirs.reserve_ratio = ratio
        told: list[Event] = []
        if self._failed:
            told.append(ForwardFailed(self._in_flight[0].step))
            self._in_flight.clear()
            self._failed = False
        self.live += [event.req_id for event in events if isinstance(event, Arrival)]
        self._in_flight.append(self.pair.schedule(self._step, [*told, *events]))
        self._step += 1

    def fail(self) -> None:
        """Let the forward of the oldest step fail, which the next schedule reports."""
        self._failed = True

    @property
    def num_rows_due(self) -> int | None:
        """Return the rows of the step to be committed now, or `None` if there is none."""
        return self._in_flight[0].num_rows if len(self._in_flight) > self.overlap else None

    def guessed(self) -> dict[int, int]:
        """Return, for the step to be committed now, by row the token that would confirm its draft's next one."""
        plan = self._in_flight[0]
        entry = self.pair.ours.buffers.ring[plan.ring_index]
        columns = (entry.req_slots, entry.seq_lens, entry.input_ids)  # decode rows have a token each
        rows = list(zip(*(column[: plan.num_decode_rows].tolist() for column in columns), strict=True))
        inputs = {(slot, seq_len): token for slot, seq_len, token in rows}
        wanted = {row: inputs.get((slot, seq_len + 1)) for row, (slot, seq_len, _) in enumerate(rows)}
        return {row: token for row, token in wanted.items() if token is not None}

    def commit(self, tokens: Sequence[int]) -> None:
        plan = self._in_flight.pop(0)
        ended = set(self.pair.commit(plan.step, np.array(tokens, np.int32)))
        self.live = [req_id for req_id in self.live if req_id not in ended]
