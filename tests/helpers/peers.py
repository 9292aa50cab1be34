"""Peers at both ends of the socket of an engine process and its front ends, for tests that replace one."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from minisgl.message import AbortRequest, AddRequest, FinishRequest, FromEngine, Hello, StepTokens, ToEngine
from minisgl.message.codec import FrameReader, decode_from_engine, decode_to_engine, encode, framed
from minisgl.runner.front_end_ids import split, within
from tests.helpers.seconds import WAIT_S

M = TypeVar("M")


def num_ended(messages: Iterable[FromEngine]) -> int:
    """Return the number of requests that end in these messages."""
    steps = (np.frombuffer(one.reasons, np.int32) for one in messages if isinstance(one, StepTokens))
    return sum(int(np.count_nonzero(reasons)) for reasons in steps)


class FrontEndPeer:
    """Blocking front end. `address`: ipc://PATH."""

    def __init__(self, address: str, name: str = "test", *, greet: bool = True) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            self.socket = socket.socket(socket.AF_UNIX)
            try:
                self.socket.connect(address.removeprefix("ipc://"))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                self.socket.close()
                assert time.monotonic() < deadline, "nobody listens"
                time.sleep(0.005)
        self.socket.settimeout(WAIT_S)
        self._frames = FrameReader()
        self.received: list[FromEngine] = []
        self.num_ended = 0  # of its requests
        if greet:
            with contextlib.suppress(BrokenPipeError):  # turned away already: why can be read
                self.send(Hello(name))

    def send(self, *messages: ToEngine) -> None:
        self.send_bytes(framed(encode(messages)))

    def send_bytes(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> list[FromEngine]:
        """Return the messages of the next frame. Raises `EOFError` at the end."""
        while (frame := self._frames.next()) is None:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError
            self._frames.feed(data)
        messages = decode_from_engine(frame)
        self.received += messages
        self.num_ended += num_ended(messages)
        return messages

    def next(self, kind: type[M]) -> M:
        """Receive until a message of this kind arrives, and return it."""
        while True:
            for message in self.receive():
                if isinstance(message, kind):
                    return message

    def until(self, done: Callable[[list[FromEngine]], object]) -> None:
        """Receive until `done` returns true for all messages received."""
        while not done(self.received):
            self.receive()

    def to_the_end(self) -> list[FromEngine]:
        """Receive until the engine process closes the connection; return all messages."""
        with contextlib.suppress(EOFError):
            while True:
                self.receive()
        return self.received

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> FrontEndPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EnginePeer:
    """Listener in place of an engine process, single-threaded. Front ends are numbered in order of arrival; request ids
    include that number, like within an engine process. `greeting`: the first bytes sent to each."""

    def __init__(self, address: str, greeting: bytes = b"") -> None:
        self._greeting = greeting
        self._listener = socket.socket(socket.AF_UNIX)
        path = Path(address.removeprefix("ipc://"))
        self._listener.bind(str(path))
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.connections: list[socket.socket] = []
        self._frames: dict[int, FrameReader] = {}

    def receive(self, timeout_s: float) -> list[list[ToEngine]]:
        """Return the messages received within `timeout_s`, by frame, without hellos."""
        found = []
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
                continue
            number = key.data
            try:
                data = self.connections[number].recv(1 << 18)
            except OSError:
                data = b""
            if not data:
                self._selector.unregister(key.fileobj)
                self.connections[number].close()
                continue
            self._frames[number].feed(data)
            while (frame := self._frames[number].next()) is not None:
                messages = decode_to_engine(frame)
                if any(not isinstance(one, Hello) for one in messages):
                    found.append([_numbered(number, one) for one in messages if not isinstance(one, Hello)])
        return found

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        number = len(self.connections)
        self.connections.append(connection)
        self._frames[number] = FrameReader()
        self._selector.register(connection, selectors.EVENT_READ, number)
        self._write(connection, self._greeting)

    def send(self, frame: bytes) -> None:
        """Send a frame to all front ends."""
        for connection in self.connections:
            self._write(connection, framed(frame))

    def send_messages(self, messages: Sequence[FromEngine]) -> None:
        """Send each front end one frame with its messages: steps only to those with requests in them, others to all."""
        frames: list[list[FromEngine]] = [[] for _ in self.connections]
        for message in messages:
            if isinstance(message, StepTokens) and len(frames) > 1:
                for number, part in split(message).items():
                    frames[number].append(part)
            else:
                for frame in frames:
                    frame.append(message)
        for connection, frame in zip(self.connections, frames, strict=True):
            if frame:
                self._write(connection, framed(encode(frame)))

    def _write(self, connection: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it has gone
            connection.sendall(data)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self._listener.close()
        self._selector.close()


def _numbered(number: int, message: ToEngine) -> ToEngine:
    if isinstance(message, AddRequest | AbortRequest | FinishRequest):
        return msgspec.structs.replace(message, req_id=within(number, message.req_id))
    return message
