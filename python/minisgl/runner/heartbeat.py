"""The engine process's pulse: what its step loop is doing and since when, told by a thread of its own.

Keeps true: beats go on while the loop waits for a forward, and stop with the process; a loop that hangs shows as one
that has been working for too long.
Doesn't know: what too long is.
"""

from __future__ import annotations

import threading
import time
from typing import Literal

import zmq

from minisgl.message import Heartbeat, encode

INTERVAL_S = 0.5
Phase = Literal["idle", "working", "forward"]


class Pulse:
    """Written by the loop, read by the beating thread: one tuple, so that both halves belong together. Idle until the
    loop begins: loading may take minutes, and its last beats may be read after it."""

    def __init__(self) -> None:
        self._state: tuple[Phase, float] = ("idle", time.monotonic())

    def enter(self, phase: Phase) -> None:
        """The loop is idle, works, or waits for a forward, from now on."""
        self._state = (phase, time.monotonic())

    def beat(self) -> Heartbeat:
        phase, since = self._state
        return Heartbeat(phase, time.monotonic() - since)


class HeartbeatThread:
    """Sends a beat every `INTERVAL_S` on a socket of its own (sockets belong to one thread)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, pulse: Pulse) -> None:
        self._context = context
        self._address = address
        self._pulse = pulse
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and its socket, before the context goes. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with self._context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._address)
            while not self._stop.wait(INTERVAL_S):
                socket.send(encode([self._pulse.beat()]))
