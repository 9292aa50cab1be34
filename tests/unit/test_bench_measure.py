"""The client of comparisons: whole answers count, anything else ends the run."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import pytest

from minisgl.bench import measure
from minisgl.bench.measure import Load, load_from
from minisgl.bench.stream_client import RequestFailed, closed_loop, open_loop
from minisgl.config import ConfigError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d,"total_tokens":1}}\n\ndata: [DONE]\n\n'
BODIES: list[dict[str, object]] = [{"max_tokens": 3}] * 4


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def whole(tokens: int = 3) -> list[bytes]:
    return [HEAD, *(chunk(PIECE) for _ in range(tokens)), chunk(LAST % tokens) + b"0\r\n\r\n"]


@contextlib.contextmanager
def scripted(
    answer: Callable[[int], list[bytes] | None], requests_per_connection: int = 1000
) -> Iterator[tuple[str, list[int]]]:
    """A server that writes `answer(n)` to its n-th request, piece by piece; None: it closes the connection. Yields its
    address and the connection that each request came on."""
    seen: list[int] = []
    lock, connections = threading.Lock(), count()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            connection = next(connections)
            for _ in range(requests_per_connection):
                length, line = 0, self.rfile.readline()
                if not line:
                    return
                while line.strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                    line = self.rfile.readline()
                self.rfile.read(length)
                with lock:
                    seen.append(connection)
                    number = len(seen) - 1
                pieces = answer(number)
                if pieces is None:
                    return
                for piece in pieces:
                    self.wfile.write(piece)
                    self.wfile.flush()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", seen
        finally:
            server.shutdown()
            thread.join()


def test_answers_are_counted_and_timed() -> None:
    with scripted(lambda n: whole()) as (url, seen):
        answers = closed_loop(url, BODIES, 2)
    assert len(answers) == 4 and len(seen) == 4
    assert len(set(seen)) <= 2  # connections are kept
    for answer in answers:
        assert answer.num_tokens == 3 and 1 <= len(answer.pieces) <= 3
        assert answer.sent < answer.pieces[0] and answer.pieces == sorted(answer.pieces)


def test_an_open_loop_sends_when_requests_are_due() -> None:
    """Late clients count against the server: latencies start when a request was due."""
    held = threading.Event()

    def answer(n: int) -> list[bytes]:
        if n == 3:
            held.set()
        elif n == 0:
            assert held.wait(20), "the fourth request waits for the first answer: this is no open loop"
        return whole()

    with scripted(answer) as (url, seen):
        answers = open_loop(url, BODIES, [0.0, 0.01, 0.02, 0.03])
    assert len(answers) == 4 and len(set(seen)) > 1
    due = sorted(answer.sent for answer in answers)
    assert [at - due[0] for at in due] == pytest.approx([0.0, 0.01, 0.02, 0.03])
    assert all(answer.pieces[0] > answer.sent for answer in answers)


def test_a_connection_that_was_closed_while_idle_is_replaced() -> None:
    with scripted(lambda n: whole(), requests_per_connection=1) as (url, seen):
        answers = open_loop(url, BODIES, [0.0, 0.1, 0.2, 0.3])
    assert len(answers) == 4 and len(set(seen)) == 4


def test_arrivals_are_a_poisson_process_by_seed() -> None:
    load = Load(num_requests=4000, rate=50.0, seed=2)
    times = load.times_s()
    assert times == load.times_s() and times == sorted(times)
    assert times[-1] == pytest.approx(80, rel=0.1)
    assert times != replace(load, seed=3).times_s()


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_frames_may_be_cut_anywhere(size: int) -> None:
    data = b"".join(whole())
    with scripted(lambda n: [data[i : i + size] for i in range(0, len(data), size)]) as (url, _):
        assert [answer.num_tokens for answer in closed_loop(url, BODIES[:2], 1)] == [3, 3]


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([b"HTTP/1.1 429 Too Many\r\ncontent-length: 5\r\n\r\nbusy!"], "429 Too Many"),
        ([HEAD, chunk(PIECE), b"0\r\n\r\n"], "before its time"),
        ([HEAD, chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"], "before its time"),
        (None, "connection was lost"),
    ],
)
def test_anything_else_ends_the_run(pieces: list[bytes] | None, said: str) -> None:
    with (
        scripted(lambda n: pieces if n == 1 else whole()) as (url, _),
        pytest.raises(RequestFailed, match=said),
    ):
        closed_loop(url, BODIES, 2)


def test_a_broken_client_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.bench.stream_client.USAGE", None)
    with scripted(lambda n: whole()) as (url, _), pytest.raises(AttributeError):
        closed_loop(url, BODIES, 2)


def test_a_shorter_answer_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        model = "m"

        def __init__(self, url: str) -> None:
            self.url = url

    with scripted(lambda n: whole(2)) as (url, _), pytest.raises(ConfigError, match="tokens came instead of"):
        measure.measure(Server(url), Load(concurrency=1, num_requests=2, output_len=3))  # type: ignore[arg-type]


def test_loads_are_deterministic_and_within_their_ranges() -> None:
    load = Load(num_requests=200, input_len=10, max_input_len=20, output_len=5, max_output_len=9, shared_len=4, seed=3)
    bodies = load.bodies("m")
    assert bodies == load.bodies("m")
    outputs = {body["max_tokens"] for body in bodies}
    assert outputs == {5, 6, 7, 8, 9}
    texts = [body["messages"][0]["content"].split() for body in bodies]  # type: ignore[index]
    assert {len(text) for text in texts} <= set(range(10, 21)) and len({tuple(text[:4]) for text in texts}) == 1
    assert len({tuple(text) for text in texts}) == 200


def test_flags_of_a_load() -> None:
    assert load_from(["--concurrency", "3", "--max-output-len", "7"]) == Load(concurrency=3, max_output_len=7)
    with pytest.raises(ConfigError, match="--num-requests 0"):
        load_from(["--num-requests", "0"])


def test_steps_come_from_the_server_s_own_counts() -> None:
    def stats(steps: int, seconds: float) -> dict[str, object]:
        meters = {part: {"total_s": seconds} for part in measure.LOOP}
        return {"num_steps_total": steps, "num_rows_total": 4 * steps, "meters": meters}

    found = measure._steps(stats(10, 1.0), stats(110, 1.001))
    assert found["scheduler_us_per_step"] == pytest.approx(20) and found["rows_per_step"] == 4
    assert measure._steps({}, {}) == {}
