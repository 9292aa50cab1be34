"""Batch lines forwarded by another process, the front of several models, which stores the batches. They arrive as
requests to their endpoint below a separate path, and run with low priority here.

Invariants: at most as many run at once as of a server's own batches, and their prompts are encoded one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.server.batches.runner import LineSemaphore
from minisgl.server.core.errors import BATCHES
from minisgl.server.core.request import REQUEST, HttpRequest

LINES = f"{BATCHES}/lines"


class _Submitted(asyncio.Event):
    """Event that is set when a line has been submitted to the engine; setting it lets the next line be encoded."""

    def __init__(self, turn: asyncio.Lock) -> None:
        super().__init__()
        self._turn = turn

    def set(self) -> None:
        if not self.is_set():
            super().set()
            self._turn.release()


class Background:
    """ASGI middleware that runs forwarded batch lines. `room()`: lines that may run now."""

    def __init__(self, app: ASGIApp, room: Callable[[], int]) -> None:
        self._app = app
        self._slots = LineSemaphore(room)
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(f"{LINES}/"):
            await self._app(scope, receive, send)
            return
        request: HttpRequest = scope[REQUEST]
        scope["path"] = request.path = scope["path"].removeprefix(LINES)
        async with self._slots:
            await self._turn.acquire()
            submitted = request.submitted = _Submitted(self._turn)
            try:
                await self._app(scope, receive, send)
            finally:
                submitted.set()
