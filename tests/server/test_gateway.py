"""Who owns the port."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from minisgl import _rust
from minisgl.metrics.gateway import OTHER
from minisgl.server.gateway import SOCKET, FrontEnd
from tests.helpers.gateway import Recording
from tests.helpers.seconds import WAIT_S
from tests.helpers.server import frontend


class PassesOn(Recording):
    """See `minisgl.server.gateway.Gateway`."""

    def __init__(self, listener_fd: int, engine: str, fallback: str) -> None:
        super().__init__()
        self._listener = socket.socket(fileno=os.dup(listener_fd))
        self._listener.setblocking(True)
        self._fallback = fallback
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._tunnel, args=(client,), daemon=True).start()

    def _tunnel(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server:
            self._open |= {client, server}
            try:
                server.connect(self._fallback)
                self.found["requests"] = [(OTHER, "route", sum(one[2] for one in self.found["requests"]) + 1)]
                _both_ways(client, server)
            except OSError:
                pass
            finally:
                self._open -= {client, server}


def _both_ways(client: socket.socket, server: socket.socket) -> None:
    """Until the server closes; the client may close its half. What was reset at one end is closed at the other."""
    halves = [client, server]
    while True:
        for one in select.select(halves, (), ())[0]:
            other = server if one is client else client
            data = one.recv(1 << 16)
            if data:
                other.sendall(data)
            elif one is server:
                return
            else:
                halves.remove(client)
                server.shutdown(socket.SHUT_WR)


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
    assert [record.getMessage() for record in caplog.records] == [f"using the Python front end: no gateway: {why}"]
    assert list(tmp_path.iterdir()) == []


def test_a_server_whose_event_loop_stands_still_is_alive_and_not_ready() -> None:
    """Streams go on, and so does the answer of the gateway that the process lives; but nothing is prepared."""
    with frontend(front_end="rust") as server, server.http() as http:
        server.on_loop(server.app.context.metrics.start)
        with server.standing_still():
            deadline = time.monotonic() + WAIT_S
            with pytest.raises(httpx.TimeoutException):
                while time.monotonic() < deadline:
                    assert http.get("/readyz", timeout=0.5).status_code == 200
            assert http.get("/livez").json() == {"status": "ok"}
        assert http.get("/readyz").json() == {"status": "ok"}
        server.on_loop(server.app.context.metrics.stop)
