"""Lines of batches that another process keeps: the one at the port of several models. They come as requests of their
endpoint, below a path of their own, and are in the background here.

Invariants: no more at once than a server's own batches would ask, and their texts are encoded one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.server.batches.runner import Slots
from minisgl.server.core.errors import BATCHES
from minisgl.server.core.request import REQUEST, HttpRequest

LINES = f"{BATCHES}/lines"


class _Submitted(asyncio.Event):
    """Others may be encoded once this is set."""

    def __init__(self, turn: asyncio.Lock) -> None:
        super().__init__()
        self._turn = turn

    def set(self) -> None:
        if not self.is_set():
            super().set()
            self._turn.release()


class Background:
    """An ASGI application around that of the endpoints. `room`: how many lines it may have now."""

    def __init__(self, app: ASGIApp, room: Callable[[], int]) -> None:
        self._app = app
        self._slots = Slots(room)
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
