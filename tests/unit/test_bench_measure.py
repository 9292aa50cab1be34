"""The client of comparisons: whole answers count, anything else ends the run."""

from __future__ import annotations

import contextlib
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import pytest

from minisgl.bench import measure
from minisgl.bench.measure import Load, load_from
from minisgl.config import ConfigError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d,"total_tokens":1}}\n\ndata: [DONE]\n\n'


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def whole(tokens: int = 3) -> list[bytes]:
    return [HEAD, *(chunk(PIECE) for _ in range(tokens)), chunk(LAST % tokens) + b"0\r\n\r\n"]


@contextlib.contextmanager
def scripted(answer: Callable[[int], list[bytes] | None]) -> Iterator[str]:
    """A server that writes `answer(n)` to its n-th POST, piece by piece; None: it closes the connection. Yields its
    address."""
    numbers = count()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                length, asked = 0, line.startswith(b"POST")
                while line.strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                    line = self.rfile.readline()
                self.rfile.read(length)
                if not asked:
                    self.wfile.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                    continue
                pieces = answer(next(numbers))
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
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Server:
    """As much of a server as `measure` asks for."""

    model = "m"

    def __init__(self, url: str) -> None:
        self.url = url

    def cpu_seconds(self) -> dict[str, float]:
        return {"http": time.process_time()}

    def rss_bytes(self) -> dict[str, int]:
        return {"http": 2**20}


LOAD = Load(concurrency=2, num_requests=4, output_len=3)


def measured(answer: Callable[[int], list[bytes] | None], load: Load = LOAD) -> dict[str, float]:
    with scripted(answer) as url:
        return measure.measure(Server(url), load)  # type: ignore[arg-type]


def test_answers_are_counted_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WARM_UP_LEN", 3)
    found = measured(lambda n: whole())
    assert found["output_tok_s"] > 0 and found["http_rss_mib"] == 1.0
    assert 0 < found["ttft_p50_ms"] <= found["ttft_p99_ms"] <= found["e2e_p99_ms"]
    assert found["client_us_per_token"] > 0


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([b"HTTP/1.1 429 Too Many\r\ncontent-length: 5\r\n\r\nbusy!"], "1 of 4 requests failed"),
        ([HEAD, chunk(PIECE), b"0\r\n\r\n"], "failed|came instead"),
        (None, "1 of 4 requests failed"),
        (whole(2), "11 tokens came instead of 12"),
    ],
)
def test_anything_else_is_no_result(monkeypatch: pytest.MonkeyPatch, pieces: list[bytes] | None, said: str) -> None:
    monkeypatch.setattr(measure, "WARM_UP_LEN", 3)
    last_of_the_run = 2 * LOAD.concurrency + LOAD.num_requests - 1
    with pytest.raises(ConfigError, match=said):
        measured(lambda n: pieces if n == last_of_the_run else whole())


def test_arrivals_are_a_poisson_process_by_seed() -> None:
    load = Load(num_requests=4000, rate=50.0, seed=2)
    times = load.times_s()
    assert times == load.times_s() and times == sorted(times)
    assert times[-1] == pytest.approx(80, rel=0.1)
    assert times != replace(load, seed=3).times_s()


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
