"""The ingress in front of replicas that are not there: what it sends them, and what it refuses by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from minisgl.ray.ingress import UNASKED_BYTES, Ingress
from minisgl.ray.relay import Call, Header

KEY = b"Bearer sk-the-key"


class Handle:
    """One replica: keeps what it is asked, and answers 401 without the key."""

    def __init__(self) -> None:
        self.asked: list[Call] = []
        self.relay = self

    def options(self, stream: bool) -> Handle:
        assert stream
        return self

    def remote(self, asked: Call) -> Answer:
        self.asked.append(asked)
        return Answer(200 if dict(asked.headers).get(b"authorization") == KEY else 401)


class Answer:
    def __init__(self, status: int) -> None:
        self._status = status

    async def __aiter__(self) -> AsyncIterator[Header | bytes]:
        yield Header(self._status, [(b"content-type", b"application/json")])
        yield b"{}"

    def cancel(self) -> None:
        pass


def ask(handle: Handle, raw_path: bytes, body: list[bytes] | None = None, key: bytes = KEY) -> tuple[int, int]:
    """Status, and how many parts of the body were read."""
    from urllib.parse import unquote

    from starlette.requests import Request

    parts = list(body or [])
    told: list[dict[str, Any]] = []
    scope = {
        "type": "http",
        "method": "POST" if parts else "GET",
        "path": unquote(raw_path.decode()),
        "raw_path": raw_path,
        "query_string": b"a=%2F",
        "headers": [(b"host", b"x"), (b"authorization", key)],
    }
    num_read = 0

    async def receive() -> dict[str, Any]:
        nonlocal num_read
        num_read += 1
        part = parts.pop(0) if parts else b""
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: Any) -> None:
        told.append(message)

    async def run() -> None:
        answer = await Ingress({"m": handle}, 1.0)(Request(scope, receive))
        await answer(scope, receive, send)

    asyncio.run(run())
    return told[0]["status"], num_read


@pytest.mark.parametrize(
    "path", [b"//other:80/x", b"/%2Fother:80/x", b"/%2fother/x", b"/\\\\other/x", b"http://other/x", b"/%5cother"]
)
def test_a_path_that_names_a_host_is_refused_and_no_replica_asked(path: bytes) -> None:
    handle = Handle()
    assert ask(handle, path)[0] == 400
    assert handle.asked == []


def test_a_path_goes_on_as_it_came() -> None:
    handle = Handle()
    assert ask(handle, b"/v1/models/a%2Fb%20c")[0] == 200
    assert [asked.path for asked in handle.asked] == ["/v1/models/a%2Fb%20c?a=%2F"]


def test_a_large_body_is_read_only_for_a_key_that_a_server_takes() -> None:
    parts = [b" " * UNASKED_BYTES] * 8
    assert ask(Handle(), b"/v1/completions", parts, b"Bearer wrong") == (401, 2)
    assert ask(Handle(), b"/v1/completions", parts)[1] == 8
