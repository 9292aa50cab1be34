"""Leases, the queue, and whose room goes to whom, over servers that are none."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from minisgl.registry import registry as module
from minisgl.registry import room
from minisgl.registry.model import Lease
from minisgl.registry.registry import Registry
from minisgl.server.core.errors import ApiError
from tests.helpers.seconds import WAIT_S
from tests.helpers.several import MIB, NEED, entry, several, states, until, use


async def test_a_model_is_loaded_by_its_first_request_and_stays() -> None:
    async with several(entry("a"), entry("b"), room_for=2) as (fleet, found):
        assert states(found) == {"a": "unloaded", "b": "unloaded"}
        await use(found, "a")
        await use(found, "a")
        assert states(found) == {"a": "loaded", "b": "unloaded"} and fleet.started == ["a"]
    assert fleet.servers["a"].stopped.is_set() and states(found)["a"] == "unloaded"


async def test_a_server_gets_the_memory_that_is_set_aside() -> None:
    async with several(entry("a", memory=1000 * MIB), room_for=20) as (fleet, found):
        await use(found, "a")
        given = fleet.configs["a"].engine.memory
        assert given is not None and 900 * MIB < given < 1000 * MIB


async def test_all_who_ask_while_it_loads_share_one_server() -> None:
    async with several(entry("a"), room_for=1) as (fleet, found):
        fleet.hold["a"] = asyncio.Event()
        uses = [asyncio.ensure_future(use(found, "a")) for _ in range(5)]
        await until(lambda: states(found)["a"] == "loading" and found.num_waiting == 5)
        fleet.hold["a"].set()
        await asyncio.gather(*uses)
        assert fleet.started == ["a"] and found.num_waiting == 0


async def test_the_least_recently_used_makes_room() -> None:
    async with several(*map(entry, "abc"), room_for=2) as (_, found):
        for name in "aba":
            await use(found, name)
        await use(found, "c")
        assert states(found) == {"a": "loaded", "b": "unloaded", "c": "loaded"}


async def test_serving_model_is_unloaded_for_a_waiting_one_at_its_end() -> None:
    async with several(entry("a"), entry("b"), room_for=1) as (_, found):
        with found.lease(found.models["a"]) as lease:
            await lease.ready
            waits = asyncio.ensure_future(use(found, "b"))
            for _ in range(50):
                await asyncio.sleep(0)
            assert states(found) == {"a": "loaded", "b": "unloaded"} and found.place(found.models["b"]) == 0
        await waits
        assert states(found) == {"a": "unloaded", "b": "loaded"}


async def test_a_model_that_is_always_asked_for_gives_way_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its new requests wait behind the one that waits for its room, and those in flight end."""
    monkeypatch.setattr(room, "PATIENCE_S", 0.0)
    async with several(entry("a"), entry("b"), room_for=1) as (fleet, found):
        with found.lease(found.models["a"]) as first:
            await first.ready
            found.models["a"].seen.load_s = 0.0
            waits = asyncio.ensure_future(use(found, "b"))
            await until(lambda: bool(found._leaving))
            late = asyncio.ensure_future(use(found, "a"))
            await until(lambda: found.num_waiting == 2)
            assert not waits.done() and not late.done()
        await asyncio.gather(waits, late)
        assert fleet.started == ["a", "b", "a"]


async def test_a_claim_whose_clients_have_left_is_none() -> None:
    """And a model that was to give way for it serves again."""
    async with several(entry("a"), entry("b"), room_for=1) as (_, found):
        with found.lease(found.models["a"]) as first:
            await first.ready
            waits = asyncio.ensure_future(use(found, "b"))
            await until(lambda: found.num_waiting == 1)
            waits.cancel()
            await until(lambda: found.num_waiting == 0)
            await use(found, "a")
        assert states(found) == {"a": "loaded", "b": "unloaded"}


async def test_pinned_models_stay_and_are_there_from_the_start() -> None:
    async with several(entry("a", pin=True), entry("b"), entry("c", memory=2 * NEED), room_for=2) as (_, found):
        assert found.is_ready
        found.preload()
        assert not found.is_ready
        await until(lambda: found.is_ready)
        assert states(found)["a"] == "loaded"
        await use(found, "b")
        assert states(found)["a"] == "loaded"
        with pytest.raises(ApiError) as error:
            found.lease(found.models["c"])
        assert error.value.status == 400 and "100 MiB are pinned" in str(error.value)


async def test_an_idle_model_ends_after_its_ttl(monkeypatch: pytest.MonkeyPatch) -> None:
    async with several(entry("a", ttl_s=0.02), entry("b"), room_for=2) as (_, found):
        await use(found, "b")
        with found.lease(found.models["a"]) as lease:
            await lease.ready
            await asyncio.sleep(0.05)
            assert states(found)["a"] == "loaded"
        await until(lambda: states(found)["a"] == "unloaded")
        assert states(found)["b"] == "loaded"


async def test_the_queue_is_bounded() -> None:
    async with several(entry("a"), room_for=1, max_queued_requests=3) as (fleet, found):
        fleet.hold["a"] = asyncio.Event()
        uses = [asyncio.ensure_future(use(found, "a")) for _ in range(3)]
        await until(lambda: found.num_waiting == 3)
        with pytest.raises(ApiError) as error:
            found.lease(found.models["a"])
        assert error.value.status == 429 and error.value.headers["retry-after"]
        fleet.hold["a"].set()
        await asyncio.gather(*uses)


async def test_failed_load_has_a_reason_and_a_retry_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "FIRST_WAIT_S", WAIT_S)
    async with several(entry("a"), entry("b"), room_for=1) as (fleet, found):
        fleet.refuse["a"] = "the file ends early"
        for _ in range(2):
            with pytest.raises(ApiError) as error:
                await use(found, "a")
            assert error.value.status == 503 and "the file ends early" in str(error.value)
            assert 1 < int(error.value.headers["retry-after"]) <= WAIT_S
        assert fleet.started == ["a"]
        await use(found, "b")
        found.models["a"].failure.retry_at = 0.0
        fleet.refuse.clear()
        await use(found, "a")
        assert states(found) == {"a": "loaded", "b": "unloaded"} and not found.models["a"].failure.reason


async def test_a_server_that_dies_is_started_again_by_the_next_request() -> None:
    async with several(entry("a"), room_for=1) as (fleet, found):
        await use(found, "a")
        fleet.servers["a"].ended.set_result(-9)
        await until(lambda: states(found)["a"] == "unloaded")
        await use(found, "a")
        assert fleet.started == ["a", "a"]


async def test_larger_measured_memory_is_stored_and_unloads_others() -> None:
    async with several(entry("a"), entry("b"), room_for=2) as (fleet, found):
        await use(found, "a")
        await use(found, "b")
        fleet.servers["b"].used = NEED + MIB
        await found.measure(found.models["b"])
        await until(lambda: states(found)["a"] == "unloaded")
        assert found.set_aside == NEED + MIB and found.models["b"].seen.most_bytes == NEED + MIB


async def test_missing_model_is_downloaded_before_others_are_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, int | None] = {"a": 0, "b": None}
    monkeypatch.setattr(module.Entry, "need", lambda self: None if sizes[self.name] is None else NEED)
    async with several(entry("a"), entry("b"), room_for=1) as (fleet, found):
        await use(found, "a")
        fleet.refuse["b"] = "the hub does not know it"
        with pytest.raises(ApiError) as error:
            await use(found, "b")
        assert error.value.status == 503 and "the hub does not know it" in str(error.value)
        assert states(found) == {"a": "loaded", "b": "unloaded"}  # nobody had to go for it
        fleet.refuse.clear()
        found.models["b"].failure.retry_at = 0.0
        waits = asyncio.ensure_future(use(found, "b"))
        await until(lambda: len(fleet.fetched) == 2)
        sizes["b"] = 0
        await waits
        assert fleet.started == ["a", "b"] and found.set_aside == NEED


async def test_unload_refuses_what_is_used() -> None:
    async with several(entry("a"), room_for=1) as (_, found):
        with found.lease(found.models["a"]) as lease:
            await lease.ready
            with pytest.raises(ApiError) as error:
                await found.unload(found.models["a"])
            assert error.value.status == 409
        await found.unload(found.models["a"])
        await found.unload(found.models["a"])
        assert states(found)["a"] == "unloaded"


async def test_the_end_refuses_those_who_wait_and_stops_what_loads() -> None:
    async with several(entry("a"), room_for=1) as (fleet, found):
        fleet.hold["a"] = asyncio.Event()
        waits = asyncio.ensure_future(use(found, "a"))
        await until(lambda: states(found)["a"] == "loading")
    with pytest.raises(ApiError):
        await waits
    assert states(found)["a"] == "unloaded" and not fleet.servers


def check(found: Registry, held: dict[str, int]) -> None:
    for name, model in found.models.items():
        assert model.use.num_serving >= held[name] and (model.state == "loaded" or not held[name]), name
    assert found.set_aside <= found.budget


@pytest.mark.parametrize("seed", range(4))
async def test_random_requests(seed: int, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Six models of different needs, of which two or three fit: each request gets its model, and no model is unloaded
    under one."""
    monkeypatch.setattr(room, "PATIENCE_S", 0.0)

    async def client(found: Registry, rng: random.Random, held: dict[str, int], most: int) -> None:
        for _ in range(most):
            name = rng.choice(list(found.models))
            task = asyncio.current_task()
            with found.lease(found.models[name]) as lease:
                if rng.random() < 0.1:
                    continue  # it leaves before anything came
                server = await lease.ready
                assert task is not None
                held[name] += 1
                for _ in range(rng.randint(0, 8)):
                    await asyncio.sleep(0)
                    check(found, held)
                    assert found.models[name].server is server
                held[name] -= 1

    rng = random.Random(seed)
    needs, held = {name: rng.randint(NEED // 2, NEED) for name in "abcdef"}, dict.fromkeys("abcdef", 0)
    async with several(*(entry(name, memory=need) for name, need in needs.items()), room_for=2.2) as (fleet, found):
        fleet.used |= needs
        await asyncio.gather(*(client(found, random.Random(seed * 100 + i), held, 40 * times) for i in range(8)))
        assert found.num_waiting == 0 and sum(held.values()) == 0
        assert sum(found.num_unloads.values()) > 10


# ------------------------------------------------------------------------------------------------- lines of batches


async def line(found: Registry, name: str) -> Lease:
    """A lease in the background, once there is one."""
    async with asyncio.timeout(WAIT_S):
        while (lease := found.lease_in_background(found.models[name])) is None:
            await asyncio.sleep(0)
    return lease


async def test_a_line_has_its_model_loaded_where_there_is_room() -> None:
    async with several(entry("a"), entry("b", memory=10 * NEED), entry("c"), room_for=1) as (fleet, found):
        fleet.refuse["c"] = "it is broken"
        with await line(found, "a") as lease:
            assert lease.ready.result() is fleet.servers["a"] and fleet.started == ["a"]
            with pytest.raises(ApiError, match="used by 1 requests"):
                await found.unload(found.models["a"])
        with pytest.raises(ApiError, match="all models may take"):
            await line(found, "b")
        with pytest.raises(ApiError, match="it is broken") as caught:
            await line(found, "c")
        assert caught.value.status == 503 and found.num_waiting == 0


async def test_a_line_has_no_model_unloaded_that_somebody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    async with several(*map(entry, "abc"), room_for=1) as (fleet, found):

        async def is_refused(name: str) -> None:
            for _ in range(20):
                assert found.lease_in_background(found.models[name]) is None
                await asyncio.sleep(0)
            assert states(found)[name] == "unloaded"

        with found.lease(found.models["a"]) as lease:
            await lease.ready
            await is_refused("b")
        await is_refused("b")  # it was asked just now
        monkeypatch.setattr(module, "QUIET_S", 0.0)
        with await line(found, "b"), await line(found, "b"):
            assert states(found) == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
            await is_refused("c")  # lines do not push each other out
        (await line(found, "c")).__exit__(None, None, None)
        assert fleet.started == ["a", "b", "c"]


async def test_waiting_request_takes_memory_of_batch_lines_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 3600.0)
    async with several(entry("a"), entry("b", ttl_s=0.001), room_for=1) as (fleet, found):
        with await line(found, "a"):
            await use(found, "b")
            assert states(found) == {"a": "unloaded", "b": "loaded"} and fleet.servers["a"].stopped.is_set()
        await until(lambda: states(found)["b"] == "unloaded")
        with await line(found, "b"):
            await until(lambda: time.monotonic() > found.models["b"].use.idle_since + 0.001)
            found._decide()
            assert states(found)["b"] == "loaded"  # what answers a line is not idle
        assert found.models["a"].use.num_lines == found.models["b"].use.num_lines == 0
