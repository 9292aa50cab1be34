"""How a load was spread over engines, from what a server counts before and after."""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl.bench.balance import EngineCounters, balance_rows, difference, read_counters
from minisgl.bench.load import Server
from minisgl.message import EngineState
from tests.frontend.test_engine_client import said
from tests.helpers.server import MODEL, STATS, frontend


def test_a_spread_and_a_hit_rate() -> None:
    before = EngineCounters([1, 1, 0], [10, 10, 10], 100, 50, 1)
    found = difference(before, EngineCounters([4, 2, 2], [40, 20, 40], 300, 200, 3))
    assert found is not None
    assert (found["requests"], found["rows"], found["moved"]) == ([3, 1, 2], [30, 10, 30], 2)
    assert found["requests_most_to_mean"] == 1.5 and found["rows_most_to_mean"] == 90 / 70
    assert found["hit_rate"] == 0.75


def test_nothing_is_made_up() -> None:
    nothing = EngineCounters([0, 0], [0, 0], 0, 0, 0)
    found = difference(nothing, nothing)
    assert found is not None and found["hit_rate"] is None and found["rows_most_to_mean"] is None
    assert difference(None, nothing) is None
    assert difference(nothing, EngineCounters([1], [1], 1, 1, 0)) is None


def test_rows_of_the_table() -> None:
    found: dict[str, Any] = {
        "load": "2 clients",
        "engines": difference(EngineCounters([0], [0], 0, 0, 0), EngineCounters([4], [8], 10, 5, 0)),
    }
    assert balance_rows({"points": [found, {"load": "other", "engines": None}]}) == [
        ("2 clients", 1, 50.0, 1.0, 1.0, "4", 0)
    ]


def test_counts_are_read_by_engine() -> None:
    idle = msgspec.structs.replace(
        STATS, num_running=0, num_waiting=0, num_rows_total=9, num_hits_total=3, num_misses_total=1
    )
    with frontend(num_engines=2) as server:
        for engine in (0, 1):
            server.engine.send(EngineState(engine, "ready"), said(engine, idle))
        server.wait_until(lambda: all(view.stats for view in server.client.engines))
        assert read_counters(Server(server.url, MODEL)) == EngineCounters([4, 4], [9, 9], 1400, 600, 0)


def test_another_server_counts_nothing() -> None:
    assert read_counters(Server("http://127.0.0.1:1", "any")) is None
