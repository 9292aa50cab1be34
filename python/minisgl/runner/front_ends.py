"""The front ends of an engine process, which connect to a Unix socket.

Invariants: a request belongs to one connection, which alone gets its output; the requests of a front end that dies are
aborted; a front end that sends invalid messages gets an error and is disconnected, without effect on others. If no
front end with live requests can follow, the engine waits; otherwise output for a slow one is queued, within limits.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from minisgl.message import (
    ID_LIMIT,
    AbortRequest,
    AddPrefix,
    AddRequest,
    EngineFailed,
    EngineReady,
    EngineStats,
    FinishRequest,
    FromEngine,
    Heartbeat,
    Hello,
    LoadProgress,
    Narration,
    StepTokens,
    ToEngine,
    Watched,
)
from minisgl.message.codec import Codec, MessageError, encode, framed
from minisgl.message.heartbeat import Activity
from minisgl.runner.front_end import RULES, Connection
from minisgl.runner.front_end_ids import MAX_CONNECTIONS, owner, split, within

NUM_LINES = 256  # progress messages kept for front ends that connect later
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


class ParentGone(Exception):
    """Raised when the parent process has ended (its lifeline descriptor was closed)."""


class FrontEnds:
    """Server side of the front ends' socket. Use it in one thread, except for `beat`, `wake` and `last_words`.
    `lifeline` closes with the parent."""

    def __init__(self, path: Path, codec: Codec, lifeline: int, activity: Activity) -> None:
        self.codec = codec
        self._lifeline = lifeline
        self._activity = activity
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        path.chmod(0o600)  # before anyone can connect
        self._listener.listen(RULES.max_front_ends)
        self._listener.setblocking(False)
        self.connections: dict[int, Connection] = {}  # by connection id
        self._by_fd: dict[int, Connection] = {}
        self._masks: dict[int, int] = {}
        self._next_number = 0
        self._said: deque[LoadProgress] = deque(maxlen=NUM_LINES)
        self._ready: EngineReady | None = None
        self._stats: EngineStats | None = None
        self._inbox: list[ToEngine] = []
        self._receives = False  # set by the first `receive`; until then `send` accepts connections
        self._accepting = threading.Lock()
        self._has_news = False  # a message from a front end that can follow, since `receive` began
        self._woken = False  # set by `wake`
        self._waking, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._poll = select.poll()
        self._poll.register(lifeline, select.POLLIN)
        self._poll.register(self._waking, select.POLLIN)
        self._poll.register(self._listener, select.POLLIN)

    # ------------------------------------------------------------------------------------------------------- send

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Send each step's output to the front ends that own its requests, and every other message to all."""
        self._accept_early()
        for message in messages:
            if isinstance(message, StepTokens):
                self._send_step(message)
                continue
            frame = framed(self.codec.encode([message]))
            droppable = isinstance(message, EngineStats | Narration | Watched)
            with self._accepting:  # a connection accepted now gets the message once
                self._remember(message)
                for connection in tuple(self.connections.values()):
                    connection.send(frame, droppable=droppable)

    def _send_step(self, message: StepTokens) -> None:
        for number, part in split(message).items():
            if (connection := self.connections.get(number)) is not None:
                connection.send(framed(self.codec.encode([part])))
        reasons = np.frombuffer(message.reasons, np.int32)
        if reasons.any():
            for req_id in np.frombuffer(message.req_ids, np.int64)[reasons != 0].tolist():
                if (connection := self.connections.get(owner(req_id))) is not None:
                    connection.live.discard(req_id)

    def _remember(self, message: FromEngine) -> None:
        """Keep the messages that a front end that connects later must get."""
        if isinstance(message, LoadProgress):
            if self._said and message.total and self._said[-1].text == message.text:
                self._said.pop()  # an update of the same task
            if self._ready is None:
                self._said.append(message)
        elif isinstance(message, EngineReady):
            self._ready = message
        elif isinstance(message, EngineStats):
            self._stats = message

    def beat(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat to all front ends that can take it without queueing. Any thread."""
        self._accept_early()
        frame = framed(encode([heartbeat]))
        for connection in tuple(self.connections.values()):
            connection.send(frame, droppable=True)

    # ---------------------------------------------------------------------------------------------------- receive

    def receive(self, *, block: bool) -> list[ToEngine]:
        """Return the messages that have arrived, with process-wide ids. With `block`, wait for the first, or for
        `wake`. Also waits while no front end with live requests takes output and no other sends. Raises `ParentGone`.
        """
        if not self._receives:
            with self._accepting:
                self._receives = True
        self._has_news = False
        self._look(None if block else 0)
        while not (self._inbox or self._woken) if block else self._must_wait():
            self._activity.enter("idle")  # the engine waits for a front end
            self._look(None)
        self._woken = False
        messages, self._inbox = self._inbox, []
        return messages

    def wake(self) -> None:
        """End the current blocking `receive`, or the next. Any thread."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes, too
            os.write(self._waker, b"!")

    def _must_wait(self) -> bool:
        busy = [connection.has_room for connection in self.connections.values() if connection.live]
        return bool(busy) and not any(busy) and not self._has_news

    def _look(self, timeout_ms: int | None) -> None:
        """Poll the sockets: read messages, accept connections, and note which front ends can take output."""
        at_once = timeout_ms == 0
        for fd, connection in self._by_fd.items():
            asks = connection.live and (at_once or not connection.has_room)
            mask = select.POLLIN | select.POLLOUT if asks or connection.waits else select.POLLIN
            if self._masks[fd] != mask:
                self._masks[fd] = mask
                self._poll.modify(fd, mask)
        ready = self._poll.poll(timeout_ms)
        if at_once:
            for connection in self._by_fd.values():
                connection.has_room = not (connection.live or connection.waits)
        for fd, events in ready:
            if (front_end := self._by_fd.get(fd)) is not None:
                self._serve(front_end, events)
            elif fd == self._lifeline:
                if not os.read(fd, 4096):
                    raise ParentGone
            elif fd == self._waking:
                self._woken = bool(os.read(fd, 4096))
            else:
                self._accept()
        for connection in [one for one in self._by_fd.values() if one.is_lost]:
            self._disconnect(connection, RULES.does_not_read)

    def _serve(self, connection: Connection, events: int) -> None:
        if events & select.POLLOUT:
            connection.flush()
            connection.has_room = not connection.waits
        if not events & (select.POLLIN | _GONE):
            return
        is_open = connection.read()
        try:
            while (frame := connection.frames.next()) is not None:
                for message in self.codec.decode_to_engine(frame):
                    self._take(connection, message)
                    self._has_news |= connection.has_room or not connection.live
        except MessageError as error:
            self._disconnect(connection, str(error))
        else:
            if not is_open:
                self._disconnect(connection)

    def _take(self, connection: Connection, message: ToEngine) -> None:
        if isinstance(message, Hello):
            connection.name, connection.greeted = message.name[: RULES.max_name], True
            return
        if not connection.greeted:
            raise MessageError(RULES.hello_first)
        if isinstance(message, AddRequest):
            message = _numbered(connection, message)
            connection.live.add(message.req_id)
        elif isinstance(message, AbortRequest | FinishRequest):
            req_id = within(connection.number, _valid(message.req_id))
            if req_id not in connection.live:
                return  # it has already ended
            message = msgspec.structs.replace(message, req_id=req_id)
        elif isinstance(message, AddPrefix) and len(message.tokens) % 4:
            raise MessageError(f"the tokens of prefix {message.prefix_id} are no multiple of 4 bytes")
        self._inbox.append(message)

    # ------------------------------------------------------------------------------------------------ come and go

    def _accept_early(self) -> None:
        """Accept connections from a sending thread while the engine loads, before `receive` does."""
        if not self._receives:
            with self._accepting:
                while not self._receives and self._accept():
                    pass

    def _accept(self) -> bool:
        """Accept a connection and send it the kept messages. Returns False if there is none."""
        try:
            sock, _ = self._listener.accept()
        except OSError:  # no connection, or it was closed already
            return False
        connection = Connection(self._next_number, sock)
        if len(self.connections) >= RULES.max_front_ends or connection.number >= MAX_CONNECTIONS:
            connection.send(framed(encode([EngineFailed(RULES.too_many)])))
            connection.close()
            return True
        self._next_number += 1
        for message in (*self._said, self._ready, self._stats):
            if message is not None:
                connection.send(framed(self.codec.encode([message])))
        self._masks[connection.fileno()] = select.POLLIN
        self._poll.register(connection.fileno(), select.POLLIN)
        self._by_fd[connection.fileno()] = connection
        self.connections[connection.number] = connection
        return True

    def _disconnect(self, connection: Connection, reason: str = "") -> None:
        """Remove a connection that has ended, or disconnect it with `reason`: abort its requests and tell the other
        front ends' logs."""
        fd, live = connection.fileno(), connection.live
        self._poll.unregister(fd)
        del self.connections[connection.number], self._by_fd[fd], self._masks[fd]
        if reason:
            connection.send(framed(encode([EngineFailed(RULES.ends.format(reason=reason))])), droppable=True)
        connection.close()
        self._inbox.extend(map(AbortRequest, sorted(live)))
        self._has_news = True
        if reason or live:
            text = RULES.put_out if reason else RULES.has_gone
            self.send([LoadProgress(text.format(name=connection.name, reason=reason, num_live=len(live)))])

    def last_words(self, text: str, wait_ms: int, first_ms: int) -> None:
        """Send all front ends the reason why this process ends, and wait up to `wait_ms` until it is sent. If none has
        ever connected, wait up to `first_ms` for one. Any thread."""
        deadline = time.monotonic() + first_ms / 1000
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        waiting.register(self._lifeline, select.POLLIN)
        while not self._next_number and (left := deadline - time.monotonic()) > 0:
            for fd, _ in waiting.poll(left * 1000):
                if fd != self._lifeline:
                    with self._accepting:
                        self._accept()
                elif not os.read(fd, 4096):
                    return
        frame = framed(encode([EngineFailed(text)]))
        for connection in tuple(self.connections.values()):
            connection.send(frame)
        self.flush(wait_ms)

    def flush(self, wait_ms: int) -> None:
        """Send queued data, waiting at most `wait_ms`."""
        deadline = time.monotonic() + wait_ms / 1000
        while waiting := {front.fileno(): front for front in tuple(self.connections.values()) if front.waits}:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            poll = select.poll()
            for fd in waiting:
                poll.register(fd, select.POLLOUT)
            for fd, _ in poll.poll(left * 1000):
                waiting[fd].flush()

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        self._by_fd.clear()
        self._listener.close()
        os.close(self._waking)
        os.close(self._waker)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


def _numbered(connection: Connection, message: AddRequest) -> AddRequest:
    """Return the message with a process-wide id. Raises `MessageError` for an id that is out of range or not above the
    last one; any other error concerns that request alone (`StepLoop`)."""
    if _valid(message.req_id) <= connection.last_id:  # a reused id could be confused with the old request
        raise MessageError(RULES.not_above.format(req_id=message.req_id, last_id=connection.last_id))
    connection.last_id = message.req_id
    return msgspec.structs.replace(message, req_id=within(connection.number, message.req_id))


def _valid(req_id: int) -> int:
    if not 0 <= req_id < ID_LIMIT:
        raise MessageError(f"request id {req_id} is out of range: ids are at least 0 and below {ID_LIMIT}")
    return req_id
