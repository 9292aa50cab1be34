"""What Serve's proxy talks to: finds the model that a request asks for, and passes it on to one of its replicas.

Keeps true: answers are those of the server of a replica, byte for byte, but for marks; a client that leaves ends its
request there; which keys, limits and routes there are is the servers' to say, and is said here of no request.
Doesn't know: what answers say.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.ray.prefix import look_at
from minisgl.ray.relay import Asked, Head, Lost, Relay
from minisgl.server.resume import MARKS

MODEL_HEADER = "x-minisgl-model"
"""Of a request without a body: which model's replica is to answer."""
OF_THE_PROXY = frozenset({b"x-request-id", b"date", b"server"})
"""Headers of an answer that Serve's proxy writes; the id is the one that the server was sent."""
MAX_BODY_BYTES = 1 << 26
"""More than any server takes unless it is told to."""
_log = logging.getLogger("minisgl.ray")


class Ingress:
    """Serve's user class. `handles`: of the deployments, by the names of their models; the first is for requests that
    name none, and none that there is."""

    def __init__(self, handles: Mapping[str, Any], retry_s: float) -> None:
        self._handles = {name: handle.options(stream=True) for name, handle in handles.items()}
        self._default = next(iter(self._handles))
        self._retry_s = retry_s

    async def __call__(self, request: Request) -> Response:
        try:
            body = await _body(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        if body is None:
            return _error(413, f"body: more than {MAX_BODY_BYTES} bytes", "body_too_large")
        if (
            request.method in ("GET", "HEAD")
            and request.url.path.rstrip("/") == "/v1/models"
            and len(self._handles) > 1
        ):
            return await self._models(request)
        name = look_at(body).model or request.headers.get(MODEL_HEADER)
        handle = self._handles.get(name or "", self._handles[self._default])
        return Relayed(self._relay(handle, request, body))

    def _relay(self, handle: Any, request: Request, body: bytes) -> Relay:
        query = request.url.query
        path = request.scope["path"] + (f"?{query}" if query else "")
        headers = [header for header in request.scope["headers"] if header[0].lower() != MARKS]  # between servers only
        return Relay(Asked(request.method, path, headers, body), _attempt(handle), self._retry_s)

    async def _models(self, request: Request) -> Response:
        """Those of all deployments; the first answer that is none is the answer."""
        found: list[Any] = []
        for handle in self._handles.values():
            head, data = await _whole(self._relay(handle, request, b""))
            if head.status != 200:
                return _response(head, data)
            found += json.loads(data)["data"]
        return Response(msgspec.json.encode({"object": "list", "data": found}), media_type="application/json")


class Relayed(Response):
    """The answer to one request, as it comes."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for one in self._relay.answer():
            if isinstance(one, Head):
                headers = [header for header in one.headers if header[0].lower() not in OF_THE_PROXY]
                await send({"type": "http.response.start", "status": one.status, "headers": headers})
            else:
                await send({"type": "http.response.body", "body": one, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _attempt(handle: Any) -> Any:
    async def attempt(asked: Asked) -> AsyncIterator[Head | bytes]:
        answer = handle.relay.remote(asked)
        try:
            async for one in answer:
                yield one
        except Lost:
            raise
        except Exception as error:  # Ray's words for an actor that died, a node that is gone, a call that failed
            raise Lost(f"the replica is gone: {type(error).__name__}") from error
        finally:
            answer.cancel()

    return attempt


async def _body(request: Request) -> bytes | None:
    """None: it is too large."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


async def _whole(relay: Relay) -> tuple[Head, bytes]:
    head, data = Head(503, []), b""
    async for one in relay.answer():
        if isinstance(one, Head):
            head = one
        else:
            data += one
    return head, data


def _response(head: Head, data: bytes) -> Response:
    answer = Response(data, head.status)
    answer.raw_headers = [*head.headers, (b"content-length", b"%d" % len(data))]
    return answer


def _error(status: int, message: str, code: str) -> Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return Response(msgspec.json.encode(body), status, media_type="application/json")
