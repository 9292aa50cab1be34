"""A gateway that passes everything on: what the Python side of one can be tested with."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading

from minisgl.metrics.gateway import OTHER, Readings
from minisgl.metrics.keys import KeyReading
from minisgl.metrics.server_metrics import REASONS, SECONDS, TOKENS
from minisgl.server.gateway import NoGateway, gateway_class
from tests.helpers.seconds import WAIT_S

PASSED_ON = {"return_token_ids": True}
"""Fields of a request for text that the gateway leaves to the Python server."""
BUCKETS = {"ttft": SECONDS, "itl": SECONDS, "e2e": SECONDS, "queue": SECONDS, "prompt": TOKENS, "answer": TOKENS}


def has_gateway() -> bool:
    """Whether the extension has one."""
    try:
        gateway_class()
    except NoGateway:
        return False
    return True


def no_readings() -> Readings:
    """Of a gateway that has done nothing."""
    return {
        "num_open": 0,
        "num_waiting": 0,
        "num_waiting_tokens": 0,
        "num_accepted": 0,
        "num_finished": dict.fromkeys(REASONS, 0),
        "num_generated": 0,
        "num_live": 0,
        "keys": [],
        "most": {name: {"recent": 0, "most": 0} for name in ("in_flight", "queued")},
        "requests": [],
        "cache": {"hits": 0, "misses": 0, "hit_bytes": 0, "bytes": 0},
        "histograms": {name: {"counts": [0] * (len(bounds) + 1), "sum": 0.0} for name, bounds in BUCKETS.items()},
        "meters": {
            name: {"count": 0, "total_s": 0.0, "longest_s": 0.0, "recent_s": 0.0} for name in ("dispatch", "detokenize")
        },
    }


class Recording:
    """What comes from Python. `found` are its readings."""

    def __init__(self) -> None:
        self.is_draining = False
        self.found = no_readings()
        self.num_readings = 0

    def drain(self) -> None:
        self.is_draining = True

    def fail(self, reason: str) -> None:
        pass

    def beat(self) -> None:
        pass

    @property
    def num_open(self) -> int:
        return self.found["num_open"]

    def waiting(self) -> tuple[int, int, int]:
        return self.found["num_waiting"], self.found["num_waiting_tokens"], self.found["num_live"]

    def key(self, number: int) -> KeyReading | None:
        return dict(enumerate(self.found["keys"])).get(number)

    def readings(self) -> Readings:
        self.num_readings += 1
        return self.found

    def stop(self, grace_s: float) -> None:
        pass


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
