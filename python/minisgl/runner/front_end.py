"""A front end's connection, as the engine process sees it, and the limits that apply to front ends.

Invariants: frames are sent whole and in order, from whichever thread; sending never blocks: what the socket does not
accept is queued, within limits.
"""

from __future__ import annotations

import socket
import threading
from collections import deque

import msgspec

from minisgl.message.codec import FrameReader


class FrontEndRules(msgspec.Struct, frozen=True):
    """Limits of front ends, and the messages for violations. The Rust pool (`rust/minisgl-router`) gets all of it, too.
    `send_buffer_bytes` is the kernel's send buffer per front end; the socket becomes writable when at most a quarter is
    used, a few steps of hundreds of rows. The engine waits for a front end that cannot follow: a queue would only grow
    and delay the first token of new requests."""

    max_front_ends: int = 64
    max_name: int = 64
    send_buffer_bytes: int = 1 << 17
    max_queued_bytes: int = 64 << 20  # limit for one that stalls while others continue
    too_many: str = "the engine process has too many front ends"
    hello_first: str = "the first message of a connection must be hello"
    does_not_read: str = "it does not read its messages"
    not_above: str = "request id {req_id} is not above the last one, {last_id}"
    ends: str = "the engine process ends the connection: {reason}"
    put_out: str = "{name} was disconnected: {reason}; {num_live} of its requests are aborted"
    has_gone: str = "{name} has disconnected; {num_live} of its requests are aborted"


RULES = FrontEndRules()
READ_BYTES = 1 << 18
MAX_READ_BYTES = 16 << 20  # limit of one `read`


class Connection:
    """Connection of one front end, with its id `number`. `live`: process-wide ids of its unfinished requests."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.name = f"front end {number}"
        self.greeted = False
        self.live: set[int] = set()
        self.last_id = -1  # the front end's own id
        self.has_room = True  # at the last poll
        self.frames = FrameReader()
        self._socket = sock
        self._lock = threading.Lock()
        self._queue: deque[memoryview] = deque()
        self._num_queued = 0
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, RULES.send_buffer_bytes // 2)  # the kernel doubles it

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def waits(self) -> bool:
        """Whether unsent data is queued."""
        return bool(self._queue)

    @property
    def is_lost(self) -> bool:
        """Whether more than `max_queued_bytes` are queued."""
        return self._num_queued > RULES.max_queued_bytes

    def send(self, frame: bytes, *, droppable: bool = False) -> None:
        """Send or queue a frame, which includes its length prefix. A `droppable` frame is dropped, not queued."""
        with self._lock:
            if self._queue:
                if not droppable:
                    self._put(memoryview(frame))
                return
            sent = self._write(frame)
            if sent < len(frame) and (sent or not droppable):
                self._put(memoryview(frame)[sent:])

    def flush(self) -> None:
        """Send as much of the queue as the socket accepts without blocking."""
        with self._lock:
            while self._queue:
                first = self._queue[0]
                sent = self._write(first)
                self._num_queued -= sent
                if sent < len(first):
                    self._queue[0] = first[sent:]
                    return
                self._queue.popleft()

    def _put(self, data: memoryview) -> None:
        self._queue.append(data)
        self._num_queued += len(data)

    def _write(self, data: bytes | memoryview) -> int:
        """Send and return how many bytes were accepted: all if the peer has disconnected, as reading will show."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def read(self) -> bool:
        """Read available data into `frames`, at most `MAX_READ_BYTES`. Returns False at the end of the connection."""
        for _ in range(MAX_READ_BYTES // READ_BYTES):
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self.frames.feed(data)
            if len(data) < READ_BYTES:
                return True
        return True

    def close(self) -> None:
        self._socket.close()
