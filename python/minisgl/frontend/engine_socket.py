"""Connection to an engine process, on one event loop.

Invariants: no call blocks; frames are sent in order; received data stays in the socket until it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from minisgl.message.codec import FrameReader, length_of

RETRY_S = 0.005  # interval of connection attempts: the engine process may listen later
READ_BYTES = 1 << 14
MAX_PARTS = 64  # sent at once
LINGER_S = 0.5


class EngineSocket:
    """Non-blocking socket to an engine process. `address` is ipc://PATH. Call `open` first."""

    def __init__(self, address: str) -> None:
        self._path = address.removeprefix("ipc://")
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._on_readable: Callable[[], None] = lambda: None
        self._frames = FrameReader()
        self._unsent = deque[memoryview]()

    def open(self, on_readable: Callable[[], None]) -> None:
        """Connect as soon as the engine process listens. `on_readable` is called while there is data to read."""
        self._loop = asyncio.get_running_loop()
        self._on_readable = on_readable
        self._connect()

    def _connect(self) -> None:
        assert self._loop is not None
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            sock.close()
            self._retry = self._loop.call_later(RETRY_S, self._connect)
            return
        self._retry = None
        self._socket = sock
        self._loop.add_reader(sock.fileno(), self._on_readable)
        self._send()

    def write(self, frame: Sequence[bytes]) -> None:
        """Send a frame, given in parts, in order; unsent parts are queued, not copied. Raises `MessageError`."""
        waits = bool(self._unsent)
        first, *rest = frame
        self._unsent += (memoryview(part) for part in (length_of(frame) + first, *rest) if part)
        if not waits:
            self._send()

    def _send(self) -> None:
        if self._socket is None or self._loop is None:
            return
        num_sent = 0
        with contextlib.suppress(BlockingIOError):
            try:
                num_sent = self._socket.sendmsg(islice(self._unsent, MAX_PARTS)) if self._unsent else 0
            except (BrokenPipeError, ConnectionResetError):  # the read side notices it
                self._unsent.clear()
        while num_sent:
            part = self._unsent.popleft()
            if num_sent < len(part):
                self._unsent.appendleft(part[num_sent:])
            num_sent -= min(num_sent, len(part))
        if self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._send)
        else:
            self._loop.remove_writer(self._socket.fileno())

    @property
    def num_unsent(self) -> int:
        """Return the bytes that wait for the engine process to read them."""
        return sum(map(len, self._unsent))

    @property
    def holds_bytes(self) -> bool:
        """Whether data was read from the socket that `read` has not returned yet."""
        return not self._frames.is_empty

    def read(self) -> bytes | None:
        """Return the next frame, or `None` if it is incomplete. Raises `EOFError` at the end, and `MessageError`."""
        while (frame := self._frames.next()) is None:
            if self._socket is None:
                return None
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError
            self._frames.feed(data)
        return frame

    def stop_reading(self) -> None:
        """Stop calling `on_readable`. Idempotent."""
        if self._loop is not None and self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())

    def close(self) -> None:
        """Close the socket, after half a second at most for unsent data. Idempotent."""
        if self._retry is not None:
            self._retry.cancel()
        if self._loop is None or self._socket is None:
            return
        self.stop_reading()
        self._loop.remove_writer(self._socket.fileno())
        if self._unsent:
            self._socket.settimeout(LINGER_S)
            with contextlib.suppress(OSError):
                self._socket.sendall(b"".join(self._unsent))
        self._socket.close()
        self._socket = None
