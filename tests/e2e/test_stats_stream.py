"""The live stream of real servers: what the batch of a known request was, engines of a pool, a load to look at."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.e2e import ServerProcess
from tests.helpers.seconds import WAIT_S

IDS = list(range(40, 60))
KINDS = [
    ("python", "python", ()),
    ("rust", "rust_hotpath", ("--dp", "2", "--schedule-policy", "srpf")),
]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind[0])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    front_end, scheduler, more = request.param
    sizes = ("--page-size", "4", "--num-pages", "64", "--max-prefill-length", "16", "--max-seq-len", "128")
    flags = ("--frontend", front_end, "--cpu-backend", scheduler, *sizes, *more)
    with ServerProcess(("--engine", "echo", "--log-prompts", *flags)) as running:
        yield running


def events(url: str, wanted: Callable[[str, Any], bool], meanwhile: Callable[[], object] = lambda: None) -> list[Any]:
    """All events up to the first that is `wanted`; `meanwhile` is called when the first tree has come."""
    found = []
    with httpx.stream("GET", f"{url}/stats/stream?steps=1&tree=1", timeout=WAIT_S) as response:
        name, began = "", False
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                found.append((name, data))
                if not began and name == "tree":
                    began = True
                    meanwhile()
                if began and wanted(name, data):
                    return found
    return found


def steps_of(found: list[Any]) -> list[dict[str, Any]]:
    return [step for name, data in found if name == "steps" for step in data["steps"]]


def test_stats_name_the_schedule_policy(server: ServerProcess) -> None:
    policy = "srpf" if "srpf" in server.process.args else "fcfs"
    assert httpx.get(f"{server.url}/stats", timeout=WAIT_S).json()["schedule_policy"] == policy


def test_step_events_show_the_chunks_and_cached_pages_of_a_request(server: ServerProcess) -> None:
    """20 tokens under a budget of 16 are two chunks; three tokens are made; asked again, four pages of 4 are cached."""

    def ask() -> None:
        body = {"prompt": IDS, "max_tokens": 3, "ignore_eos": True, "seed": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S).status_code == 200

    def is_end(name: str, data: Any) -> bool:
        return name == "steps" and any(step["finished"] for step in data["steps"])

    first = steps_of(events(server.url, is_end, ask))
    rows = [row for step in first for row in step["rows"]]
    number = rows[0][0]
    assert rows == [
        [number, "prefill", 16, 0, 16],
        [number, "prefill", 4, 0, 20],
        [number, "decode", 1, 0, 21],
        [number, "decode", 1, 0, 22],
    ]
    assert [step["finished"] for step in first if step["finished"]] == [[[number, "length"]]]
    assert all(step["retracted"] == [] and step["num_retracted"] == 0 for step in first)
    found = events(server.url, is_end, ask)
    again = steps_of(found)
    assert [step["step"] for step in again[: len(first)]] == [step["step"] for step in first], "the recent ones"
    rows = [row for step in again[len(first) :] for row in step["rows"]]
    assert [row[1:] for row in rows] == [["prefill", 4, 16, 20], ["decode", 1, 0, 21], ["decode", 1, 0, 22]]
    engines = {data["engine"] for name, data in found if name == "steps"}
    assert len(engines) == 1 and engines <= {0, 1}, "the router sends it where its prefix is"
    trees = [data for name, data in found if name == "tree" and data["engine"] in engines]
    top = next(node for node in trees[0]["nodes"] if node["parent"] == 0)
    assert top["tokens"] == top["depth"] >= 16 and top["text"] and not top["pinned"]


def test_stats_and_tree_events_cover_every_engine(server: ServerProcess) -> None:
    *_, (_, stats) = events(server.url, lambda name, data: name == "stats")
    numbers = {one["engine"] for one in stats["engines"]}
    seen: set[int] = set()

    def all_told(name: str, data: Any) -> bool:
        if name == "tree":
            seen.add(data["engine"])
        return seen == numbers

    events(server.url, all_told)
    assert seen == numbers


def test_a_server_that_stops_ends_the_stream(server: ServerProcess) -> None:
    """The last test of this server."""

    *_, (name, data) = events(server.url, lambda name, _: name == "error", server.process.terminate)
    assert name == "error" and "shutting down" in data["error"]["message"]
    assert server.process.wait(WAIT_S) == 0


def test_demo_load_runs_without_clients_and_does_not_delay_shutdown() -> None:
    with ServerProcess(("--engine", "sim", "--demo-load", "--api-key", "key", "--frontend", "python")) as server:
        assert httpx.get(f"{server.url}/stats/stream", timeout=WAIT_S).status_code == 401
        kinds: set[str] = set()
        with httpx.stream(
            "GET", f"{server.url}/stats/stream?steps=1", headers={"authorization": "Bearer key"}, timeout=WAIT_S
        ) as response:
            for line in response.iter_lines():
                if line.startswith("data: ") and "steps" in (data := json.loads(line.removeprefix("data: "))):
                    kinds |= {row[1] for step in data["steps"] for row in step["rows"]}
                if kinds == {"prefill", "decode"}:
                    break
        assert server.stop(signal.SIGTERM) == 0
        assert any(line.endswith("drained: 0 requests are cut off") for line in server.lines)
