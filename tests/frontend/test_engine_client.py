"""When the engine fails, falls silent or talks nonsense: every request ends once, and the frontend says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import msgspec
import numpy as np
import pytest

from minisgl.config import Limits
from minisgl.message import (
    SCHEMA_VERSION,
    AbortRequest,
    AddRequest,
    EngineFailed,
    Heartbeat,
    Shutdown,
    StepTokens,
    encode,
)
from minisgl.server.health import trouble
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
        in_metrics = {"meters": {}, "ranks": (), "prefixes": ()}
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
        take = server.engine._take
        server.engine._take = lambda messages: (frames.append(len(messages)), take(messages))[1]  # type: ignore
        http.post("/v1/completions", json={"prompt": ["say:a", "say:b"], "n": 8})
    assert frames[0] == 16


def test_stopping_tells_the_engine_and_leaves_no_thread_of_the_sockets() -> None:
    with frontend() as server:
        engine = server.engine
        server.on_loop(lambda: None)
    assert engine.received and isinstance(engine.received[-1], Shutdown)
    assert not [thread for thread in threading.enumerate() if thread is server._thread]


def test_nothing_waits_for_an_engine_that_is_not_there() -> None:
    """A message for a dead engine, whose death is not known yet, does not block the event loop."""
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
def test_what_counts_as_a_hang(phase: str, age_s: float, silent_s: float, wrong: str | None) -> None:
    with (
        frontend(config=msgspec.structs.replace(CONFIG, limits=Limits(step_timeout=30.0))) as server,
        server.http() as http,
    ):
        server.engine.beats = False
        server.engine.send(Heartbeat(phase, age_s))
        server.wait_until(lambda: server.client.watchdog.beats() == {0: Heartbeat(phase, age_s)})

        def age() -> str | None:
            server.client.watchdog._heard[0] -= silent_s
            return trouble(server.client, 30.0)

        found = server.on_loop(age)
        assert (found is None) == (wrong is None) and (wrong is None or (found is not None and wrong in found))
        assert http.get("/livez").status_code == (200 if wrong is None else 503)
        assert http.get("/readyz").status_code == (200 if wrong is None else 503)
        assert sum(isinstance(one, AddRequest) for one in server.engine.received) == 0
