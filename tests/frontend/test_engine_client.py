"""When the engine fails, falls silent or talks nonsense: every request ends once, and the frontend says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.config import Limits
from minisgl.message import (
    SCHEMA_VERSION,
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineSays,
    EngineState,
    EngineStats,
    FromEngine,
    Heartbeat,
    LoadProgress,
    MeterReading,
    PrefixState,
    Shutdown,
    StepTokens,
)
from minisgl.message.codec import encode
from minisgl.message.heartbeat import TIMES, Watchdog
from minisgl.metrics.engines import KEPT, NUMBERS, EngineViews, together
from minisgl.server.admin.health import trouble
from tests.helpers.server import CONFIG, READY, STATS, WAIT_S, Frontend, check_error, events, failed_step, frontend

PROBES = ("/health", "/readyz")
STEP = StepTokens(step=0, req_ids=b"", tokens=b"", reasons=b"")


def check_gone(server: Frontend, reason: str) -> None:
    with server.http() as http:
        for path in PROBES:
            answer = http.get(path)
            assert answer.status_code == 503 and reason in answer.text
        assert reason in check_error(http.get("/livez"), 503)["message"]
        for stream in (False, True):
            body = {"prompt": "a", "stream": stream}
            assert check_error(http.post("/v1/completions", json=body), 503)["code"] == "engine_unavailable"
        check_error(http.get("/v1/models"), 503)
        assert "minisgl:engine_up 0.0" in http.get("/metrics").text


def broken_dispatch(**fields: bytes) -> Callable[[Frontend], None]:
    return lambda server: server.engine.send(msgspec.structs.replace(STEP, **fields))


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (lambda server: server.engine.send(EngineFailed("out of memory")), "out of memory"),
        (lambda server: server.on_loop(lambda: server.client.fail("it died")), "it died"),
        (lambda server: server.engine.send_frame(b""), "schema version"),
        (lambda server: server.engine.send_frame(b"\xff\xff" + encode([STATS])[2:]), f"speaks {SCHEMA_VERSION}"),
        (lambda server: server.engine.send_frame(encode([STATS])[:-1]), "cannot be read"),
        (broken_dispatch(req_ids=np.zeros(1, np.int64).tobytes()), "receiving from the engine failed"),
        (broken_dispatch(req_ids=b"123"), "receiving from the engine failed"),
        (broken_dispatch(admitted_ids=np.zeros(1, np.int64).tobytes()), "receiving from the engine failed"),
    ],
    ids=["failed", "died", "empty", "version", "cut", "lengths", "bytes", "bound"],
)
def test_a_lost_engine_ends_every_request(fail: Callable[[Frontend], None], reason: str) -> None:
    with frontend() as server, server.http() as http, ThreadPoolExecutor(2) as threads:

        def ask(stream: bool) -> httpx.Response:
            return http.post("/v1/completions", json={"prompt": f"live {stream} hang:abc", "stream": stream})

        waiting: list[Future[httpx.Response]] = [threads.submit(ask, stream) for stream in (False, True)]
        server.engine.wait_for(lambda _: len(server.engine.requests("live ")) == 2)
        with http.stream("POST", "/v1/completions", json={"prompt": "hang:xyz", "stream": True}) as stream:
            lines = (line for line in stream.iter_lines() if line)
            while 'z"' not in next(lines):
                pass
            fail(server)
            *_, last, done = events("".join(f"{line}\n\n" for line in lines))
        assert reason in last["error"]["message"] and done == "[DONE]"
        answers = [one.result(WAIT_S) for one in waiting]
        assert reason in check_error(answers[0], 503)["message"]
        assert reason in answers[1].text  # a status or an event, as far as it had come
        assert server.client.num_live == 0
        check_gone(server, reason)


def test_the_first_reason_stays() -> None:
    with frontend() as server:
        server.on_loop(lambda: server.client.fail("first"))
        server.on_loop(lambda: server.client.fail("second"))
        check_gone(server, "first")


def test_before_the_engine_is_ready_it_is_loading() -> None:
    with frontend(ready=False) as server:
        check_gone_while_loading(server)
        server.engine.send(READY)
        server.wait_until(lambda: server.client.info is not None)
        with server.http() as http:
            assert all(http.get(path).status_code == 200 for path in PROBES)
            assert http.post("/v1/completions", json={"prompt": "say:on"}).json()["choices"][0]["text"] == "on"


def check_gone_while_loading(server: Frontend) -> None:
    with server.http() as http:
        for path in PROBES:
            answer = http.get(path)
            assert answer.status_code == 503 and "loading" in answer.text
        assert http.get("/livez").status_code == 200
        assert "loading" in check_error(http.post("/v1/completions", json={"prompt": "a"}), 503)["message"]


def test_a_failure_while_loading_is_what_ready_raises() -> None:
    with frontend(ready=False) as server:
        server.engine.send(EngineFailed("no such model"))
        server.wait_until(lambda: server.client.failure is not None)
        ready = server.client.ready
        assert ready is not None and "no such model" in str(ready.exception())


def test_health_says_what_serves() -> None:
    with frontend() as server, server.http() as http:
        assert http.get("/health").json()["stats"] is None
        server.engine.send(STATS)
        server.wait_until(lambda: server.client.stats is not None)
        body = http.get("/health").json()
        assert (body["status"], body["model"], body["engine"], body["cpu_backend"]) == (
            "ok",
            "scripted",
            "scripted",
            "none",
        )
        assert body["max_seq_len"] == READY.max_seq_len and body["requests_open"] == 0
        in_metrics = {"meters": {}, "ranks": (), "prefixes": (), "failovers": ()}
        assert body["stats"] | in_metrics == msgspec.to_builtins(msgspec.structs.asdict(STATS))


def test_tokens_of_ended_and_unknown_requests_are_dropped() -> None:
    with frontend() as server, server.http() as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "left hang:x", "stream": True}):
            request = server.engine.wait_for_request("left ")
        server.engine.wait_for_end(AbortRequest, {request.req_id})
        server.engine.send(failed_step(request.req_id, "too late"), failed_step(10**15, "who?"))
        assert http.post("/v1/completions", json={"prompt": "say:on"}).json()["choices"][0]["text"] == "on"


def test_request_ids_are_never_reused() -> None:
    with frontend() as server, server.http() as http:
        for i in range(30):
            http.post("/v1/completions", json={"prompt": "say:a" if i % 2 else "burst:b", "n": 2, "max_tokens": 1})
        ids = [one.req_id for one in server.engine.received if isinstance(one, AddRequest)]
        assert len(ids) == 60 == len(set(ids))


def test_all_choices_of_a_request_leave_in_one_frame() -> None:
    """The engine admits them in one step, so that the prompt is computed once."""
    frames: list[int] = []
    with frontend() as server, server.http() as http:
        take = server.engine.take
        server.engine.take = lambda messages: (frames.append(len(messages)), take(messages))[1]  # type: ignore
        http.post("/v1/completions", json={"prompt": ["say:a", "say:b"], "n": 8})
    assert frames[0] == 16


def test_stopping_tells_the_engine_and_leaves_no_thread_of_the_sockets() -> None:
    before = set(threading.enumerate())
    with frontend() as server:
        engine = server.engine
        server.on_loop(lambda: None)
    assert engine.received and isinstance(engine.received[-1], Shutdown)
    assert set(threading.enumerate()) <= before


def test_nothing_waits_for_an_engine_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message for a dead engine, whose death is not known yet, does not block the event loop."""
    monkeypatch.setattr("minisgl.frontend.engine_client.LOST_S", 2 * WAIT_S)
    with frontend() as server, server.http() as http, ThreadPoolExecutor(1) as threads:
        server.engine.stop()  # its sockets close, nobody says why
        waiting = threads.submit(http.post, "/v1/completions", json={"prompt": "a"})
        server.wait_until(lambda: server.client.num_live == 1)
        assert httpx.get(server.url + "/version").status_code == 200
        server.on_loop(lambda: server.client.fail("it died"))
        assert check_error(waiting.result(WAIT_S), 503)["code"] == "engine_unavailable"


@pytest.mark.parametrize(
    ("phase", "age_s", "silent_s", "wrong"),
    [
        ("idle", 1e6, 0.0, None),
        ("working", 1.0, 0.0, None),
        ("working", 3.5, 0.0, "step loop"),
        ("forward", 20.0, 0.0, None),
        ("forward", 31.0, 0.0, "--step-timeout"),
        ("idle", 0.25, 3.5, "heartbeat"),
    ],
)
def test_a_hang_is_a_stuck_loop_or_forward(phase: str, age_s: float, silent_s: float, wrong: str | None) -> None:
    with (
        frontend(config=msgspec.structs.replace(CONFIG, limits=Limits(step_timeout=30.0))) as server,
        server.http() as http,
    ):
        server.engine.beats = False
        now = [0.0]

        def renew() -> None:
            """Give the client a watchdog whose clock is the test's."""
            watchdog = Watchdog([0], lambda _: "the engine process", TIMES.silence_s, clock=lambda: now[0])
            server.client.watchdog = watchdog

        server.on_loop(renew)
        server.engine.send(Heartbeat(phase, age_s))
        server.wait_until(lambda: server.client.watchdog.beats() == {0: Heartbeat(phase, age_s)})
        now[0] = silent_s
        found = server.on_loop(lambda: trouble(server.client, 30.0))
        assert (found is None) == (wrong is None) and (wrong is None or (found is not None and wrong in found))
        assert http.get("/livez").status_code == (200 if wrong is None else 503)
        assert http.get("/readyz").status_code == (200 if wrong is None else 503)
        assert sum(isinstance(one, AddRequest) for one in server.engine.received) == 0


stats_of = msgspec.structs.replace


def said(engine: int, *messages: FromEngine) -> EngineSays:
    return EngineSays(engine, encode(messages)[2:])


def test_what_is_a_number_is_summed_and_what_is_counted_is_kept() -> None:
    assert {"num_steps_total", "num_hits_total", "cpu_s"} <= KEPT < NUMBERS
    assert {"num_running", "num_pages", "batch_rows", "resident_bytes"} <= NUMBERS - KEPT
    others = set(EngineStats.__struct_fields__) - NUMBERS
    assert others == {"cpu_backend", "failover_reason", "failovers", "meters", "ranks", "prefixes"}


def test_statistics_of_engines_are_summed() -> None:
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
