"""Random calls: the router in Rust gives what the reference gives, call by call, and what a router promises holds.

A failure comes back as the shortest list of calls that shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.routing.api import POLICIES, KeyShare, Router, RouterConfig
from minisgl.routing.backend import make_rust_router
from minisgl.routing.reference import AGE, ReferenceRouter
from minisgl.step import Int32Array

Call = tuple[Any, ...]
KEYS = st.lists(st.builds(KeyShare, st.integers(1, 5), st.integers(0, 3)), max_size=3).map(tuple)
CONFIGS = st.builds(
    RouterConfig,
    policy=st.sampled_from(POLICIES),
    num_engines=st.integers(1, 5),
    page_size=st.integers(1, 4),
    tree_pages=st.integers(1, 24),
    max_inflight=st.integers(0, 8),
    max_inflight_per_engine=st.integers(0, 4),
    balance_requests=st.integers(0, 3),
    balance_percent=st.sampled_from([0, 50, 100]),
    seed=st.integers(0, 2**64 - 1),
    keys=KEYS,
)
# a prompt is a walk down a small tree: (how long, which branches)
PROMPTS = st.tuples(st.integers(0, 24), st.integers(0, 2**5 - 1))
ENGINES, SMALL = st.integers(0, 4), st.integers(0, 6)
ADD = st.tuples(
    st.just("add"), PROMPTS, st.integers(-2, 2), st.integers(0, 3), st.booleans(), st.sampled_from([0, 0, 0, 1, 2])
)
REMOVE = st.tuples(st.just("remove"), st.integers(0, 100), st.integers(0, 50))
CALLS = st.one_of(
    ADD,
    ADD,
    ADD,
    REMOVE,
    REMOVE,
    st.tuples(st.just("place")),
    st.tuples(st.just("up"), ENGINES, st.one_of(st.none(), st.integers(0, 12))),
    st.tuples(st.just("down"), ENGINES),
    st.tuples(st.just("report"), ENGINES, SMALL, SMALL),
)


def tokens_of(length: int, branches: int) -> Int32Array:
    places = np.arange(length)
    found: Int32Array = (places + 100 * ((branches >> (places // 5)) & 1)).astype(np.int32)
    return found


@dataclass
class Model:
    """What a router must keep to, whatever it chooses. `placed`: request -> engine."""

    config: RouterConfig
    keys: dict[int, int] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    placed: dict[int, int] = field(default_factory=dict)
    up: set[int] = field(default_factory=set)
    next_id: int = 0

    def inflight(self, key: int) -> int:
        return sum(self.keys[req_id] == key for req_id in self.placed)

    def loads(self) -> list[int]:
        return [list(self.placed.values()).count(engine) for engine in range(self.config.num_engines)]

    def key_may_go(self, key: int) -> bool:
        limit = self.config.keys[key - 1].max_inflight if key else 0
        return limit == 0 or self.inflight(key) < limit

    def room(self) -> bool:
        total, each = self.config.max_inflight, self.config.max_inflight_per_engine
        loads = self.loads()
        return (not total or sum(loads) < total) and any(not each or loads[engine] < each for engine in self.up)

    def take(self, req_id: int, engine: int) -> None:
        assert req_id in self.waiting and engine in self.up and self.room() and self.key_may_go(self.keys[req_id])
        self.waiting.remove(req_id)
        self.placed[req_id] = engine
        assert self.loads()[engine] <= (self.config.max_inflight_per_engine or 10**9)

    def forget(self, req_id: int) -> None:
        self.waiting.discard(req_id)
        self.placed.pop(req_id, None)


def run_call(router: Router, model: Model, call: Call) -> Any:
    """Its result; `model` says what its numbers mean now, and is not changed."""
    config, live = model.config, sorted(model.waiting | model.placed.keys())
    match call:
        case ("add", (length, branches), priority, key, again, namespace):
            key %= len(config.keys) + 1
            tokens = tokens_of(length, branches)
            return router.add(model.next_id, tokens, priority, key, again=again, namespace=namespace)
        case ("remove", which, num_generated):
            return router.remove(live[which % len(live)] if live else 12345, num_generated)
        case ("up", engine, tree_pages):
            return router.engine_up(engine % config.num_engines, tree_pages)
        case ("down", engine):
            return router.engine_down(engine % config.num_engines)
        case ("report", engine, num_waiting, num_running):
            return router.report(engine % config.num_engines, num_waiting, num_running)
    return router.place()


def follow(model: Model, call: Call, result: Any) -> None:
    """Change `model` as the call should have changed the router, and hold its result against it."""
    live = sorted(model.waiting | model.placed.keys())
    match call:
        case ("add", _, _, key, *_):
            model.keys[model.next_id] = key % (len(model.config.keys) + 1)
            model.waiting.add(model.next_id)
            model.next_id += 1
        case ("remove", which, _) if live:
            model.forget(live[which % len(live)])
        case ("up", engine, _):
            model.up.add(engine % model.config.num_engines)
        case ("down", engine):
            engine %= model.config.num_engines
            model.up.discard(engine)
            assert sorted(result) == sorted(req_id for req_id, on in model.placed.items() if on == engine)
            for req_id in result:
                model.forget(req_id)
        case ("place",):
            for one in result:
                model.take(one.req_id, one.engine)
            # nobody who could go was left in line
            assert not (model.room() and any(model.key_may_go(model.keys[req_id]) for req_id in model.waiting))


def check_calls(config: RouterConfig, calls: list[Call]) -> None:
    routers: list[Router] = [ReferenceRouter(config), make_rust_router(config)]
    model = Model(config)
    for at, call in enumerate(calls):
        results = [run_call(router, model, call) for router in routers]
        assert results[0] == results[1], (at, call)
        follow(model, call, results[0])
        for router in routers:
            assert router.loads() == model.loads() and router.num_waiting == len(model.waiting), (at, call)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(CONFIGS, st.lists(CALLS, max_size=60))
def test_both_give_the_same_and_keep_what_they_promise(config: RouterConfig, calls: list[Call]) -> None:
    check_calls(config, [("up", engine, None) for engine in range(config.num_engines)] + calls)


@pytest.mark.slow
def test_both_routers_agree_in_longer_runs(times: int) -> None:
    rng = np.random.default_rng(17)
    for _ in range(300 * times):
        keys = tuple(KeyShare(int(a), int(b)) for a, b in rng.integers((1, 0), (6, 4), (rng.integers(0, 4), 2)))
        numbers = rng.integers((1, 1, 1, 0, 0, 0, 0), (9, 5, 200, 20, 8, 4, 200)).tolist()
        config = RouterConfig(POLICIES[rng.integers(4)], *numbers, seed=int(rng.integers(2**62)), keys=keys)
        check_calls(config, [random_call(rng) for _ in range(600)])


def random_call(rng: np.random.Generator) -> Call:
    a, b, c, d, e = rng.integers((0, 0, -3, 0, 0), (40, 32, 4, 4, 8)).tolist()
    kind = rng.choice(["add", "remove", "place", "up", "down", "report"], p=[0.4, 0.25, 0.25, 0.05, 0.02, 0.03])
    match str(kind):
        case "add":
            return "add", (a, b), c, d, e == 0, max(0, b % 5 - 2)
        case "remove":
            return "remove", a * b, a
        case "place":
            return ("place",)
        case "report":
            return "report", d, e, a % 4
        case "up":
            return "up", d, a if e else None
    return str(kind), d


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 3), min_size=300, max_size=400), st.sampled_from([ReferenceRouter, make_rust_router]))
def test_no_request_is_overtaken_by_more_than_its_priority_allows(priorities: list[int], make: Any) -> None:
    """One goes for each that comes, so the line stays as long as it is."""
    router: Router = make(RouterConfig("least_load", 1, max_inflight_per_engine=1))
    router.engine_up(0)
    order: list[int] = []
    for req_id, priority in enumerate([0] * 40 + priorities):
        router.add(req_id, tokens_of(3, 0), priority)
        if req_id >= 40:
            order.extend(one.req_id for one in router.place())
            router.remove(order[-1])
    while router.num_waiting:
        order.extend(one.req_id for one in router.place())
        router.remove(order[-1])
    level = [0] * 40 + priorities
    assert sorted(order) == list(range(len(level)))
    at = {req_id: place for place, req_id in enumerate(order)}
    for early in range(len(level)):
        allowed = [early + (level[early] - q) * AGE for q in range(4)]
        for later in range(early + 1, len(level)):
            if at[later] < at[early]:  # only while its head start is less than what the better priority is worth
                assert later < allowed[level[later]], (early, later)
