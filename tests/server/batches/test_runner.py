"""How batches run: each line once whatever ends a process, keys in turns, no room is no answer, ends before the end."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from minisgl.server.batches import runner as runners
from minisgl.server.batches.runner import Asked, Runner, Said, State, usage_of
from minisgl.server.batches.store import BatchInfo, FileInfo, Store, Usage
from minisgl.server.core.errors import ApiError
from tests.helpers import batches
from tests.helpers.batch_runner import text_of
from tests.helpers.seconds import WAIT_S

NOW = 1_000_000
Endpoint = Callable[[Asked], Awaitable[Said]]


def add(store: Store, name: str, num_lines: int, owner: str = "", **more: Any) -> BatchInfo:
    data = batches.jsonl(batches.requests(batches.prompts(num_lines)))
    store.path(f"file-{name}").write_bytes(data)
    store.add_file(FileInfo(id=f"file-{name}", owner=owner, bytes=len(data), created_at=NOW, filename="in.jsonl"))
    times = {"created_at": NOW, "expires_at": 2**40, "completion_window": "24h", **more}
    info = BatchInfo(
        id=name, owner=owner, endpoint="/v1/completions", input_file_id=f"file-{name}", total=num_lines, **times
    )
    store.add_batch(info)
    return info


@asynccontextmanager
async def running(folder: Path, endpoint: Endpoint, **settings: Any) -> AsyncIterator[Runner]:
    state = State(Store.open(str(folder)))
    runner = Runner(state, endpoint, **{"room": lambda: 4, "quota": 1 << 40, "max_line_bytes": 1 << 20, **settings})
    try:
        yield runner
    finally:
        await runner.stop()
        state.close()


async def ended(runner: Runner, name: str, owner: str = "") -> BatchInfo:
    async with asyncio.timeout(WAIT_S):
        while True:
            found = await runner.state.run(lambda store: store.batch(name, owner))
            assert found is not None
            if found.ended_at is not None:
                return found


async def one_batch(folder: Path, endpoint: Endpoint, num_lines: int = 20, owner: str = "") -> BatchInfo:
    async with running(folder, endpoint) as runner:
        add(runner.state.store, "a", num_lines, owner)
        runner.start()
        return await ended(runner, "a", owner)


def content(store: Store, name: str | None) -> list[dict[str, Any]]:
    return [] if name is None else [json.loads(line) for line in store.path(name).read_text().splitlines()]


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return [line["custom_id"] for line in lines]


class CountingEndpoint:
    """An endpoint that takes a while, and how many were in it at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def endpoint(self, asked: Asked) -> Said:
        self.now += 1
        self.most = max(self.most, self.now)
        asked.submitted.set()
        for _ in range(100):
            await asyncio.sleep(0)
        self.now -= 1
        return await echo(asked)


async def echo(asked: Asked) -> Said:
    asked.submitted.set()
    await asyncio.sleep(0)
    return Said(200, json.dumps({"text": text_of(asked.line.body)}).encode())


# ------------------------------------------------------------------------------------------------------------- killed


def kill_and_go_on(folder: Path, num_kills: int, num_lines: int, chance: random.Random) -> Counter[str]:
    """Kill a process that runs a batch so often, each time after some lines; returns how often each line was asked."""
    store = Store.open(str(folder))
    add(store, "batch", num_lines)
    store.close()
    asked: Counter[str] = Counter()
    for number in range(num_kills + 1):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.batch_runner", str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            most = chance.randrange(2 * num_lines // num_kills) if number < num_kills else num_lines
            for at, line in enumerate(process.stdout):
                asked[line.strip()] += 1
                if at >= most:
                    break
            if number < num_kills:
                process.kill()
            asked.update(line.strip() for line in process.stdout)
            code = process.wait(WAIT_S)
            assert code in (0, -9) and (number < num_kills or code == 0)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    return asked


def check_killed(folder: Path, num_kills: int, num_lines: int, seed: int) -> None:
    asked = kill_and_go_on(folder, num_kills, num_lines, random.Random(seed))
    store = Store.open(str(folder))
    [batch] = store.batches("")
    assert (batch.status, batch.completed, batch.failed) == ("completed", num_lines, 0)
    lines = content(store, batch.output_file_id)
    given = batches.prompts(num_lines)
    assert ids(lines) == [f"line {i}" for i in range(num_lines)]
    assert [line["response"]["body"]["text"] for line in lines] == [text[::-1] for text in given]
    assert {path.name for path in (folder / "files").iterdir()} == {one.id for one in store.files("")}
    store.close()
    assert len(asked) == num_lines and asked.total() - num_lines <= num_kills * 8, "it began again"


def test_killed_at_any_moment_each_line_is_there_once(tmp_path: Path) -> None:
    check_killed(tmp_path, num_kills=4, num_lines=400, seed=1)


@pytest.mark.slow
def test_killed_a_hundred_times(tmp_path: Path) -> None:
    check_killed(tmp_path, num_kills=100, num_lines=5000, seed=2)


# --------------------------------------------------------------------------------------------------- engines that die


KILLER = 7


def test_line_that_kills_engines_gets_an_error(tmp_path: Path) -> None:
    """Each server ends with its engine; the next one goes on. Lines that were under way, too, are asked again alone."""
    asked: Counter[int] = Counter()
    beside: list[int] = []

    async def serve(engine_died: bool) -> BatchInfo:
        now, reached = set[int](), asyncio.Event()

        async def endpoint(one: Asked) -> Said:
            number = one.line.number
            asked[number] += 1
            now.add(number)
            one.submitted.set()
            for _ in range(20):  # the others are under way, too
                await asyncio.sleep(0)
            while number == KILLER and not beside and len(now) == 1:  # as they are beside the first one
                await asyncio.sleep(0)
            if number == KILLER:
                beside.append(len(now) - 1)
                reached.set()
                await asyncio.Event().wait()
            now.discard(number)
            return await echo(one)

        async with running(tmp_path, endpoint) as runner:
            if not runner.state.store.batches(""):
                add(runner.state.store, "a", 30)
            runner.start()
            over = asyncio.ensure_future(ended(runner, "a"))
            await asyncio.wait({over, asyncio.ensure_future(reached.wait())}, return_when=asyncio.FIRST_COMPLETED)
            if not over.done():
                over.cancel()
                await runner.stop(engine_died=engine_died)
            found = runner.state.store.batch("a", "")
            assert found is not None
            return found

    for engine_died in (True, False, False, False, True, True):  # a stop is nobody's fault
        assert asyncio.run(serve(engine_died)).ended_at is None
    found = asyncio.run(serve(True))
    assert (found.status, found.completed, found.failed) == ("completed", 29, 1)
    assert asked[KILLER] == 3 + runners.MAX_DEATHS
    assert beside[0] > 0 and not any(beside[1:])
    store = Store.open(str(tmp_path))
    [line] = content(store, found.error_file_id)
    assert line["custom_id"] == f"line {KILLER - 1}" and line["response"] is None
    assert line["error"]["code"] == "engine_died" and "3 times" in line["error"]["message"]
    assert store.deaths("a") == {}
    store.close()


async def test_a_server_of_several_models_outlives_an_engine(tmp_path: Path) -> None:
    asked: Counter[int] = Counter()

    async def endpoint(one: Asked) -> Said:
        asked[one.line.number] += 1
        return Said(503, b"", 0.0, engine_died=True) if one.line.number == KILLER else await echo(one)

    found = await one_batch(tmp_path, endpoint)
    assert (found.completed, found.failed, asked[KILLER]) == (19, 1, runners.MAX_DEATHS)


# ---------------------------------------------------------------------------------------------------- turns and limits


async def test_keys_take_turns(tmp_path: Path) -> None:
    order: list[str] = []

    async def endpoint(asked: Asked) -> Said:
        order.append(asked.owner)
        return await echo(asked)

    async with running(tmp_path, endpoint, room=lambda: 1) as runner:
        for name, owner, count in (("a", "ann", 40), ("b", "bob", 10), ("c", "bob", 10)):
            add(runner.state.store, name, count, owner)
        runner.start()
        await asyncio.gather(ended(runner, "a", "ann"), ended(runner, "b", "bob"), ended(runner, "c", "bob"))
    begun = order.index("bob")  # ann's file may be read earlier
    both = order[begun : begun + 20]  # the second batch of bob begins when his first has ended
    assert abs(both.count("ann") - both.count("bob")) <= 2


async def test_running_lines_stay_within_room(tmp_path: Path) -> None:
    crowd = CountingEndpoint()
    async with running(tmp_path, crowd.endpoint, room=lambda: 3) as runner:
        add(runner.state.store, "a", 50)
        add(runner.state.store, "b", 50, "bob")
        runner.start()
        await asyncio.gather(ended(runner, "a"), ended(runner, "b", "bob"))
    assert crowd.most == 3


async def test_running_lines_follow_room_and_are_at_least_one(tmp_path: Path) -> None:
    """The less room there is, the fewer lines; one in any case."""
    crowd, room = CountingEndpoint(), [4]
    async with running(tmp_path, crowd.endpoint, room=lambda: room[0]) as runner:
        runner.start()
        for name, free, want in (("a", 4, 4), ("b", -3, 1), ("c", 2, 2)):
            room[0], crowd.most = free, 0
            add(runner.state.store, name, 30)
            runner.wake()
            await ended(runner, name)
            assert crowd.most == want


async def test_lines_are_encoded_one_at_a_time(tmp_path: Path) -> None:
    encoding = [0]

    async def endpoint(asked: Asked) -> Said:
        encoding[0] += 1
        assert encoding[0] == 1
        for _ in range(5):
            await asyncio.sleep(0)
        encoding[0] -= 1
        return await echo(asked)

    assert (await one_batch(tmp_path, endpoint, 50)).completed == 50


@pytest.mark.parametrize("status", [429, 503])
async def test_response_without_capacity_is_retried(tmp_path: Path, status: int) -> None:
    asked: Counter[int] = Counter()

    async def endpoint(one: Asked) -> Said:
        asked[one.line.number] += 1
        return Said(status, b"{}", 0.0) if asked[one.line.number] < 3 else await echo(one)

    found = await one_batch(tmp_path, endpoint)
    assert (found.completed, found.failed) == (20, 0) and set(asked.values()) == {3}


async def test_waiting_key_does_not_delay_other_keys(tmp_path: Path) -> None:
    async def endpoint(asked: Asked) -> Said:
        return Said(429, b"{}", 3600.0) if asked.owner == "ann" else await echo(asked)

    async with running(tmp_path, endpoint, room=lambda: 1) as runner:
        add(runner.state.store, "a", 5, "ann")
        add(runner.state.store, "b", 5, "bob")
        runner.start()
        found = await ended(runner, "b", "bob")
        async with asyncio.timeout(WAIT_S):
            while runner.lines() != {"waiting": 5, "running": 0, "answered": 5, "failed": 0}:
                await asyncio.sleep(0)  # a line of ann's may be on its way
    assert found.completed == 5


async def test_new_room_is_used_while_a_line_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "ROOM_S", 0.01)
    room, taken = [1], asyncio.Event()

    async def endpoint(asked: Asked) -> Said:
        if asked.owner == "ann":
            taken.set()
            await asyncio.Event().wait()
        return await echo(asked)

    async with running(tmp_path, endpoint, room=lambda: room[0]) as runner:
        add(runner.state.store, "a", 5, "ann")
        runner.start()
        await taken.wait()
        add(runner.state.store, "b", 5, "bob")
        runner.wake()
        async with asyncio.timeout(WAIT_S):
            while not runner.slots._waiting:
                await asyncio.sleep(0)
        assert runner.lines() == {"waiting": 9, "running": 1, "answered": 0, "failed": 0}
        room[0] = 2
        found = await ended(runner, "b", "bob")
    assert found.completed == 5


async def test_work_after_stop_is_refused_with_503(tmp_path: Path) -> None:
    async with running(tmp_path, echo) as runner:
        state = runner.state
    state.later(Store.open_batches)
    with pytest.raises(ApiError, match="shutting down") as caught:
        await state.run(Store.open_batches)
    assert caught.value.status == 503


@pytest.mark.parametrize(
    ("usage", "want"),
    [
        (
            {
                "prompt_tokens": 5,
                "completion_tokens": 3,
                "total_tokens": 8,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {"reasoning_tokens": 2},
            },
            Usage(5, 4, 3, 2),
        ),
        (
            {
                "input_tokens": 5,
                "input_tokens_details": {"cached_tokens": 4},
                "output_tokens": 3,
                "output_tokens_details": {"reasoning_tokens": 2},
            },
            Usage(5, 4, 3, 2),
        ),
        ({"prompt_tokens": 5, "total_tokens": 5}, Usage(5)),
        (None, Usage()),
    ],
)
def test_usage_of_each_endpoint_is_parsed(usage: object, want: Usage) -> None:
    assert usage_of(json.dumps({"id": "a", "choices": [], "usage": usage}).encode()) == want


# ------------------------------------------------------------------------------------------------ ends before the end


async def test_expired_batch_has_an_error_per_line(tmp_path: Path) -> None:
    async def endpoint(asked: Asked) -> Said:
        if asked.line.number > 5:
            await asyncio.Event().wait()
        return await echo(asked)

    for after_s in (1, 8, 20):  # a pause may use up a short time
        async with running(tmp_path / str(after_s), endpoint, clock=lambda: float(NOW)) as runner:
            add(runner.state.store, "a", 9, expires_at=NOW + after_s)
            runner.start()
            if (found := await ended(runner, "a")).completed == 5:
                check_expired(found, runner.state.store)
                return
    pytest.fail(f"{found.completed} of 5 lines")


def check_expired(found: BatchInfo, store: Store) -> None:
    assert found.status == "expired"
    assert sorted(ids(content(store, found.output_file_id))) == [f"line {i}" for i in range(5)]
    left = content(store, found.error_file_id)
    assert ids(left) == [f"line {i}" for i in range(5, 9)]
    assert {(one["response"], one["error"]["code"]) for one in left} == {(None, "batch_expired")}


async def test_a_key_that_is_gone_is_why_a_batch_fails(tmp_path: Path) -> None:
    async def endpoint(asked: Asked) -> Said:
        raise LookupError("the API key ann is not there")

    found = await one_batch(tmp_path, endpoint, 5, "ann")
    assert (found.status, found.reason) == ("failed", "the API key ann is not there")


async def test_a_file_that_is_gone_is_why_a_batch_fails(tmp_path: Path) -> None:
    async with running(tmp_path, echo) as runner:
        add(runner.state.store, "a", 5)
        runner.state.store.path("file-a").unlink()
        runner.start()
        found = await ended(runner, "a")
    assert (found.status, found.reason) == ("failed", "FileNotFoundError: No such file or directory")


def test_a_full_disk_is_why_a_batch_fails_and_the_next_server_goes_on(tmp_path: Path) -> None:
    async def large(asked: Asked) -> Said:
        asked.submitted.set()
        return Said(200, json.dumps({"text": "x" * 20_000}).encode())

    def limit(store: Store) -> None:
        (num_pages,) = store.db.execute("PRAGMA page_count").fetchone()
        store.db.execute(f"PRAGMA max_page_count = {num_pages + 60}")

    async def fill() -> dict[str, str]:
        async with running(tmp_path, large, room=lambda: 1) as runner:
            add(runner.state.store, "a", 50)
            await runner.state.run(limit)
            runner.start()
            async with asyncio.timeout(WAIT_S):
                while not runner.broken and runner.state.store.open_batches():
                    await asyncio.sleep(0.01)
            [batch] = await runner.state.run(lambda store: store.batches(""))
            return {"a": batch.reason} if batch.status == "failed" else runner.broken

    assert "database or disk is full" in asyncio.run(fill())["a"]

    async def go_on() -> BatchInfo:
        async with running(tmp_path, large) as runner:
            runner.start()
            return await ended(runner, "a")

    found = asyncio.run(go_on())
    store = Store.open(str(tmp_path))
    lines = [*content(store, found.output_file_id), *content(store, found.error_file_id)]
    store.close()
    assert sorted(ids(lines)) == sorted(f"line {i}" for i in range(50))


async def test_bug_fails_its_batch_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def endpoint(asked: Asked) -> Said:
        if asked.owner == "ann":
            raise ZeroDivisionError
        return await echo(asked)

    async with running(tmp_path, endpoint) as runner:
        add(runner.state.store, "a", 5, "ann")
        add(runner.state.store, "b", 5, "bob")
        runner.start()
        assert (await ended(runner, "b", "bob")).completed == 5
        async with asyncio.timeout(WAIT_S):
            while not runner.broken:
                await asyncio.sleep(0)
        found = runner.broken
    assert found == {"a": "internal error"}
    assert "a: a bug" in caplog.text


async def test_bug_in_a_sweep_does_not_end_polling(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, echo) as runner:
        add(runner.state.store, "a", 5)
        sweep, bugs = runner.state.store.sweep, iter([ZeroDivisionError])

        def one_bug(now: int) -> None:
            if (bug := next(bugs, None)) is not None:
                raise bug
            sweep(now)

        monkeypatch.setattr(runner.state.store, "sweep", one_bug)
        runner.start()
        async with asyncio.timeout(WAIT_S):
            while "a bug" not in caplog.text:
                await asyncio.sleep(0)
        runner.wake()
        found = await ended(runner, "a")
    assert found.completed == 5
