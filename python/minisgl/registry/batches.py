"""Files and batches at the port of several models: they are stored here, and a line is sent to its model's server.

Invariants: a line delays no other request: it loads a model only if none in use must be unloaded for it, and another
request may take its model's memory at once; then the line is sent again. A server runs lines in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.types import ASGIApp

from minisgl.config import ServerConfig
from minisgl.registry.entries import Entry
from minisgl.registry.keys import KeyLimits
from minisgl.registry.model import Model
from minisgl.registry.registry import Registry
from minisgl.server.batches.background import LINES
from minisgl.server.batches.endpoint import Batches, add_batches, add_files
from minisgl.server.batches.runner import Asked, Said
from minisgl.server.batches.store import Store
from minisgl.server.core.errors import ApiError, install_handlers
from minisgl.server.core.glance import NOTHING, WRONG, decoded, text_of
from minisgl.server.core.passing import Lost, ask_whole, request_bytes
from minisgl.server.core.routes import Routes

ENDED_S = 10.0
"""Seconds from the end of a connection to the end of its server at most."""
ENGINE_DIED = 1
"""Exit code of a server whose engine died."""


class _Body(msgspec.Struct):
    model: msgspec.Raw = NOTHING


class BatchesOfSeveral:
    """Files and batches over all models. `app` answers their routes; `all` must be started and stopped."""

    def __init__(self, registry: Registry, limits: KeyLimits, config: ServerConfig, store: Store) -> None:
        self._registry = registry
        self._limits = limits
        self._config = config
        most = max_lines_in_flight([model.entry for model in registry.models.values()])
        self.all = Batches(config, store, lambda: most, self._ask)
        app = Routes()
        install_handlers(app)
        add_files(app, self.all.here)
        add_batches(app, self.all.here)
        self.app: ASGIApp = app

    async def _ask(self, asked: Asked, key: int) -> Said:
        try:
            self._limits.use.check(key)
            lease = self._registry.lease_in_background(self._model(asked.line.body))
        except ApiError as error:
            return Said.of(error.status, bytes(error.response().body), error.headers.get("retry-after", "").encode())
        if lease is None:
            return Said(503, b"")
        with lease:
            asked.submitted.set()  # the server itself queues texts to encode
            server = lease.ready.result()
            try:
                return await self._at(server.address, asked, key)
            except Lost:  # it was unloaded for another model, or its engine died
                await asyncio.wait({server.ended}, timeout=ENDED_S)
                died = server.ended.done() and server.ended.result() == ENGINE_DIED
                return Said(503, b"", engine_died=died)

    def _model(self, body: bytes) -> Model:
        """Return the model of a line's body, or the first one if it names none. Raises `ApiError` 404."""
        try:
            name = text_of(decoded(body, _Body).model)
        except WRONG:
            name = None  # a server reports the error
        if name:
            return self._registry.named(name)
        return next(iter(self._registry.models.values()))

    async def _at(self, address: tuple[str, int], asked: Asked, key: int) -> Said:
        """Send a line to the server at `address` and return its result. Raises `Lost`."""
        headers = [(b"content-type", b"application/json"), (b"x-request-id", asked.request_id.encode())]
        given = self._config.api_keys[key - 1].key if key else self._config.api_key
        if given is not None:
            headers.append((b"authorization", b"Bearer " + given.encode()))
        path = (LINES + asked.line.url).encode()
        request = request_bytes("POST", path, headers, asked.line.body)
        status, said, body = await ask_whole(address, request)
        return Said.of(status, body, dict(said).get(b"retry-after"))


def max_lines_in_flight(entries: Sequence[Entry]) -> int:
    """Return how many lines may be in flight: the rows of the largest engine. A server takes what it can."""
    return max(one.config.engine.rows_on(one.config.engine.device) for one in entries)
