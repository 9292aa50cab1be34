"""Who owns the port."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from minisgl import _rust
from minisgl.server.gateway import SOCKET, FrontEnd
from tests.helpers.gateway import PassesOn
from tests.helpers.server import WAIT_S, frontend


@pytest.fixture
def port() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_the_gateway_gets_the_port_and_python_a_socket_behind_it(
    monkeypatch: pytest.MonkeyPatch, port: socket.socket, tmp_path: Path
) -> None:
    monkeypatch.setattr(_rust, "Gateway", PassesOn, raising=False)
    address = port.getsockname()
    with FrontEnd.open("auto", port, tmp_path, "engine") as found:
        assert (found.name, found.address) == ("rust", address)
        assert found.listener.getsockname() == str(tmp_path / SOCKET)
        assert port.fileno() == -1, "the gateway has a descriptor of its own"
        with socket.create_connection(address) as client:
            found.listener.settimeout(WAIT_S)
            served, _ = found.listener.accept()
            with served:
                client.sendall(b"ping")
                assert served.recv(100) == b"ping"
    with pytest.raises(OSError):
        socket.create_connection(address)


def test_python_serves_where_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, port: socket.socket, tmp_path: Path
) -> None:
    monkeypatch.setattr(_rust, "Gateway", PassesOn, raising=False)
    with FrontEnd.open("python", port, tmp_path, "engine") as found:
        assert (found.name, found.listener, found.gateway) == ("python", port, None)
    assert list(tmp_path.iterdir()) == []


def refuses(listener_fd: int, engine: str, fallback: str) -> None:
    raise OSError("no threads left")


@pytest.mark.parametrize(
    ("gateway", "why"), [(None, "the extension was built without it"), (refuses, "no threads left")]
)
@pytest.mark.parametrize("asked", ["rust", "auto"])
def test_a_gateway_that_cannot_start_says_why_and_python_serves(
    gateway: object,
    why: str,
    asked: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    port: socket.socket,
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.INFO, "minisgl")
    monkeypatch.setattr(_rust, "Gateway", gateway, raising=False)
    with FrontEnd.open(asked, port, tmp_path, "engine") as found:
        assert (found.name, found.listener, found.gateway) == ("python", port, None)
        assert port.fileno() >= 0
    assert [record.getMessage() for record in caplog.records] == [f"the Python front end serves: no gateway: {why}"]
    assert list(tmp_path.iterdir()) == []


def test_a_server_whose_event_loop_stands_still_is_alive_and_not_ready() -> None:
    """Streams go on, and so does the answer of the gateway that the process lives; but nothing is prepared."""
    go_on = threading.Event()
    with frontend(front_end="rust") as server, server.http() as http:
        server.on_loop(server.app.context.metrics.start)
        try:
            server._loop.call_soon_threadsafe(go_on.wait)
            deadline = time.monotonic() + WAIT_S
            with pytest.raises(httpx.TimeoutException):
                while time.monotonic() < deadline:
                    assert http.get("/readyz", timeout=0.5).status_code == 200
            assert http.get("/livez").json() == {"status": "ok"}
        finally:
            go_on.set()
        assert http.get("/readyz").json() == {"status": "ok"}
        server.on_loop(server.app.context.metrics.stop)
