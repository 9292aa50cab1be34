"""What a front end knows of several engines: states, sums, and counters that outlive an engine."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.frontend.engine_views import KEPT, NUMBERS, EngineViews, together
from minisgl.message import EngineSays, EngineState, EngineStats, LoadProgress, MeterReading, PrefixState, encode
from minisgl.message.types import FromEngine
from tests.helpers.server import STATS, frontend

stats_of = msgspec.structs.replace


def said(engine: int, *messages: FromEngine) -> EngineSays:
    return EngineSays(engine, encode(messages)[2:])


def test_what_is_a_number_is_summed_and_what_is_counted_is_kept() -> None:
    assert {"num_steps_total", "num_hits_total", "cpu_s"} <= KEPT < NUMBERS
    assert {"num_running", "num_pages", "batch_rows", "resident_bytes"} <= NUMBERS - KEPT
    others = set(EngineStats.__struct_fields__) - NUMBERS
    assert others == {"cpu_backend", "failover_reason", "meters", "ranks", "prefixes"}


def test_a_sum() -> None:
    one = stats_of(
        STATS,
        cpu_backend="rust_hotpath",
        meters={"launch": MeterReading(2, 1.0, 0.75, 0.5, {1: 2}), "idle": MeterReading(1, 1.0, 1.0, 1.0)},
        prefixes=(PrefixState(1, 10, True, True, 3), PrefixState(2, 5, True, False)),
    )
    other = stats_of(
        one,
        num_running=4,
        cpu_s=0.5,
        meters={"launch": MeterReading(1, 2.0, 2.0, 0.25, {1: 1, 4: 1})},
        prefixes=(PrefixState(1, 10, False, True, 4),),
    )
    found = together([one, other])
    assert found is not None
    assert (found.num_running, found.num_pages, found.num_steps_total, found.cpu_s) == (7, 128, 1800, 0.5)
    assert found.meters["launch"] == MeterReading(3, 3.0, 2.0, 0.5, {1: 3, 4: 1})
    assert found.meters["idle"].count == 1 and found.cpu_backend == "rust_hotpath"
    assert found.prefixes == (PrefixState(1, 10, False, True, 7), PrefixState(2, 5, True, False))
    assert together([]) is None and together([one]) is one


def test_one_engine_s_snapshot_is_passed_on_as_it_is() -> None:
    views = EngineViews(None)
    views.say(0, STATS)
    assert views.together() is STATS
    assert views.all[0].state == "starting"
    views.ready()
    assert views.all[0].state == "ready"
    views.failed("it died")
    assert (views.all[0].state, views.all[0].reason) == ("dead", "it died")


def test_what_a_dead_one_counted_stays_and_what_it_had_goes() -> None:
    now = 5.0
    views = EngineViews(2, lambda: now)
    for engine in (0, 1):
        views.change(engine, "ready")
        views.say(engine, STATS)
    views.change(1, "dead", "killed")
    found = views.together()
    assert found is not None
    assert (found.num_running, found.num_pages, found.num_steps_total) == (3, 64, 1800)
    view = views.all[1]
    assert (view.state, view.reason, view.restarts) == ("dead", "killed", 0)
    views.change(1, "starting")
    now = 7.5
    views.change(1, "ready")
    views.say(1, stats_of(STATS, num_steps_total=1))
    assert view.stats is not None and view.stats.num_steps_total == 901 and view.stats.num_running == 3
    assert view.restarts == 1 and view.told(8.0) == {
        "engine": 1,
        "state": "ready",
        "reason": None,
        "restarts": 1,
        "since_s": 0.5,
    }


@settings(deadline=None, max_examples=100)
@given(
    events=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["dead", "silent", "starting", "ready"]) | st.integers(1, 9)),
        max_size=60,
    )
)
def test_counters_never_fall(events: list[tuple[int, str | int]]) -> None:
    """Whatever engines say and how often they die: the sum is all that was ever counted."""
    views, counts, total, last = EngineViews(3), [0, 0, 0], 0, 0
    for engine, event in events:
        if isinstance(event, str):
            if event != views.all[engine].state and event != "ready":
                counts[engine] = 0  # another process counts from zero
            views.change(engine, event)
        else:
            counts[engine] += event
            total += event
            views.say(engine, stats_of(STATS, num_steps_total=counts[engine]))
        found = views.together()
        last, before = (0 if found is None else found.num_steps_total), last
        assert last == total and last >= before


# -------------------------------------------------------------------------------------------------------- the client


def test_a_pool_is_shown_by_engine_and_in_sum() -> None:
    with frontend(num_engines=2) as server, server.http() as http:
        server.engine.send(EngineState(0, "ready"), EngineState(1, "ready"))
        server.engine.send(said(0, STATS), said(1, stats_of(STATS, num_running=1, num_steps_total=100)))
        server.wait_until(lambda: all(view.stats for view in server.client.engines))
        health = http.get("/health").json()
        assert (health["status"], health["stats"]["num_running"]) == ("ok", 4)
        assert [one["state"] for one in health["engines"]] == ["ready", "ready"]
        stats = http.get("/stats").json()
        assert stats["engine"]["num_steps_total"] == 1000
        assert [one["stats"]["num_steps_total"] for one in stats["engines"]] == [900, 100]
        text = http.get("/metrics").text
        assert 'minisgl:engine_steps_total{engine="0"} 900.0' in text
        assert 'minisgl:engine_steps_total{engine="1"} 100.0' in text and "minisgl:steps_total 1000.0" in text


def test_an_engine_that_is_lost_is_a_degraded_server_that_serves() -> None:
    with frontend(num_engines=2) as server, server.http() as http:
        server.engine.send(EngineState(0, "ready"), EngineState(1, "ready"))
        server.engine.send(EngineState(1, "silent", "no heartbeat for 3 s"))
        server.wait_until(lambda: server.client.engines[1].state == "silent")
        answer = http.get("/health")
        assert answer.status_code == 200 and answer.json()["status"] == "degraded"
        assert answer.json()["engines"][1]["reason"] == "no heartbeat for 3 s"
        assert http.get("/livez").status_code == http.get("/readyz").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "say:hi"}).json()["choices"][0]["text"] == "hi"
        assert 'minisgl:engine_ready{engine="1"} 0.0' in http.get("/metrics").text
        server.engine.send(EngineState(1, "dead"), EngineState(1, "starting"), EngineState(1, "ready"))
        server.wait_until(lambda: server.client.engines[1].restarts == 1)
        assert http.get("/health").json()["status"] == "ok"
        assert 'minisgl:engine_restarts_total{engine="1"} 1.0' in http.get("/metrics").text


def test_progress_names_the_engine_where_there_are_several() -> None:
    lines: list[tuple[str, int, int]] = []
    for number in (2, 1):
        with frontend(num_engines=number) as server:
            server.client.on_progress = lambda *report: lines.append(report)
            server.engine.send(said(number - 1, LoadProgress("loading", 1, 2)))
            server.wait_until(lambda wanted=3 - number: len(lines) == wanted)  # type: ignore[misc]
    assert lines == [("engine 1: loading", 1, 2), ("loading", 1, 2)]


def test_a_state_reaches_whoever_started_the_engines() -> None:
    with frontend(num_engines=2) as server:
        heard: list[tuple[int, str]] = []
        server.client.on_engine_state = lambda engine, state: heard.append((engine, state))
        server.engine.send(EngineState(0, "silent"))
        server.wait_until(lambda: bool(heard))
        assert heard == [(0, "silent")]
