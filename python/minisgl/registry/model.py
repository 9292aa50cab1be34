"""A model of the registry: its settings, its state, and the leases that requests have of it.

Invariants: nothing here decides, waits or reads a clock; only the registry changes a model.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from minisgl.registry.entries import Entry
from minisgl.registry.room import Tenant
from minisgl.registry.server import ModelServer

State = Literal["unloaded", "loading", "loaded", "unloading"]


@dataclass(slots=True)
class Use:
    """Counts of the requests that use a model, with the times that decide whether it may be unloaded."""

    num_serving: int = 0  # leases of waiting clients
    num_lines: int = 0  # lines of batches, answered in the background
    last: int = 0  # sequence number of its last lease, over all models
    asked_at: float = -math.inf  # end of the last lease that is not a batch line's
    idle_since: float = 0.0
    queued_since: float = 0.0


@dataclass(slots=True)
class Measurements:
    """Measurements of a model: its loading time, context and memory."""

    doing: str = ""  # the last log line of its server
    load_s: float = 0.0
    max_model_len: int | None = None  # None before it was first loaded
    sees: bool = False  # images
    was_fetched: bool = False
    used_bytes: int = 0  # at the last measurement
    most_bytes: int = 0  # maximum, including earlier runs; 0: never measured


@dataclass(slots=True)
class Failure:
    """The last failure to load a model: the reason, how many in succession, and when it may be tried again."""

    reason: str = ""
    count: int = 0
    retry_at: float = 0.0


@dataclass(slots=True, eq=False)
class Model:
    """An entry and the state of its model. `adapters` has the folders of adapters that were loaded over HTTP, by name;
    "" while one is being loaded."""

    entry: Entry
    state: State = "unloaded"
    server: ModelServer | None = None
    waiting: list[Lease] = field(default_factory=list)
    use: Use = field(default_factory=Use)
    seen: Measurements = field(default_factory=Measurements)
    failure: Failure = field(default_factory=Failure)
    adapters: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def is_free(self) -> bool:
        """True if the model is loaded and no request, batch line or client needs it now."""
        return self.state == "loaded" and not (self.use.num_serving or self.use.num_lines or self.waiting)

    def need(self) -> int | None:
        """Return the bytes that the model's server takes at most, or None if its files are not downloaded yet. Raises
        `ConfigError` if they are gone."""
        estimate = self.entry.need()
        return max(estimate or 0, self.seen.most_bytes) or estimate

    def use_of(self, key: int) -> tuple[int, int]:
        """Return how many requests of an API key wait at the server, and how many tokens the key has used there."""
        use = () if self.server is None else self.server.use
        return use[key] if key < len(use) else (0, 0)

    def tenant(self, need: int, *, is_in_use: bool = False) -> Tenant:
        """Return what `room.py` needs to decide which models stay. Batches alone do not make a model busy."""
        busy = self.state != "loaded" or bool(self.use.num_serving) or is_in_use
        return Tenant(self.name, need, self.use.last, self.entry.pin, busy)


class Lease:
    """A request's right to a model, from the request's beginning to the last byte of its response. Use `with`, which
    calls `end`; `ready` becomes the server, or the `ApiError` that says why there is none."""

    def __init__(self, end: Callable[[Lease], None], model: Model, *, in_background: bool = False) -> None:
        self.model = model
        self.in_background = in_background
        self.ready: asyncio.Future[ModelServer] = asyncio.get_running_loop().create_future()
        self._end = end

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self)
