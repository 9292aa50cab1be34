"""/stats/stream, on a scripted engine, under both front ends."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from minisgl.message import StepView, TreeView, Watch, Watched
from minisgl.server.admin import live
from minisgl.server.admin.live import Watcher
from minisgl.step import FinishReason
from tests.helpers.server import STATS, Frontend, check_error, frontend, read_until

STEP = StepView(
    7, 1.5e12, (0.5, 2.0, 0.25, 1.0), [(3, False, 16, 32, 48), (2**40, True, 1, 0, 9)], [(3, 32)], [], 0, [], 1, 40, 0
)
TREE = TreeView(3, 64, [(1, 0, 32, 32, 2, 0, 1, True, False, [104, 105])])


@contextlib.contextmanager
def reading(http: httpx.Client, query: str = "") -> Iterator[Iterator[tuple[str, Any]]]:
    with http.stream("GET", f"/stats/stream{query}") as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield events(response)


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def watches(server: Frontend) -> list[Watch]:
    return [one for one in list(server.engine.received) if isinstance(one, Watch)]


def next_of(found: Iterator[tuple[str, Any]], name: str) -> Any:
    return next(data for event, data in found if event == name)


def test_stats_are_sent_at_once_and_every_second(server: Frontend, http: httpx.Client) -> None:
    server.engine.send(STATS)
    server.wait_until(lambda: server.client.stats is not None)
    before = len(watches(server))
    with reading(http) as found:
        first = next_of(found, "stats")
        assert first["rates"] == dict.fromkeys(first["rates"]) and first["interval_s"] == 0
        assert first["ttft_s"].keys() == first["itl_s"].keys() == {"count", "p50", "p90", "p99"}
        kv = first["kv"]
        assert kv["free"] + kv["cached"] + kv["protected"] + kv["held"] == kv["pages"] == 64
        assert first["requests"] == {"running": 3, "waiting": 2} and first["hit_rate"] == 0.4286
        assert first["stats"]["model"] == "scripted" and first["retractions_total"] == 5
        assert [one["engine"] for one in first["engines"]] == [0]
        later = msgspec.structs.replace(STATS, num_steps_total=950, num_prompt_tokens_total=800, num_retracted_total=7)
        server.engine.send(later)
        http.post("/v1/completions", json={"prompt": "say:hello", "max_tokens": 8})
        seen: list[Any] = []  # one a second: the engine's news and the request's may be in two of them
        while not all(any(one["rates"][name] for one in seen) for name in ("steps", "generated_tokens")):
            seen.append(next_of(found, "stats"))
        assert all(one["interval_s"] > 0 for one in seen) and sum(one["retractions"] for one in seen) == 2
        assert any(one["ttft_s"]["count"] == 1 and one["ttft_s"]["p50"] > 0 for one in seen)
    assert len(watches(server)) == before, "an engine was asked for what nobody looks at"


def test_steps_and_trees_are_sent_if_requested(server: Frontend, http: httpx.Client) -> None:
    before = len(watches(server))
    with reading(http, "?steps=1&tree=1") as found:
        server.engine.wait_for(lambda all_: [one for one in all_ if isinstance(one, Watch)][before:])
        assert watches(server)[before] == Watch(True, True)
        server.engine.send(Watched(0, [STEP]), Watched(1, [], TREE))
        told = next_of(found, "steps")
        assert (told["engine"], told["left_out"]) == (0, 0)
        (step,) = told["steps"]
        assert step["rows"] == [[3, "prefill", 16, 32, 48], [2**40, "decode", 1, 0, 9]]
        assert step["phases"] == [0.5, 2.0, 0.25, 1.0] and step["admitted"] == [[3, 32]] and step["free"] == 40
        tree = next_of(found, "tree")
        names = {"id": 1, "parent": 0, "tokens": 32, "depth": 32, "locks": 2, "age": 0, "children": 1}
        names |= {"pinned": True, "saved": False}
        assert (tree["num_nodes"], tree["num_tokens"], tree["left_out"], tree["nodes"]) == (3, 64, 2, [names])
        server.engine.wait_for(lambda all_: len([one for one in all_ if isinstance(one, Watch)]) > before + 1)
    server.wait_until(lambda: server.client.on_watched is None)


def test_watchers_share_the_engine_messages(server: Frontend) -> None:
    with server.http() as one, server.http() as other:
        with reading(one, "?steps=1") as first, reading(other) as second:
            next_of(first, "stats"), next_of(second, "stats")
            later = msgspec.structs.replace(STEP, step=8, at_ms=STEP.at_ms + 1)
            server.engine.send(Watched(0, [later]))
            while next_of(first, "steps")["steps"][-1]["step"] != 8:
                pass
            with server.http() as third, reading(third, "?steps=1") as found:  # the recent ones, and none twice
                assert [step["step"] for step in next_of(found, "steps")["steps"]][-1:] == [8]
                server.engine.send(Watched(0, [later, msgspec.structs.replace(later, step=9, at_ms=later.at_ms + 1)]))
                assert [step["step"] for step in next_of(found, "steps")["steps"]] == [9]
            assert next(second)[0] == "stats", "it did not ask for steps"
        server.wait_until(lambda: server.client.on_watched is None)
        before = len(watches(server))
        with reading(one) as found:
            next_of(found, "stats")
            assert len(watches(server)) == before


def test_watcher_that_disconnects_leaves_nothing(server: Frontend) -> None:
    for query in ("", "?steps=1"):
        with server.connect(b"GET /stats/stream%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % query.encode()) as connection:
            read_until(connection, b"event: stats")
            assert server.client.on_watched is not None
        server.wait_until(lambda: server.client.on_watched is None)


@pytest.mark.parametrize(
    ("query", "field"),
    [("steps=2", "steps"), ("tree=true", "tree"), ("steps=", "steps"), ("steps=1&steps=1", "steps"), ("x=1", "x")],
)
def test_invalid_options_are_refused_by_name(http: httpx.Client, query: str, field: str) -> None:
    assert check_error(http.get(f"/stats/stream?{query}"), 400)["param"] == field


def test_stream_allows_head_and_refuses_post(http: httpx.Client) -> None:
    assert http.head("/stats/stream").status_code == 200
    check_error(http.post("/stats/stream", json={}), 405)


def test_too_many_watchers_are_refused(server: Frontend, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_WATCHERS", 1)
    with server.http() as other, reading(other) as found:
        next_of(found, "stats")
        assert check_error(http.get("/stats/stream"), 429)["code"] == "too_many_watchers"


def test_a_dead_engine_ends_the_stream_with_its_reason(front_end: str) -> None:
    with frontend(front_end=front_end) as server, server.http() as http, reading(http, "?steps=1") as found:
        next_of(found, "stats")
        server.on_loop(lambda: server.client.fail("the engine process died (exit code 9)"))
        error = next_of(found, "error")["error"]
        assert "exit code 9" in error["message"] and list(found) == []


# ------------------------------------------------------------------------------------------------------- a reader


def told(watcher: Watcher) -> list[tuple[str, Any]]:
    found = []
    for event in watcher.events(None):
        name, data = event.decode().rstrip("\n").split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def views(first: int, count: int) -> list[StepView]:
    return [msgspec.structs.replace(STEP, step=first + i) for i in range(count)]


def test_slow_watcher_gets_newest_steps_and_count_of_missed() -> None:
    watcher = Watcher(steps=True, tree=True)
    for at in range(0, 300, 10):
        watcher.watched(0, Watched(at, views(at, 10)))
        watcher.watched(0, Watched(at + 10, [], msgspec.structs.replace(TREE, num_nodes=at + 1)))
        watcher.set_stats({"at_ms": at})
    found = dict(told(watcher))
    assert [one["step"] for one in found["steps"]["steps"]] == list(range(300 - live.MAX_STEPS, 300))
    assert found["steps"]["left_out"] == 300 - live.MAX_STEPS
    assert found["stats"] == {"at_ms": 290, "left_out": 29} and found["tree"]["num_nodes"] == 291
    assert told(watcher) == []


def test_lost_frames_are_counted_as_missed() -> None:
    watcher = Watcher(steps=True, tree=False)
    watcher.watched(1, Watched(40, views(40, 2)))  # it came when others looked already
    watcher.watched(1, Watched(50, views(50, 2)))
    watcher.watched(0, Watched(3, views(3, 1)))
    assert [(data["engine"], data["left_out"], len(data["steps"])) for _, data in told(watcher)] == [
        (1, 8, 4),
        (0, 0, 1),
    ]
    watcher.watched(1, Watched(0, views(0, 1)))  # an engine that began again
    assert [data["left_out"] for _, data in told(watcher)] == [0]


def test_recent_steps_are_sent_once() -> None:
    """By their numbers: a turn's beginning is reckoned back from its end, and may lie before that of another one."""
    watcher = Watcher(steps=True, tree=False)
    watcher.begin(0, views(3, 4))
    early = msgspec.structs.replace(STEP, step=7, at_ms=STEP.at_ms - 5)
    again = msgspec.structs.replace(STEP, step=0, at_ms=STEP.at_ms + 2 * live.AGAIN_MS)
    watcher.watched(0, Watched(0, [*views(1, 6), early, again]))
    ((_, data),) = told(watcher)
    assert [one["step"] for one in data["steps"]] == [3, 4, 5, 6, 7, 0] and data["left_out"] == 0


def test_tree_has_texts_only_with_a_decoder() -> None:
    watcher = Watcher(steps=False, tree=True)
    for text in (None, lambda ids: bytes(ids).decode()):
        watcher.watched(0, Watched(0, views(0, 1), TREE))
        ((event),) = list(watcher.events(text))
        assert (b'"text":"hi"' in event) == (text is not None) and b"104" not in event and b"event: tree" in event


def test_reasons_have_names() -> None:
    step = msgspec.structs.replace(STEP, finished=[(1, reason) for reason in FinishReason if reason])
    watcher = Watcher(steps=True, tree=False)
    watcher.watched(0, Watched(0, [step]))
    ((_, data),) = told(watcher)
    assert [name for _, name in data["steps"][0]["finished"]] == ["stop", "length", "abort", "error"]
