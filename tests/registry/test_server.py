"""Servers of models as processes: what forks them, and what becomes of what is killed."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import psutil
import pytest

from minisgl.config import EngineConfig, ServerConfig
from minisgl.registry.batches import ENGINE_DIED
from minisgl.registry.server import ChildServer, ChildServers, NotLoaded, read_log

CONFIG = ServerConfig(engine=EngineConfig(engine="echo", model="echo"), host="127.0.0.1", port=0)


def run(work: Callable[[ChildServers], Coroutine[Any, Any, None]]) -> None:
    """Neither a process nor a file is left."""
    before = psutil.Process().children(recursive=True)

    async def around() -> None:
        servers = ChildServers()
        try:
            await work(servers)
        finally:
            await servers.close()

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        asyncio.run(around())
        assert os.listdir(folder) == []
    assert [one for one in psutil.Process().children(recursive=True) if one not in before] == []


async def start(servers: ChildServers) -> tuple[ChildServer, psutil.Process, psutil.Process]:
    """A server and its two processes."""
    server = await servers.start(CONFIG, lambda line: None)
    assert isinstance(server, ChildServer) and server.max_model_len > 0
    process = psutil.Process(server._child.pid)
    (engine,) = process.children()
    return server, process, engine


def nursery(servers: ChildServers) -> psutil.Process:
    assert servers._nursery is not None
    return psutil.Process(servers._nursery.process.pid)


def test_servers_and_their_engines_are_forked_by_a_process_of_one_thread_and_are_no_children_of_it() -> None:
    async def work(servers: ChildServers) -> None:
        await servers.prepare()
        for _ in range(2):
            server, process, engine = await start(servers)
            program = nursery(servers).cmdline()
            assert process.cmdline() == engine.cmdline() == program, "one of them was started with a program of its own"
            assert nursery(servers).num_threads() == 1 and nursery(servers).children() == []
            assert process.ppid() == os.getpid()
            assert os.getpgid(engine.pid) == process.pid
            await server.stop()
            assert await server.ended == 0 and not process.is_running() and not engine.is_running()

    run(work)


def test_killed_forking_process_is_replaced() -> None:
    async def work(servers: ChildServers) -> None:
        await servers.prepare()
        server, process, _ = await start(servers)
        nursery(servers).kill()
        other, *_ = await start(servers)
        assert process.is_running() and not server.ended.done()
        await server.stop()
        await other.stop()

    run(work)


def test_a_server_that_is_killed_says_so_and_its_orphan_goes() -> None:
    async def work(servers: ChildServers) -> None:
        server, process, engine = await start(servers)
        process.kill()
        assert await server.ended == -9
        await server.stop()
        assert not process.is_running() and not engine.is_running()

    run(work)


def test_a_server_whose_engine_is_killed_ends() -> None:
    async def work(servers: ChildServers) -> None:
        server, _, engine = await start(servers)
        engine.kill()
        assert await server.ended == ENGINE_DIED
        await server.stop()

    run(work)


@pytest.mark.parametrize("turns", [0, 1, 20])
def test_a_start_that_is_cancelled_leaves_nothing(turns: int) -> None:
    async def work(servers: ChildServers) -> None:
        await servers.prepare()
        starting = asyncio.create_task(servers.start(CONFIG, lambda line: None))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(work)


def test_failed_start_has_the_last_log_line() -> None:
    async def work(servers: ChildServers) -> None:
        bad = msgspec.structs.replace(CONFIG, engine=msgspec.structs.replace(CONFIG.engine, chat_template="/no/such"))
        with pytest.raises(NotLoaded, match="/no/such"):
            await servers.start(bad, lambda line: None)

    run(work)


def test_a_logged_reason_has_no_clock() -> None:
    async def work() -> list[str]:
        stream, heard = asyncio.StreamReader(), []
        stream.feed_data(b"14:19:45 error: minisgl: the engine did not start: why\nminisgl: no file\n14:20 is a time\n")
        stream.feed_eof()
        await read_log(stream, "a", heard.append, [""])
        return heard

    assert asyncio.run(work()) == ["the engine did not start: why", "no file", "14:20 is a time"]


def test_starts_at_once() -> None:
    async def work(servers: ChildServers) -> None:
        started = await asyncio.gather(*(start(servers) for _ in range(3)))
        assert len({server.address for server, *_ in started}) == 3
        await asyncio.gather(*(server.stop() for server, *_ in started))

    run(work)
