"""Decides which front end owns the server's port: the gateway, with the Python server on a Unix socket behind it, or
the Python server.

Invariants: the port answers before any slow import; a gateway that cannot start costs one log line: the Python server
then owns the port; the gateway's threads and sockets end with the `with` block.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from minisgl.extension import NEEDS, _rust, why_missing
from minisgl.server.core.log import say

if TYPE_CHECKING:  # the extension may be missing
    from minisgl._rust import Gateway

SOCKET = "http"  # file name of the Python server's socket, in the private folder
BACKLOG = 2048


class NoGateway(RuntimeError):
    """The gateway cannot be used; the message says why."""


def gateway_class() -> Callable[[int, str, str], Gateway]:
    """Return the gateway's class of the compiled extension. Its arguments: the port's file descriptor, which it
    duplicates, the path of the engine's socket, and that of the Python server's. Raises `NoGateway`."""
    if why_missing():
        raise NoGateway(f"it {NEEDS}")  # the log's first line has the reason
    gateway: Callable[[int, str, str], Gateway] | None = getattr(_rust, "Gateway", None)
    if gateway is None:
        raise NoGateway("the extension was built without it")
    return gateway


class FrontEnd:
    """Front end that owns the port; a context manager. The Python server serves the socket `listener`."""

    def __init__(self, port: socket.socket, listener: socket.socket, gateway: Gateway | None) -> None:
        self.address: tuple[str, int] = port.getsockname()[:2]
        """Address of the port: host and port number."""
        self.listener = listener
        self.gateway = gateway

    @property
    def name(self) -> Literal["rust", "python"]:
        return "python" if self.gateway is None else "rust"

    @classmethod
    def open(cls, frontend: str, port: socket.socket, folder: Path, engine: str) -> FrontEnd:
        """Start the front end `frontend` ("rust", "auto" or "python") on the listening `port`, which it then owns.
        `engine`: path of the engine's socket. Falls back to Python, with a log line, if the gateway cannot start."""
        if frontend == "python":
            return cls(port, port, None)
        path = str(folder / SOCKET)
        listener: socket.socket | None = None
        try:
            make = gateway_class()
            listener = _listen(path)
            gateway = make(port.fileno(), engine, path)
        except (NoGateway, OSError, ValueError) as error:
            if listener is not None:
                listener.close()
                os.unlink(path)
            say(f"using the Python front end: no gateway: {error}")
            return cls(port, port, None)
        front_end = cls(port, listener, gateway)
        port.close()  # the gateway has its own descriptor, which keeps the port open until it stops
        return front_end

    async def stop(self, grace_s: float) -> None:
        """Stop the gateway, if there is one, within `grace_s`. Idempotent."""
        import asyncio

        if self.gateway is not None:
            await asyncio.to_thread(self.gateway.stop, grace_s)

    def __enter__(self) -> FrontEnd:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.gateway is not None:
            self.gateway.stop(0.0)
        self.listener.close()


def _listen(path: str) -> socket.socket:
    """Return a non-blocking Unix socket that listens at `path`; connections wait in its backlog."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
