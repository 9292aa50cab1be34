"""An HTTP server that ends by itself begins again, at a port and at a Unix socket."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.config import EngineConfig, ServerConfig
from minisgl.server.admin.health import Starting
from minisgl.server.core.http import HttpServer
from minisgl.server.core.middleware import Middleware

CONFIG = ServerConfig(engine=EngineConfig())
REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(params=[socket.AF_INET, socket.AF_UNIX], ids=["port", "socket"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(request.param) as found:
        found.bind(("127.0.0.1", 0) if request.param == socket.AF_INET else str(tmp_path / "http"))
        found.listen()
        found.setblocking(False)
        yield found


async def ask(family: int, address: tuple[str, int] | str) -> bytes:
    loop = asyncio.get_running_loop()
    with socket.socket(family) as client:
        client.setblocking(False)
        await loop.sock_connect(client, address)
        await loop.sock_sendall(client, REQUEST)
        found = b""
        while part := await loop.sock_recv(client, 4096):
            found += part
        return found.split(b"\r\n")[0]


async def test_server_that_ends_is_restarted(listener: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "minisgl")
    address, family = listener.getsockname(), listener.family
    server = HttpServer(Middleware(Starting("m"), CONFIG), listener, CONFIG.limits)
    await server.start()
    assert await ask(family, address) == b"HTTP/1.1 200 OK"
    for _ in range(2):
        served = server.server
        served.should_exit = True  # as if it had ended by itself
        while server.server is served:
            await asyncio.sleep(0.01)
        assert await ask(family, address) == b"HTTP/1.1 200 OK", "it waits in the listener's queue meanwhile"
    await server.stop()
    await server.stop()
    with socket.socket(family) as client, pytest.raises(OSError):
        client.connect(address)
    assert [record.getMessage() for record in caplog.records] == [
        f"the Python HTTP server ended: it ended: restarting it in {wait_s:.1f} s" for wait_s in (0.1, 0.2)
    ]


async def test_stop_does_not_wait_for_the_restart(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("minisgl.server.core.http.RESTART_S", 1e6)
    server = HttpServer(Middleware(Starting("m"), CONFIG), listener, CONFIG.limits)
    await server.start()
    server.server.should_exit = True
    while "restarting it" not in caplog.text:
        await asyncio.sleep(0.01)
    await server.stop()
