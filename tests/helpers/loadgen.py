"""Tiny HTTP server whose streams follow a script: the bytes, the writes they are split into, and the end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def token(text: str) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text.encode()


def usage(prompt: int, completion: int) -> bytes:
    counts = f'{{"prompt_tokens":{prompt},"completion_tokens":{completion}}}'
    return f'data: {{"choices":[],"usage":{counts}}}\n\n'.encode()


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


END = chunk(b"")


@dataclass
class Exchange:
    """Interface of a script: `number` counts requests from 0, `request` is the received request."""

    number: int
    request: bytes
    socket: socket.socket

    def send(self, *pieces: bytes) -> None:
        """Send each piece in a write of its own."""
        for piece in pieces:
            self.socket.sendall(piece)

    def reset(self) -> None:
        """Reset the connection, which the other side sees as an error."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.socket.close()


Script = Callable[[Exchange], bool]
"""Function that answers one request; returns false to close the connection."""


class StubServer:
    def __init__(self, script: Script) -> None:
        self._script = script
        self._lock = threading.Lock()
        self.requests: list[bytes] = []
        self.num_connections = 0
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1/chat/completions"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.num_connections += 1
            self._open.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            rest, go_on = b"", True
            while go_on:
                while b"\r\n\r\n" not in rest:
                    if not (data := connection.recv(65536)):
                        return
                    rest += data
                head, _, rest = rest.partition(b"\r\n\r\n")
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
                length = int(fields.get(b"content-length", b"0"))
                while len(rest) < length and (data := connection.recv(65536)):
                    rest += data
                body, rest = rest[:length], rest[length:]
                with self._lock:
                    number = len(self.requests)
                    self.requests.append(body)
                go_on = self._script(Exchange(number, body, connection))
        except OSError:
            pass  # the other side is gone, or the test is over
        finally:
            connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()


@contextmanager
def stub(script: Script) -> Iterator[StubServer]:
    server = StubServer(script)
    try:
        yield server
    finally:
        server.close()
