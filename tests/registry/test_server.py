"""Servers of models as processes: one that waits for its settings, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import psutil
import pytest

from minisgl.config import EngineConfig, ServerConfig
from minisgl.registry.server import ChildServers
from tests.helpers.several import until

CONFIG = ServerConfig(engine=EngineConfig(engine="echo", model="echo"), host="127.0.0.1", port=0)


def run(work: Callable[[ChildServers], Coroutine[Any, Any, None]]) -> None:
    before = psutil.Process().children(recursive=True)

    async def around() -> None:
        servers = ChildServers()
        try:
            await work(servers)
        finally:
            await servers.close()

    asyncio.run(around())
    assert [one for one in psutil.Process().children(recursive=True) if one not in before] == []


def has_imported(pid: int) -> bool:
    """uvloop is the last that a server imports, and the extension comes before it."""
    return any("uvloop" in one.path for one in psutil.Process(pid).memory_maps())


def test_a_process_waits_with_all_imports_and_becomes_the_next_server() -> None:
    async def work(servers: ChildServers) -> None:
        servers.prepare()
        assert servers._next is not None
        pid = (await servers._next).process.pid
        await until(lambda: has_imported(pid))
        (engine,) = psutil.Process(pid).children()
        await until(lambda: any("_rust" in one.path for one in engine.memory_maps()))
        server = await servers.start(CONFIG, lambda line: None)
        assert server._child.process.pid == pid  # type: ignore[attr-defined]
        assert psutil.Process(pid).children() == [engine], "its engine's process waited, too"
        assert server.max_model_len > 0
        await server.stop()

    run(work)


def test_one_that_was_killed_is_not_missed() -> None:
    async def work(servers: ChildServers) -> None:
        servers.prepare()
        assert servers._next is not None
        waiting = await servers._next
        await until(lambda: psutil.Process(waiting.process.pid).children() != [])
        (engine,) = psutil.Process(waiting.process.pid).children()
        waiting.process.kill()
        await waiting.process.wait()
        await until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
        server = await servers.start(CONFIG, lambda line: None)
        await server.stop()

    run(work)


@pytest.mark.parametrize("begun", [False, True])
def test_an_end_takes_the_waiting_one_along(begun: bool) -> None:
    async def work(servers: ChildServers) -> None:
        servers.prepare()
        if begun:
            assert servers._next is not None
            waiting = await servers._next
            await until(lambda: psutil.Process(waiting.process.pid).children() != [])
            gone.extend(psutil.Process(waiting.process.pid).children())

    gone: list[psutil.Process] = []
    run(work)
    assert len(gone) == begun and not any(one.is_running() for one in gone)


def test_the_next_server_is_there_where_the_waiting_engine_was_killed() -> None:
    async def work(servers: ChildServers) -> None:
        servers.prepare()
        assert servers._next is not None
        pid = (await servers._next).process.pid
        await until(lambda: psutil.Process(pid).children() != [])
        (engine,) = psutil.Process(pid).children()
        engine.kill()
        await until(lambda: engine.status() == psutil.STATUS_ZOMBIE)
        server = await servers.start(CONFIG, lambda line: None)
        await server.stop()

    run(work)


def test_a_start_that_is_cancelled_leaves_it_waiting() -> None:
    async def work(servers: ChildServers) -> None:
        servers.prepare()
        start = asyncio.create_task(servers.start(CONFIG, lambda line: None))
        await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    run(work)
