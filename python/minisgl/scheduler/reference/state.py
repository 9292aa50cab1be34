"""State of a scheduler between two calls; the invariants are about it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.parts import Parts
from minisgl.scheduler.reference.admission import ReserveRatio
from minisgl.scheduler.reference.pins import Pins
from minisgl.scheduler.reference.ranking import Ranking
from minisgl.scheduler.reference.request import Request, RequestQueue
from minisgl.scheduler.reference.slots import SlotTable


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A scheduled step that is not committed yet."""

    step: int
    rows: list[Request]
    sample_rows: list[int]
    drafts: dict[int, tuple[int, int]]  # by draft row: position and id of its token

    def counts(self, row: int) -> bool:
        """Return whether the token of `row` belongs to its request's sequence. A draft row's token does if the sequence
        now ends with the draft token that the row computed."""
        if row not in self.drafts:
            return True
        position, token = self.drafts[row]
        tokens = self.rows[row].tokens
        return len(tokens) == position + 1 and tokens[position] == token


class SchedulerState:
    """Requests, pages and slots of a scheduler. At start there are no requests; all pages and slots are free."""

    def __init__(self, config: ControlPlaneConfig, parts: Parts) -> None:
        num_checkpoints = config.num_checkpoints if config.checkpoint_interval else None
        self.num_pages, self.num_checkpoints = config.num_pages, config.num_checkpoints
        self.tree = parts.tree(config.num_pages, config.page_size, config.cache, num_checkpoints)
        self.slots = SlotTable(config.max_running_requests)
        self.ratio = ReserveRatio()
        self.pins = Pins(config.max_pinned_pages)
        self.live: dict[int, Request] = {}
        self.waiting = RequestQueue()
        self.ranking = Ranking(config.schedule_policy)
        self.started = RequestQueue()
        self.in_flight: deque[InFlight] = deque()
