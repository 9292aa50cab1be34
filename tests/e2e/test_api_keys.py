"""Several API keys in front of a small engine: who waits is served by shares, and nobody waits for another's flood.

Nothing here depends on speed: requests of another key hold the engine until all that is to be compared waits, and what
is counted is the order of the access log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.e2e import ServerProcess, serving, slow_device, until
from tests.helpers.seconds import WAIT_S

KEYS = """keys:
- {name: three, key: sk-three, share: 3}
- {name: one, key: sk-one}
- {name: flood, key: sk-flood}
- {name: single, key: sk-single, max_inflight: 1}
- {name: own, key: sk-own, own_cache: true}
"""
ROWS = 2
TOTAL = "minisgl:cached_tokens_total "
LINE = re.compile(r"request .* method=POST .* status=200 .*key=(\w+)")


@pytest.fixture(scope="module")
def server(front_end: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("keys")
    (folder / "keys.yaml").write_text(KEYS)
    flags = (*slow_device(folder, 2), "--max-seq-len", "100000")
    keys = ("--api-key-file", str(folder / "keys.yaml"), "--api-key", "sk-flag", "--frontend", front_end)
    rows = ("--max-running-requests", str(ROWS), "--max-inflight-per-engine", str(ROWS), "--num-pages", "20000")
    with serving(*flags, *keys, *rows) as running:
        yield running
        text = "\n".join(running.lines)
        assert not any(f"sk-{name}" in text for name in ("three", "one", "flood", "single", "own", "flag"))


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


def ask(server: ServerProcess, name: str) -> int:
    body = {"prompt": "a b c", "max_tokens": 4, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer(name), timeout=3 * WAIT_S).status_code


def num_cached(server: ServerProcess, name: str, ids: range) -> int:
    body = {"prompt": list(ids), "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer(name), timeout=3 * WAIT_S)
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert answer.headers["x-minisgl-cached-tokens"] == str(found)
    return found


def test_keys_share_cached_prompts_except_keys_with_their_own_cache(server: ServerProcess) -> None:
    """Keys find each other's, but for one with a cache of its own; a key is told of what was its own."""
    shared, own = range(500, 600), range(700, 800)
    assert [num_cached(server, name, shared) for name in ("one", "three", "own", "own", "three")] == [0, 0, 0, 96, 96]
    assert [num_cached(server, name, own) for name in ("own", "one", "own", "flood")] == [0, 0, 96, 0]
    found = [96, 96, 96, 96, 96]  # three, own and three; own and flood

    def num_found() -> int:
        text = httpx.get(f"{server.url}/metrics", headers=bearer("flag")).text
        return int(sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(TOTAL)))

    until(lambda: num_found() == sum(found), f"{sum(found)} tokens were never found in the cache")


def num_queued(server: ServerProcess) -> int:
    found = httpx.get(f"{server.url}/stats", headers=bearer("flag"), timeout=WAIT_S).json()["http"]
    return int(found["requests_queued"]["now"])


def waits(server: ServerProcess, count: int) -> None:
    until(lambda: num_queued(server) == count, f"{count} never waited")


@contextmanager
def held(server: ServerProcess) -> Iterator[None]:
    """Every row of the engine is taken, for the length of a `with`."""
    body = {"prompt": "hold", "max_tokens": 90_000, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=server.url, timeout=WAIT_S, headers=bearer("flag")) as client, ExitStack() as streams:
        parts = list[Iterator[bytes]]()  # one that nobody has closes its stream
        for _ in range(ROWS):
            stream = streams.enter_context(client.stream("POST", "/v1/completions", json=body))
            parts.append(stream.iter_raw())
            next(parts[-1])  # it has a row
        yield


def served(server: ServerProcess, before: int, count: int) -> list[str]:
    """Names of the keys of the next so many answers, in order, but for those that held the engine."""

    def found() -> list[str]:
        names = [match[1] for line in server.lines[before:] if (match := LINE.search(line))]
        return [name for name in names if name != "default"]

    until(lambda: len(found()) >= count, f"{count} answers were never logged")
    return found()


def test_weighted_keys_share_a_busy_engine(server: ServerProcess) -> None:
    """Three to one, while both wait; then the rest of the one."""
    before, each = len(server.lines), 40
    with ThreadPoolExecutor(2 * each) as threads:
        with held(server):
            answers: list[Future[int]] = [threads.submit(ask, server, "one") for _ in range(each)]
            waits(server, each)
            answers += [threads.submit(ask, server, "three") for _ in range(each)]
            waits(server, 2 * each)
        assert {one.result() for one in answers} == {200}
    order = served(server, before, 2 * each)
    assert 26 <= order[:40].count("three") <= 34, order
    assert order.count("three") == order.count("one") == each


def test_a_flood_delays_another_key_by_a_few_requests(server: ServerProcess) -> None:
    before, many = len(server.lines), 80
    with ThreadPoolExecutor(many + 1) as threads:
        with held(server):
            answers = [threads.submit(ask, server, "flood") for _ in range(many)]
            waits(server, many)
            answers.append(threads.submit(ask, server, "one"))
            waits(server, many + 1)
        assert {one.result() for one in answers} == {200}
    order = served(server, before, many + 1)
    assert order.index("one") <= 3 * ROWS, order


def test_a_key_has_no_more_at_once_than_it_may(server: ServerProcess) -> None:
    """One of `single` runs although there are two rows; another key has the other row."""
    body = {"prompt": "hold", "max_tokens": 90_000, "ignore_eos": True, "stream": True}
    url, head = f"{server.url}/v1/completions", bearer("single")
    with httpx.stream("POST", url, json=body, headers=head, timeout=WAIT_S) as stream, ThreadPoolExecutor(1) as threads:
        parts = stream.iter_raw()
        next(parts)
        waiting = threads.submit(ask, server, "single")
        waits(server, 1)
        assert [ask(server, "one") for _ in range(3)] == [200] * 3
        assert num_queued(server) == 1 and not waiting.done()
        stream.close()
        assert waiting.result() == 200


def test_usage_is_reported_by_key(server: ServerProcess) -> None:
    def used() -> dict[str, int]:
        found: dict[str, int] = httpx.get(f"{server.url}/stats", headers=bearer("one")).json()["http"]["keys"]["one"]
        return found

    before = used()
    assert ask(server, "one") == 200
    until(lambda: used()["generated_tokens"] - before["generated_tokens"] == 4, "its four tokens are not counted")
    after = used()
    assert after["requests"] - before["requests"] == 1
    assert after["prompt_tokens"] > before["prompt_tokens"]


def test_a_key_ends_no_requests_of_another(server: ServerProcess) -> None:
    sampling = {"max_new_tokens": 90_000, "ignore_eos": True}
    body = {"text": "a b c", "rid": "mine", "stream": True, "sampling_params": sampling}

    def end(name: str, **asked: Any) -> None:
        answer = httpx.post(f"{server.url}/abort_request", json=asked, headers=bearer(name), timeout=3 * WAIT_S)
        assert answer.status_code == 200

    with httpx.stream("POST", f"{server.url}/generate", json=body, headers=bearer("one"), timeout=3 * WAIT_S) as answer:
        events = (line for line in answer.iter_lines() if line)
        next(events)
        end("three", abort_all=True)
        end("three", rid="mine")
        assert not any('"abort"' in next(events) for _ in range(500))
        end("one", rid="mine")
        assert any('"abort"' in line for line in events)
