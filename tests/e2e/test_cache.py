"""Whole servers whose cache is steered: prefixes from the command line and over HTTP, with one engine and with two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.data_parallel import pool
from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.seconds import WAIT_S
from tests.helpers.several import expected

POOL = ("--engine", "echo", "--num-pages", "96", "--page-size", "4", "--max-seq-len", "160")
SYSTEM = "You answer in one word, in verse, and never with a question."
FILE = "What stands in a file may have\nseveral lines.\n"


@pytest.fixture(scope="module")
def warmed(front_end: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("prefixes") / "prefix.txt"
    file.write_text(FILE, encoding="utf-8")
    with serving(*POOL, "--frontend", front_end, "--warm-prefix", SYSTEM, "--warm-prefix", f"@{file}") as server:
        yield server


@pytest.fixture
def http(warmed: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=warmed.url, timeout=WAIT_S) as client:
        yield client


def ask(http: httpx.Client, prompt: str, seed: int = 1) -> int:
    """How much of `prompt` was cached; its answer must be that of the prompt alone."""
    body = {"prompt": prompt, "max_tokens": 5, "seed": seed, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body).raise_for_status().json()
    assert answer["choices"][0]["text"] == expected(prompt, 5, seed, to_the_end=True)
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def flood(http: httpx.Client) -> None:
    for i in range(6):
        ask(http, f"{i} " * 60, seed=i)


def cards(http: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.get("/v1/cache/prefixes").raise_for_status().json()["data"]
    return found


def test_prefixes_of_the_command_line_are_there_when_it_is_ready(warmed: ServerProcess, http: httpx.Client) -> None:
    first, second = cards(http)
    assert (first["tokens"], first["pinned"], first["state"]) == (len(SYSTEM), True, "ready")
    assert (second["tokens"], second["pinned"], second["state"]) == (len(FILE), True, "ready")
    assert any("computing prefixes" in line for line in warmed.lines)
    ready = next(i for i, line in enumerate(warmed.lines) if "ready: " in line)
    assert ready > next(i for i, line in enumerate(warmed.lines) if "computing prefixes" in line)
    flood(http)
    assert ask(http, SYSTEM + " Why?") == len(SYSTEM) // 4 * 4
    assert ask(http, FILE + " Why?") == len(FILE) // 4 * 4
    until(lambda: cards(http)[0]["hits"] == 1 == cards(http)[1]["hits"], "no hit was counted")


def test_a_prefix_is_added_pinned_and_removed_over_http(http: httpx.Client) -> None:
    text = "This one comes later, and goes again."
    made = http.post("/v1/cache/prefixes", json={"text": text}).raise_for_status()
    assert made.status_code == 200 and made.json()["state"] == "ready"
    flood(http)
    assert ask(http, text + "!") == 36
    pinned = http.get("/stats").json()["engine"]["num_pinned_pages"]
    assert pinned == len(SYSTEM) // 4 + len(FILE) // 4 + 9
    too_much = http.post("/v1/cache/prefixes", json={"text": "x" * 150})
    assert too_much.status_code == 409 and "--max-pinned-ratio" in too_much.json()["error"]["message"]
    loose = http.post("/v1/cache/prefixes", json={"text": "y" * 150, "pin": False}).raise_for_status().json()
    assert loose["state"] == "ready" and ask(http, "y" * 151) == 148
    for card in (made.json(), loose):
        assert http.delete(f"/v1/cache/prefixes/{card['id']}").json()["deleted"]
    flood(http)
    assert ask(http, text + "!") == 0 and len(cards(http)) == 2


def test_the_cache_is_emptied(http: httpx.Client) -> None:
    ask(http, "something that is cached from now on")
    assert ask(http, "something that is cached from now on.") == 36
    assert http.delete("/v1/cache").raise_for_status().json()["freed_pages"] >= 9
    assert ask(http, "something that is cached from now on.") == 0
    assert ask(http, SYSTEM + "?") == len(SYSTEM) // 4 * 4


def test_cache_activity_is_reported(http: httpx.Client) -> None:
    def engine() -> dict[str, Any]:
        found: dict[str, Any] = http.get("/stats").json()["engine"]
        return found

    ask(http, SYSTEM + "...")
    until(lambda: engine()["num_running"] == 0, "it is not idle")
    now = engine()
    for name in ("num_hits_total", "num_misses_total", "num_inserted_pages_total", "num_evicted_pages_total"):
        assert now[name] > 0, name
    assert [one["is_pinned"] for one in now["prefixes"]] == [True, True]
    metrics = http.get("/metrics").text
    for name in ("cache_hits_total", "cache_misses_total", "cache_inserted_pages_total", "cache_evicted_pages_total"):
        assert f"minisgl:{name}" in metrics
    assert f"minisgl:kv_pages_pinned {now['num_pinned_pages']}.0" in metrics


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--warm-prefix", "abc"), "--warm-prefix: tokens: 3: must be at least 4"),
        (("--warm-prefix", SYSTEM, "--warm-prefix", "x" * 150), "--warm-prefix, number 2 of 2: pin: "),
        (("--warm-prefix", "x" * 500), "tokens: at most 159 fit"),
        (("--warm-prefix", SYSTEM, "--max-pinned-ratio", "0"), "--max-pinned-ratio"),
    ],
)
def test_a_prefix_that_cannot_be_kept_ends_the_start(args: tuple[str, ...], said: str) -> None:
    with pytest.raises(RuntimeError, match="did not start") as error, serving(*POOL, *args):
        pass
    assert said in str(error.value), error.value


@pytest.mark.parametrize("order", ["schedule:60:before", pytest.param("commit:90:after", marks=pytest.mark.slow)])
def test_pins_survive_a_broken_scheduler(order: str) -> None:
    with (
        serving(*POOL, "--warm-prefix", SYSTEM, env={"MINISGL_FAULTY_CONTROL_PLANE": order}) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as http,
    ):
        while not (stats := http.get("/stats").json()["engine"])["num_failovers_total"]:
            flood(http)
            assert stats["num_steps_total"] < 5000
        until(lambda: cards(http)[0]["state"] == "ready", "it is not computed again")
        flood(http)
        assert ask(http, SYSTEM + "?") == len(SYSTEM) // 4 * 4


def test_the_settings_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        f'warm-prefix: ["{SYSTEM}"]\ncache-token-budget: 40\ncache-max-prompt: 100\nmax-pinned-ratio: 0.2\n'
    )
    with (
        serving(*POOL, "--config", str(file)) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as http,
    ):
        for i in range(6):
            ask(http, f"{i}" * 90)
        until(lambda: http.get("/health").json()["stats"]["num_running"] == 0, "it is not idle")
        until(lambda: http.get("/health").json()["stats"]["num_evictable_pages"] <= 10, "more than the budget is kept")
        assert [ask(http, "n" * 101), ask(http, "n" * 101)] == [0, 0]
        assert http.post("/v1/cache/prefixes", json={"text": "z" * 40}).status_code == 409


def test_every_engine_pins_the_prefixes() -> None:
    """Also one that was killed and started again."""
    with (
        serving(*POOL, "--dp", "2", "--routing", "round_robin", "--warm-prefix", SYSTEM) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as http,
    ):
        made = http.post("/v1/cache/prefixes", json={"text": "for both of them, please"}).raise_for_status().json()
        assert [one["state"] for one in made["engines"]] == ["ready", "ready"]
        assert [ask(http, SYSTEM + "?", seed) for seed in range(2)] == [60, 60]
        until(lambda: cards(http)[0]["hits"] == 2, "a hit of each engine")
        assert [one["hits"] for one in cards(http)[0]["engines"]] == [1, 1]
        freed = http.delete("/v1/cache").raise_for_status().json()
        assert [one["engine"] for one in freed["engines"]] == [0, 1]
        server.engine().kill()
        until(lambda: sum(pool(server)["num_losses_total"]) == 1, "nobody noticed")
        until(lambda: http.get("/health").json()["status"] == "ok", "it did not come back")
        until(lambda: all(one["state"] == "ready" for one in cards(http)), "it did not get them again")
        assert [ask(http, SYSTEM + "!", seed) for seed in range(2)] == [60, 60]
        assert http.delete(f"/v1/cache/prefixes/{made['id']}").json()["deleted"]
