"""Several engines behind one server, by label engine: families of their own, so that a sum over all samples of a family
is right, and the families without the label stay the sum of all engines. One engine has the label "0".

Invariants: every family is there from the start, without samples until there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from minisgl.message import EngineStats

LABELS = ("engine",)
Value = Callable[[EngineStats], float]
Readings = Mapping[str, Any]
Table = tuple[tuple[str, str, Value], ...]
GAUGES: Table = (
    ("requests_running", "requests with a row", lambda s: s.num_running),
    ("requests_waiting", "requests in it without a row", lambda s: s.num_waiting),
    ("kv_pages", "pages of its KV pool", lambda s: s.num_pages),
    ("kv_pages_used", "pages in use by requests", lambda s: s.num_protected_pages + s.num_held_pages),
    ("kv_pages_pinned", "pages that pinned prefixes hold", lambda s: s.num_pinned_pages),
    ("resident_bytes", "memory of its process", lambda s: s.resident_bytes),
)
COUNTERS: Table = (
    ("prompt_tokens", "prompt tokens of admitted requests", lambda s: s.num_prompt_tokens_total),
    ("cached_tokens", "of these, found in its prefix cache", lambda s: s.num_cached_tokens_total),
    ("cache_hits", "admitted requests of which something was cached", lambda s: s.num_hits_total),
    ("cache_misses", "admitted requests of which nothing was", lambda s: s.num_misses_total),
    ("cache_inserted_pages", "pages that entered its prefix cache", lambda s: s.num_inserted_pages_total),
    ("cache_evicted_pages", "pages that left it for others", lambda s: s.num_evicted_pages_total),
    ("drafted_tokens", "tokens that it guessed and computed", lambda s: s.num_drafted_total),
    ("accepted_tokens", "of these, those that were right", lambda s: s.num_accepted_total),
    ("steps", "steps", lambda s: s.num_steps_total),
    ("step_tokens", "tokens that its steps computed", lambda s: s.num_step_tokens_total),
    ("step_rows", "rows of its steps", lambda s: s.num_rows_total),
    ("cpu_seconds", "CPU time of its process", lambda s: s.cpu_s),
)


class View(Protocol):
    """What is known of one engine: `frontend.engine_views.EngineView`."""

    @property
    def engine(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def restarts(self) -> int: ...
    @property
    def stats(self) -> EngineStats | None: ...
    def told(self, now: float) -> dict[str, Any]: ...


def by_engine(views: Sequence[View], pool: Readings | None) -> Iterable[Metric]:
    ready = GaugeMetricFamily("minisgl:engine_ready", "1 while it serves", labels=LABELS)
    restarts = CounterMetricFamily("minisgl:engine_restarts", "times that it was ready again", labels=LABELS)
    for view in views:
        ready.add_metric((str(view.engine),), float(view.state == "ready"))
        restarts.add_metric((str(view.engine),), float(view.restarts))
    yield ready
    yield restarts
    losses = CounterMetricFamily("minisgl:engine_losses", "times that it died or hung", labels=LABELS)
    for at, number in enumerate(() if pool is None else pool["num_losses_total"]):
        losses.add_metric((str(at),), float(number))
    yield losses
    known = [(str(view.engine), stats) for view in views if (stats := view.stats) is not None]
    for name, text, value in GAUGES:
        gauge = GaugeMetricFamily(f"minisgl:engine_{name}", f"{text}, by engine", labels=LABELS)
        for engine, stats in known:
            gauge.add_metric((engine,), float(value(stats)))
        yield gauge
    for name, text, value in COUNTERS:
        counter = CounterMetricFamily(f"minisgl:engine_{name}", f"{text}, by engine", labels=LABELS)
        for engine, stats in known:
            counter.add_metric((engine,), float(value(stats)))
        yield counter
    yield from _of_the_pool(pool)


def _of_the_pool(pool: Readings | None) -> Iterable[Metric]:
    moved = CounterMetricFamily("minisgl:pool_requests_moved", "requests of a lost engine that went on in another")
    if pool is not None:
        moved.add_metric((), float(pool["num_moved_total"]))
    yield moved
    waiting = GaugeMetricFamily("minisgl:pool_requests_waiting", "requests that wait for an engine")
    if pool is not None:
        waiting.add_metric((), float(pool["num_waiting"]))
    yield waiting
