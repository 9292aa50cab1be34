"""A replica: a whole minisgl server as a child process, and the connection to it.

Invariants: the server ends with the replica, however that ends (it watches its standard input); the replica ends with
its server, so that Serve restarts both; a replica is healthy for Serve when /livez says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from minisgl.chat.own_server import OwnServer, own_server
from minisgl.ray.args import ModelArgs
from minisgl.ray.autoscaling import KV, QUEUED
from minisgl.ray.relay import Call, Header
from minisgl.server.core.passing import Headers, Lost, ask, ask_whole, request_bytes

PROBE_S = 5.0  # seconds for a response of /livez or /stats
MAX_SILENCES = 3  # unanswered /livez in succession; a busy machine may miss one
_log = logging.getLogger("minisgl.ray")


class Replica:
    """Serve's user class of a replica; requests go to `handle.relay.remote(...)`."""

    async def __init__(self, name: str, args: dict[str, Any]) -> None:  # type: ignore[misc]
        self._stack = contextlib.AsyncExitStack()
        self._model = ModelArgs.model_validate(args)
        flags = ["--host", "127.0.0.1", "--port", "0", *self._model.server_flags(name)]
        async with asyncio.timeout(self._model.startup_s):
            self._server: OwnServer = await self._stack.enter_async_context(own_server(flags))
        url = urlsplit(self._server.url)
        self._address = url.hostname or "", url.port or 80
        self._is_ending = False
        self._num_silences = 0
        self._watch = asyncio.ensure_future(self._end_with_server())

    async def _end_with_server(self) -> None:
        code = await asyncio.shield(self._server.ended)
        if not self._is_ending:
            self._end_at_once(f"the server ended with code {code}")

    def _end_at_once(self, reason: str) -> None:
        """Kill the server and this process. (Serve would first give the requests of an unhealthy replica time to end;
        but nothing answers them here, and they must continue elsewhere.)"""
        _log.error("%s: this replica ends", reason)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        os._exit(1)

    async def __del__(self) -> None:
        self._is_ending = True
        if (watch := getattr(self, "_watch", None)) is not None:
            watch.cancel()
        if (stack := getattr(self, "_stack", None)) is not None:
            await stack.aclose()

    # --------------------------------------------------------------------------------------------- what Serve asks

    async def check_health(self) -> None:
        """Check the server for Ray Serve. Ends the replica if it is dead or often silent; raises `RuntimeError` if
        silent."""
        try:
            status, _, body = await ask_whole(self._address, request_bytes("GET", b"/livez", []), PROBE_S)
            self._num_silences = 0
            if status != 200:
                self._end_at_once(f"/livez: {status}: {body.decode(errors='replace')}")
        except Lost as error:
            self._num_silences += 1
            reason = f"/livez: nothing came, {self._num_silences} times: the server {error}"
            if self._num_silences == MAX_SILENCES:
                self._end_at_once(reason)
            raise RuntimeError(reason) from error

    async def record_replica_metadata(self) -> dict[str, float]:
        """Return the size of the KV pool for `router.PrefixRouter`; Serve calls it once."""
        return {"kv_tokens": (await self._load())["kv_tokens"]}

    async def record_routing_stats(self) -> dict[str, float]:
        """Return the server's load for `router.PrefixRouter`."""
        return await self._load()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the queued tokens and the KV use for `autoscaling.Policy`."""
        load = await self._load()
        return {QUEUED: load["queued_tokens"], KV: load["kv_use"]}

    async def _load(self) -> dict[str, float]:
        key = self._server.key
        headers: Headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
        status, _, body = await ask_whole(self._address, request_bytes("GET", b"/stats", headers), PROBE_S)
        if status != 200:
            raise RuntimeError(f"/stats: {status}: {body.decode(errors='replace')}")
        load: dict[str, float] = json.loads(body)["load"]
        return load

    # ------------------------------------------------------------------------------------------------- requests

    async def relay(self, asked: Call) -> AsyncIterator[Header | bytes]:
        """Send a request to the server and yield the response's header, then its body in pieces (waiting events are
        joined). Raises `Lost`."""
        request = request_bytes(asked.method, asked.path.encode("latin-1"), asked.headers, asked.said + asked.body)
        try:
            with contextlib.closing(await ask(self._address, request)) as answer:
                # no length, as another replica may continue the stream
                yield Header(answer.status, [one for one in answer.headers if one[0] != b"content-length"])
                async for data in answer.pieces():
                    yield data
        except Lost as error:
            raise Lost(f"the replica's server {error}") from error
