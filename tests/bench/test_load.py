"""The load generator against servers that answer by script: counts, order of times, failures with their reasons."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from minisgl._rust import run_load
from tests.helpers.loadgen import DONE, END, HEAD, Exchange, Script, chunk, stub, token, usage
from tests.helpers.seconds import WAIT_S

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
GOOD = (ROLE, token("a"), token("b"), token("c"), usage(7, 3), DONE)


def send(script: Script, count: int = 1, **settings: Any) -> Any:
    settings = {"concurrency": 1, **settings}
    with stub(script) as server:
        result = run_load(server.url, [b"{}"], chains=[1] * count, **settings)
        result["connections"] = server.num_connections
        result["bodies"] = list(server.requests)
    return result


def in_pieces(pieces: tuple[bytes, ...]) -> Script:
    def script(exchange: Exchange) -> bool:
        exchange.send(HEAD, *map(chunk, pieces), END)
        return True

    return script


def failure(result: Any, row: int = 0) -> str:
    return str(result["failures"][result["failure"][row]])


def assert_good(result: Any) -> None:
    assert failure(result) == "", result["errors"]
    assert result["text_events"][0] == 3
    assert result["events"][0] == 6
    assert (result["prompt_tokens"][0], result["completion_tokens"][0], result["cached_tokens"][0]) == (7, 3, -1)
    assert result["num_gaps"].tolist() == [2]
    assert len(result["gaps"]) == 2


def test_a_stream_event_by_event() -> None:
    used_s = time.process_time()
    result = send(in_pieces(GOOD))
    used_s = time.process_time() - used_s
    assert_good(result)
    times = [result[name][0] for name in ("scheduled", "connected", "sent", "headers", "first", "last", "end")]
    assert times == sorted(times)
    assert times[0] >= 0
    assert np.isclose(result["gaps"].sum(), times[5] - times[4], atol=1e-5)
    assert result["status"][0] == 200
    assert result["bytes"][0] == sum(map(len, GOOD))
    assert 0 < result["cpu_s"] <= used_s  # its threads are of this process


def test_all_events_in_one_chunk() -> None:
    result = send(in_pieces((b"".join(GOOD),)))
    assert_good(result)
    assert result["gaps"].tolist() == [0, 0]  # they came together


@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_events_cut_anywhere(size: int) -> None:
    text = b"".join((ROLE, token("ä"), token("😀"), token("\\n"), usage(7, 3), DONE))
    result = send(in_pieces(tuple(text[i : i + size] for i in range(0, len(text), size))))
    assert_good(result)


def test_chunks_of_http_cut_anywhere() -> None:
    wire = HEAD + b"".join(map(chunk, GOOD)) + END

    def script(exchange: Exchange) -> bool:
        exchange.send(*(wire[i : i + 11] for i in range(0, len(wire), 11)))
        return True

    assert_good(send(script))


def test_no_usage_is_not_zero_tokens() -> None:
    result = send(in_pieces((token("a"), token("b"), DONE)))
    assert result["text_events"][0] == 2
    assert result["completion_tokens"][0] == -1


def test_a_late_token_is_a_gap_and_not_a_late_first_one() -> None:
    held, has_read = 0.2, threading.Event()

    def script(exchange: Exchange) -> bool:
        exchange.send(HEAD, chunk(token("a")))
        assert has_read.wait(WAIT_S)
        time.sleep(held)  # what is measured
        exchange.send(chunk(token("b") + DONE), END)
        return True

    def progress(num_done: int, num_failed: int, num_open: int, num_text_events: int) -> None:
        if num_text_events:
            has_read.set()

    result = send(script, progress=progress)
    assert result["gaps"][0] >= held
    assert result["first"][0] <= result["last"][0] - held


def test_an_answer_in_one_piece() -> None:
    body = b'{"choices":[{"message":{"content":"hello"}}],"usage":{"prompt_tokens":2,"completion_tokens":5}}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)

    def script(exchange: Exchange) -> bool:
        exchange.send(head + body)
        return True

    result = send(script)
    assert failure(result) == ""
    assert (result["completion_tokens"][0], result["text_events"][0]) == (5, 1)


# --- failures ---


def test_a_status_is_a_failure_with_what_the_server_said() -> None:
    def script(exchange: Exchange) -> bool:
        exchange.send(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull")
        return True

    result = send(script)
    assert (failure(result), result["status"][0], result["errors"]) == ("status", 503, ["full"])
    assert np.isnan(result["first"][0])


def test_a_reset_is_a_failure() -> None:
    def script(exchange: Exchange) -> bool:
        exchange.send(HEAD, chunk(token("a")))
        exchange.reset()
        return False

    result = send(script)
    assert failure(result) == "broken"
    assert result["errors"][0]


def test_an_end_in_the_middle_of_the_body_is_a_failure() -> None:
    def script(exchange: Exchange) -> bool:
        exchange.send(HEAD, chunk(token("a")))
        return False

    assert failure(send(script)) == "broken"


def test_a_stream_without_its_end_is_a_failure() -> None:
    assert failure(send(in_pieces((token("a"), usage(1, 1))))) == "cut"


def test_an_error_in_the_stream_is_a_failure() -> None:
    result = send(in_pieces((token("a"), b'data: {"error":{"message":"out of luck"}}\n\n', DONE)))
    assert failure(result) == "error"
    assert "out of luck" in result["errors"][0]


def test_an_answer_that_does_not_come_is_a_failure_and_its_connection_is_not_used_again() -> None:
    over = threading.Event()

    def script(exchange: Exchange) -> bool:
        if exchange.number == 0:
            over.wait(2 * WAIT_S)
        exchange.send(HEAD, *map(chunk, GOOD), END)
        return True

    for timeout_s in (0.5, 5.0, WAIT_S):  # enough for the answer that does come, which a busy machine decides
        over.clear()
        with stub(script) as server:
            result: Any = run_load(server.url, [b"{}"], chains=[1, 1], concurrency=1, timeout_s=timeout_s)
            over.set()
            assert server.num_connections == 2
        assert failure(result, 0) == "timeout"
        if failure(result, 1) == "":
            return
    pytest.fail("the second is never answered")


def test_load_on_a_missing_server_is_counted_as_failed() -> None:
    with socket.socket() as silent:  # it has the port, and does not listen
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        result = run_load(url, [b"{}"], chains=[1] * 5, concurrency=2)
    assert [failure(result, row) for row in range(5)] == ["connect"] * 5
    assert np.isnan(result["first"]).all()


def test_a_failure_does_not_end_the_run() -> None:
    def script(exchange: Exchange) -> bool:
        if exchange.number % 2:
            exchange.reset()
            return False
        exchange.send(HEAD, *map(chunk, GOOD), END)
        return True

    result = send(script, count=10)
    assert (result["failure"] == 0).sum() == 5


# --- loops ---


def test_a_closed_loop_has_as_many_in_flight_as_clients() -> None:
    together = threading.Barrier(4, timeout=WAIT_S)  # breaks if fewer come, and more would be a fifth connection

    def script(exchange: Exchange) -> bool:
        together.wait()
        exchange.send(HEAD, *map(chunk, GOOD), END)
        return True

    result = send(script, count=12, concurrency=4)
    assert (result["failure"] == 0).all()
    assert result["connections"] == 4
    assert int(np.isnan(result["connected"]).sum()) == 8  # over a connection that was there


def test_each_request_has_its_connection_without_keep_alive() -> None:
    result = send(in_pieces(GOOD), count=6, concurrency=2, keep_alive=False)
    assert result["connections"] == 6
    assert not np.isnan(result["connected"]).any()


def test_a_connection_that_the_server_closed_is_no_failure() -> None:
    def script(exchange: Exchange) -> bool:
        exchange.send(HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), *map(chunk, GOOD), END)
        return False

    result = send(script, count=4)
    assert (result["failure"] == 0).all()
    assert result["connections"] == 4


def test_a_chain_goes_in_order_and_waits_for_its_answers() -> None:
    with stub(in_pieces(GOOD)) as server:
        bodies = [b"0", b"1", b"2", b"3", b"4"]
        result = run_load(server.url, bodies, chains=[3, 2], concurrency=2)
    assert result["index"].tolist() == [0, 1, 2, 3, 4]
    for before, after in ((0, 1), (1, 2), (3, 4)):
        assert result["sent"][after] >= result["end"][before]


def test_an_open_loop_does_not_wait_and_counts_from_when_a_request_was_due() -> None:
    all_there = threading.Barrier(3, timeout=WAIT_S)  # the first is answered only when the third has come

    def script(exchange: Exchange) -> bool:
        all_there.wait()
        exchange.send(HEAD, *map(chunk, GOOD), END)
        return True

    result = send(script, count=3, concurrency=0, arrivals=[0.0, 0.05, 0.1])
    assert result["scheduled"].tolist() == [0.0, 0.05, 0.1]
    assert (result["failure"] == 0).all()
    assert (result["sent"] >= result["scheduled"]).all()
    assert result["first"][0] - result["scheduled"][0] >= 0.1


def test_threads_share_the_work() -> None:
    result = send(in_pieces(GOOD), count=40, concurrency=4, threads=2)
    assert result["index"].tolist() == list(range(40))
    assert (result["failure"] == 0).all()
    result = send(in_pieces(GOOD), count=10, concurrency=0, arrivals=[0.0] * 10, threads=3)
    assert (result["failure"] == 0).all()


def test_nothing_is_begun_after_the_end() -> None:
    with stub(in_pieces(GOOD)) as server:
        for stop_after_s in (0.1, 1.0, 10.0):  # enough for the first
            result = run_load(server.url, [b"{}"], chains=[1] * 1_000_000, concurrency=2, stop_after_s=stop_after_s)
            if len(result["index"]):
                break
    assert 0 < len(result["index"]) < 1_000_000
    assert (result["failure"] == 0).all()


def test_bodies_come_round_again() -> None:
    with stub(in_pieces(GOOD)) as server:
        run_load(server.url, [b"a", b"b"], chains=[1] * 5, concurrency=1)
        assert server.requests == [b"a", b"b", b"a", b"b", b"a"]


def test_load_reports_progress() -> None:
    told: list[tuple[int, int, int, int]] = []
    result = send(in_pieces(GOOD), count=3, progress=lambda *counts: told.append(counts))
    assert told[-1] == (3, 0, 0, int(result["text_events"].sum()))


def test_an_error_of_the_progress_callback_ends_the_run() -> None:
    waiting = threading.Event()

    def script(_: Exchange) -> bool:
        waiting.wait(WAIT_S)
        return False

    with stub(script) as server:
        try:
            with pytest.raises(ZeroDivisionError):
                run_load(server.url, [b"{}"], chains=[1], concurrency=1, progress=lambda *_: 1 // 0)
        finally:
            waiting.set()


def test_ctrl_c_ends_the_run() -> None:
    waiting = threading.Event()

    def script(_: Exchange) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        waiting.wait(WAIT_S)
        return False

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with stub(script) as server:
        try:
            with pytest.raises(KeyboardInterrupt):
                run_load(server.url, [b"{}"], chains=[1], concurrency=1)
        finally:
            waiting.set()
            signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"url": "https://127.0.0.1/"}, "TLS"),
        ({"url": "ftp"}, "url"),
        ({"bodies": []}, "bodies"),
        ({"chains": [0]}, "chains"),
        ({"concurrency": 0}, "concurrency"),
        ({"arrivals": [1.0, 0.5], "chains": [1, 1]}, "ascending"),
        ({"arrivals": [0.0, 0.5]}, "one per chain"),
        ({"arrivals": [float("nan")]}, "ascending"),
        ({"threads": 0}, "threads"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"ramp_s": -1.0}, "ramp_s"),
        ({"headers": [("a b", "c")]}, "header"),
    ],
)
def test_a_plan_that_makes_no_sense(settings: dict[str, Any], named: str) -> None:
    plan: dict[str, Any] = {"url": "http://127.0.0.1:9/", "bodies": [b""], "chains": [1], "concurrency": 1, **settings}
    url, bodies = plan.pop("url"), plan.pop("bodies")
    with pytest.raises(ValueError, match=named):
        run_load(url, bodies, **plan)
