"""The entry behind Serve's proxy: finds the model of a request and forwards the request to one of its replicas.

Invariants: responses are those of a replica's server, byte for byte, except for marks; a client that disconnects ends
its request there; keys, limits and routes are checked by the servers, not here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.ray.placement import routing_fields
from minisgl.ray.relay import Call, Header, Relay
from minisgl.server.core.errors import ApiError
from minisgl.server.core.passing import WHO, Lost
from minisgl.server.core.resume import MARKS

MODEL_HEADER = "x-minisgl-model"
"""Header that names the model of a request without a body."""
MAX_BODY_BYTES = 1 << 26
"""Limit of a body; above the servers' default limit."""
UNASKED_BYTES = 1 << 16
"""Bytes of a body that are read before a server has checked the request's API key."""
_log = logging.getLogger("minisgl.ray")


class Ingress:
    """The entry of the application, called by Ray Serve. `handles` has the deployments by model name; the first one
    serves requests that name no model or an unknown one."""

    def __init__(self, handles: Mapping[str, Any], retry_s: float) -> None:
        self._handles = {name: handle.options(stream=True) for name, handle in handles.items()}
        self._default = next(iter(self._handles))
        self._retry_s = retry_s

    async def __call__(self, request: Request) -> Response:
        if not _is_path(_raw_path(request.scope)):
            return ApiError(400, "path: must begin with one slash", code="invalid_path").response()
        try:
            body = await self._body(request)
        except ClientDisconnect:
            return Response(status_code=499)  # the client has disconnected
        if isinstance(body, Response):
            return body
        path = request.url.path
        if body is None:
            return ApiError(413, f"body: more than {MAX_BODY_BYTES} bytes", code="body_too_large").response(path)
        if request.method in ("GET", "HEAD") and path.rstrip("/") == "/v1/models" and len(self._handles) > 1:
            return await self._models(request)
        name = routing_fields(body).model or request.headers.get(MODEL_HEADER)
        handle = self._handles.get(name or "", self._handles[self._default])
        return Relayed(self._relay(handle, request, body))

    def _relay(self, handle: Any, request: Request, body: bytes) -> Relay:
        query = request.scope.get("query_string", b"").decode("latin-1")
        path = _raw_path(request.scope) + (f"?{query}" if query else "")
        headers = [header for header in request.scope["headers"] if header[0].lower() != MARKS]  # between servers only
        return Relay(Call(request.method, path, headers, body), _attempt(handle), self._retry_s)

    async def _body(self, request: Request) -> bytes | Response | None:
        """Read the whole body. Return None if it is too large, or a response that refuses the request's API key."""
        parts, size, is_asked = list[bytes](), 0, False
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                return None
            parts.append(part)
            if size > UNASKED_BYTES and not is_asked:
                is_asked = True
                if (refusal := await self._refusal_of_key(request)) is not None:
                    return refusal
        return b"".join(parts)

    async def _refusal_of_key(self, request: Request) -> Response | None:
        """Let a server check the request's API key alone. Return its refusal, or None if it does not refuse."""
        headers = [header for header in request.scope["headers"] if header[0] in WHO]
        probe = Call("GET", "/v1/models", headers)
        head, data = await _whole(Relay(probe, _attempt(self._handles[self._default]), self._retry_s))
        return _response(head, data) if head.status in (401, 403) else None

    async def _models(self, request: Request) -> Response:
        """Return the models of all deployments, or the first error response."""
        models: list[Any] = []
        for handle in self._handles.values():
            head, data = await _whole(self._relay(handle, request, b""))
            if head.status != 200:
                return _response(head, data)
            models += json.loads(data)["data"]
        return Response(msgspec.json.encode({"object": "list", "data": models}), media_type="application/json")


class Relayed(Response):
    """A streamed response: passes the relay's response on as it arrives."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for part in self._relay.answer():
            if isinstance(part, Header):
                # Serve's proxy writes this header itself, with the same id
                headers = [header for header in part.headers if header[0] != b"x-request-id"]
                await send({"type": "http.response.start", "status": part.status, "headers": headers})
            else:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _attempt(handle: Any) -> Any:
    async def attempt(request: Call) -> AsyncIterator[Header | bytes]:
        answer = handle.relay.remote(request)
        try:
            async for part in answer:
                yield part
        except Lost:
            raise
        except Exception as error:  # Ray's errors of a dead actor, a lost node, a failed call
            raise Lost(f"the replica is gone: {type(error).__name__}") from error
        finally:
            answer.cancel()

    return attempt


def _raw_path(scope: Scope) -> str:
    """Return the path as sent, percent-encoded: a decoded path could be read as another host's address."""
    raw = scope.get("raw_path") or quote(scope["path"], safe="/%").encode("latin-1")
    return bytes(raw).partition(b"?")[0].decode("latin-1")


def _is_path(raw: str) -> bool:
    """Return True if a raw path names a route and not another host."""
    return raw.startswith("/") and not raw[1:].lower().startswith(("/", "\\", "%2f", "%5c"))


async def _whole(relay: Relay) -> tuple[Header, bytes]:
    head, data = Header(503, []), b""
    async for part in relay.answer():
        if isinstance(part, Header):
            head = part
        else:
            data += part
    return head, data


def _response(head: Header, data: bytes) -> Response:
    answer = Response(data, head.status)
    answer.raw_headers = [*head.headers, (b"content-length", b"%d" % len(data))]
    return answer
