"""A replica: a whole minisgl server as a child process, and the way to it.

Invariants: the server ends with the replica, however that ends (it watches its standard input); the replica ends with
its server, so that Serve starts both anew; what Serve calls healthy is what /livez calls alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from yarl import URL

from minisgl.chat.own_server import OwnServer, own_server
from minisgl.ray.args import ModelArgs
from minisgl.ray.autoscaling import KV, QUEUED
from minisgl.ray.relay import Asked, Head, Lost

PROBE_S = 5.0  # for an answer of /livez or /stats
MAX_SILENCES = 3  # of /livez, one after the other: a busy machine may keep one waiting
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"content-length"}
)
_log = logging.getLogger("minisgl.ray")


class Replica:
    """Serve's user class: `handle.relay.remote(...)`."""

    async def __init__(self, name: str, args: dict[str, Any]) -> None:  # type: ignore[misc]
        self._stack = contextlib.AsyncExitStack()
        self._model = ModelArgs.model_validate(args)
        flags = ["--host", "127.0.0.1", "--port", "0", *self._model.server_flags(name)]
        async with asyncio.timeout(self._model.startup_s):
            self._server: OwnServer = await self._stack.enter_async_context(own_server(flags))
        self._http = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
        )
        self._is_ending = False
        self._num_silences = 0
        self._watch = asyncio.ensure_future(self._end_with_server())

    async def _end_with_server(self) -> None:
        code = await asyncio.shield(self._server.ended)
        if not self._is_ending:
            self._end_at_once(f"the server ended with code {code}")

    def _end_at_once(self, reason: str) -> None:
        """Serve would first give the requests of a replica that it finds ill the time to end; nobody answers them here,
        and they are to go on elsewhere."""
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
        """Ends the replica if its server says that it is not alive, or is silent for long. Raises if it was silent."""
        try:
            async with self._http.get(
                url_of(self._server.url, "/livez"), timeout=aiohttp.ClientTimeout(total=PROBE_S)
            ) as answer:
                self._num_silences = 0
                if answer.status != 200:
                    self._end_at_once(f"/livez: {answer.status}: {await answer.text()}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self._num_silences += 1
            reason = f"/livez: nothing came in {PROBE_S:g} s, {self._num_silences} times ({type(error).__name__})"
            if self._num_silences == MAX_SILENCES:
                self._end_at_once(reason)
            raise RuntimeError(reason) from error

    async def record_replica_metadata(self) -> dict[str, float]:
        """For `router.PrefixRouter`, once."""
        return {"kv_tokens": (await self._load())["kv_tokens"]}

    async def record_routing_stats(self) -> dict[str, float]:
        """For `router.PrefixRouter`."""
        return await self._load()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For `autoscaling.Policy`."""
        found = await self._load()
        return {QUEUED: found["queued_tokens"], KV: found["kv_use"]}

    async def _load(self) -> dict[str, float]:
        headers = {} if self._server.key is None else {"authorization": f"Bearer {self._server.key}"}
        url, timeout = url_of(self._server.url, "/stats"), aiohttp.ClientTimeout(total=PROBE_S)
        async with self._http.get(url, headers=headers, timeout=timeout) as answer:
            answer.raise_for_status()
            load: dict[str, float] = (await answer.json())["load"]
            return load

    # ------------------------------------------------------------------------------------------------- requests

    async def relay(self, asked: Asked) -> AsyncIterator[Head | bytes]:
        """Send it to the server: the answer's head, then its body as it comes; several events in one piece if they
        wait. Raises `Lost`."""
        headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in asked.headers if k.lower() not in HOP_BY_HOP]
        body = asked.said + asked.body
        url = url_of(self._server.url, asked.path)
        try:
            async with self._http.request(
                asked.method, url, headers=headers, data=body or None, allow_redirects=False
            ) as answer:
                yield Head(answer.status, [one for one in answer.raw_headers if one[0].lower() not in HOP_BY_HOP])
                async for data in answer.content.iter_any():
                    yield data
        except aiohttp.ClientError as error:
            raise Lost(f"the replica's server is gone: {type(error).__name__}: {error}") from error


def url_of(base: str, path: str) -> URL:
    """Join `path` (percent-encoded, with its query) to the server `base`, whose host and port it cannot change."""
    server = URL(base)
    raw, _, query = path.partition("?")
    return URL.build(
        scheme=server.scheme, host=server.host or "", port=server.port, path=raw, query_string=query, encoded=True
    )
