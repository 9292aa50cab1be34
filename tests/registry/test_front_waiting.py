"""What a client sees while its model is not there: comments in a stream, errors as statuses and as events, the bounds
of waiting. The servers of the models are none; what answers for them is said here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from minisgl.config import ApiKey, EngineConfig, Limits, ServerConfig
from minisgl.registry import front as module
from minisgl.registry.entries import Entry
from minisgl.registry.front import Front
from minisgl.registry.registry import Registry
from minisgl.server.core.http import HttpServer
from minisgl.server.core.middleware import Middleware
from minisgl.server.core.streams import EVENTS, LINES
from tests.helpers.seconds import WAIT_S
from tests.helpers.several import Fleet, entry, registry, states, until

CONFIG = ServerConfig(engine=EngineConfig())
ANSWER = b"data: {}\n\ndata: [DONE]\n\n"
Handle = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def answer(status: str, body: bytes, kind: str = "application/json", *, chunked: bool = False) -> bytes:
    length = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{length}\r\n\r\n".encode()
    return head + (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)


class Bench:
    """A front over `found`, whose models' server answers as `reply` says."""

    def __init__(self, http: httpx.AsyncClient, found: Registry, fleet: Fleet) -> None:
        self.http = http
        self.registry = found
        self.fleet = fleet
        self.reply = answer("200 OK", ANSWER, "text/event-stream", chunked=True)
        self.asked: list[bytes] = []
        self.handle: Handle = self._reply

    async def _reply(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(self.reply)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        request = head + await reader.readexactly(sum(length))
        self.asked.append(request)
        with contextlib.suppress(ConnectionError):
            await self.handle(request, writer)
            await writer.drain()
        writer.close()

    async def post(self, path: str, model: str, **more: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": model, "prompt": "x", **more})


@contextlib.asynccontextmanager
async def bench(
    *entries: Entry, room_for: float = 2, config: ServerConfig = CONFIG, **limits: Any
) -> AsyncIterator[Bench]:
    fleet = Fleet()
    found = registry(fleet, *entries, room_for=room_for, **limits)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = HttpServer(Middleware(Front(found, config), config), listener, config.limits)
        await server.start()
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
            one = Bench(http, found, fleet)
            behind = await asyncio.start_server(one.serve, "127.0.0.1", 0)
            fleet.address = behind.sockets[0].getsockname()[:2]
            try:
                yield one
            finally:
                behind.close()
                await asyncio.gather(server.stop(at_once=True), found.close())


@pytest.fixture
def early_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMENT_AFTER_S", 0.01)


@pytest.mark.usefixtures("early_comments")
async def test_a_stream_hears_comments_while_its_model_loads() -> None:
    async with bench(entry("a")) as one:
        gate = one.fleet.hold["a"] = asyncio.Event()
        body = {"model": "a", "prompt": "x", "stream": True}
        async with one.http.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.status_code == 200 and stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.aiter_lines()
            assert await anext(lines) == ": a is loading: reading"
            gate.set()
            rest = [line async for line in lines if line and not line.startswith(":")]
        assert rest == ["data: {}", "data: [DONE]"]
        whole = await one.post("/v1/completions", "a", stream=True)
        assert whole.content == ANSWER  # nothing is said where nothing loads: it does not wait at all


@pytest.mark.usefixtures("early_comments")
@pytest.mark.parametrize(
    ("path", "body", "kind", "ping"),
    [
        ("/v1/messages", {"stream": True}, EVENTS, b': a is loading: reading\nevent: ping\ndata: {"type":"ping"}\n\n'),
        ("/completion", {"stream": True}, EVENTS, b": a is loading: reading\n\n"),
        ("/generate", {"stream": True, "text": "x"}, EVENTS, b": a is loading: reading\n\n"),
        ("/generate", {"stream": True, "prompt": "x"}, LINES, b'{"text_delta":""}\n'),
        ("/api/chat", {}, LINES, b'"message":{"role":"assistant","content":""},"done":false}\n'),
        ("/api/generate", {}, LINES, b'"response":"","done":false}\n'),
    ],
)
async def test_comments_while_waiting_are_no_events(path: str, body: dict[str, Any], kind: str, ping: bytes) -> None:
    async with bench(entry("a")) as one:
        gate = one.fleet.hold["a"] = asyncio.Event()
        one.fleet.refuse["a"] = "it is no model"
        async with one.http.stream("POST", path, json={"model": "a", **body}) as stream:
            assert stream.headers["content-type"].startswith(kind)
            found = b""
            async for data in stream.aiter_raw():
                found += data
                if found.endswith(ping):
                    gate.set()
        assert gate.is_set() and b"it is no model" in found
        if kind == LINES:
            assert all(json.loads(line) for line in found.splitlines())


@pytest.mark.usefixtures("early_comments")
@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/completions", 'data: {"error":{"message":"REASON","type":"server_error","param":null,"code":"CODE"}}'),
        ("/v1/messages", 'data: {"type":"error","error":{"type":"overloaded_error","message":"REASON"}}'),
        ("/v1/responses", 'data: {"type":"error","code":"CODE","message":"REASON","param":null,"sequence_number":0}'),
    ],
)
async def test_a_load_that_fails_after_a_comment_is_an_event(path: str, last: str) -> None:
    async with bench(entry("a")) as one:
        gate = one.fleet.hold["a"] = asyncio.Event()
        one.fleet.refuse["a"] = "it is no model"
        async with one.http.stream("POST", path, json={"model": "a", "stream": True}) as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith(":")
            gate.set()
            rest = [line async for line in lines if line.startswith("data:") and line != 'data: {"type":"ping"}']
        wanted = last.replace("REASON", "model: a: not loaded: it is no model").replace("CODE", "model_not_loaded")
        assert rest[0] == wanted and rest[1:] == (["data: [DONE]"] if path == "/v1/completions" else [])
        again = await one.post(path, "a", stream=True)
        assert again.status_code == 503 and again.headers["retry-after"]


@pytest.mark.usefixtures("early_comments")
async def test_error_after_a_comment_is_an_event() -> None:
    async with bench(entry("a")) as one:
        gate = one.fleet.hold["a"] = asyncio.Event()
        one.reply = answer("400 Bad Request", b'{"error":{"message":"n: no","code":"invalid_value"}}')
        body = {"model": "a", "prompt": "x", "stream": True}
        async with one.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith(":")
            gate.set()
            rest = [line async for line in lines if line.startswith("data:")]
        assert json.loads(rest[0][6:])["error"]["message"] == "n: no" and rest[1] == "data: [DONE]"
        plain = await one.post("/v1/completions", "a", stream=True)
        assert plain.status_code == 400 and plain.json()["error"]["message"] == "n: no"


async def test_slow_load_gets_503_and_full_queue_gets_429() -> None:
    async with bench(entry("a"), max_queued_requests=1) as one:
        one.fleet.hold["a"] = asyncio.Event()
        first = asyncio.ensure_future(one.post("/v1/completions", "a"))
        await until(lambda: one.registry.num_waiting == 1)
        second = await one.post("/v1/completions", "a")
        assert second.status_code == 429 and second.headers["retry-after"]
        one.fleet.hold["a"].set()
        assert (await first).status_code == 200
    async with bench(entry("a"), load_timeout_s=0.05) as one:
        one.fleet.hold["a"] = asyncio.Event()
        late = await one.post("/v1/completions", "a")
        assert late.status_code == 503 and late.headers["retry-after"]
        assert "not loaded within 0.05 s (--load-timeout): it is loading: reading" in late.json()["error"]["message"]
        assert one.registry.num_waiting == 0


async def test_a_client_that_leaves_while_it_waits_waits_no_more() -> None:
    async with bench(entry("a"), entry("b"), room_for=1) as one:
        with one.registry.lease(one.registry.models["a"]) as lease:
            await lease.ready
            waits = asyncio.ensure_future(one.post("/v1/completions", "b"))
            await until(lambda: one.registry.num_waiting == 1)
            waits.cancel()
            await until(lambda: one.registry.num_waiting == 0)
        assert states(one.registry) == {"a": "loaded", "b": "unloaded"}


async def test_a_request_whose_server_said_nothing_is_sent_once_more() -> None:
    async with bench(entry("a")) as one:

        async def hang_up_once(request: bytes, writer: asyncio.StreamWriter) -> None:
            if len(one.asked) > 1:
                writer.write(one.reply)

        one.handle = hang_up_once
        found = await one.post("/v1/completions", "a", stream=True)
        assert found.content == ANSWER and len(one.asked) == 2 and one.asked[0] == one.asked[1]

        async def hang_up(request: bytes, writer: asyncio.StreamWriter) -> None:
            pass

        one.handle = hang_up
        lost = await one.post("/v1/completions", "a", stream=True)
        assert lost.status_code == 503 and lost.json()["error"]["code"] == "engine_unavailable"
        assert len(one.asked) == 4


async def test_an_answer_that_is_cut_is_cut_between_events_or_dropped() -> None:
    async with bench(entry("a")) as one:
        one.reply = answer("200 OK", b"data: 1\n\n", "text/event-stream", chunked=True)[:-5] + b"9\r\ndata"
        cut = await one.post("/v1/completions", "a", stream=True)
        first, error, done, end = cut.text.split("\n\n")
        assert (first, done, end) == ("data: 1", "data: [DONE]", "")
        assert json.loads(error[6:])["error"]["code"] == "engine_unavailable"
        one.reply = answer("200 OK", b"{}" * 100)[:-50]
        whole = await one.post("/v1/completions", "a")
        assert whole.status_code == 503  # nothing of it was passed on


async def test_a_path_and_a_body_are_passed_on_as_they_were() -> None:
    async with bench(entry("a")) as one:
        one.reply = answer("200 OK", b"{}")
        body = b'{ "model":"a" ,\n "x": "\xc3\xa4" }'
        headers = {"content-type": "application/json", "authorization": "Bearer k", "x-own": "1"}
        path = "/v1/some%2Fthing?x=%20"
        found = await one.http.post(f"{path}&model=b", content=body, headers=headers)  # that is for the front alone
        assert found.json() == {}
        head, _, sent = one.asked[0].partition(b"\r\n\r\n")
        assert sent == body and head.startswith(f"POST {path} HTTP/1.1\r\n".encode())
        assert b"\r\nauthorization: Bearer k" in head and b"\r\nx-own: 1" in head
        assert head.count(b"x-request-id") == 1 and b"\r\nconnection: close" in head


async def test_watching_a_model_does_not_keep_it_loaded() -> None:
    async with bench(entry("a"), entry("b"), room_for=1) as one:
        over = asyncio.Event()

        async def watched(request: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(one.reply.removesuffix(b"0\r\n\r\n"))
            await over.wait()
            writer.write(b"0\r\n\r\n")

        one.handle = watched
        async with one.http.stream("GET", "/stats/stream?model=a&steps=1") as stream:
            assert await anext(stream.aiter_lines()) == "data: {}"
            assert one.asked[0].startswith(b"GET /stats/stream?steps=1 HTTP/1.1")
            with one.registry.lease(one.registry.models["b"]) as lease:
                await lease.ready
            assert states(one.registry) == {"a": "unloaded", "b": "loaded"}
            over.set()


KEYED = ServerConfig(
    engine=EngineConfig(),
    limits=Limits(max_encoding_bytes=2 * 10**5),
    api_keys=(ApiKey(name="alice", key="alice"), ApiKey(name="bob", key="bob")),
)
BOB = {"authorization": "Bearer bob"}


async def test_bodies_that_are_being_answered_keep_no_room_from_others() -> None:
    """The turn of a large body ends when it has come, not with the answer; what waits for answers is shared by keys."""
    async with bench(entry("a"), entry("b"), config=KEYED) as one, asyncio.TaskGroup() as tasks:
        over = asyncio.Event()

        async def handle(request: bytes, writer: asyncio.StreamWriter) -> None:
            if b"Bearer alice" in request:
                await over.wait()
            writer.write(answer("200 OK", b"{}"))

        one.handle = handle
        body = {"model": "a", "prompt": "x" * 10**5}
        alice = {"authorization": "Bearer alice"}
        asked = [tasks.create_task(one.http.post("/v1/completions", json=body, headers=alice)) for _ in range(16)]
        try:
            await until(lambda: len(one.asked) == 16)
            found = await one.http.post("/v1/completions", json={**body, "model": "b"}, headers=BOB)
            assert found.status_code == 200
            refused = await one.http.post("/v1/completions", json={**body, "prompt": "x" * 190_000}, headers=alice)
            assert refused.status_code == 429 and "wait for their answers" in refused.text
        finally:
            over.set()
    assert {one_of.result().status_code for one_of in asked} == {200}


@pytest.mark.parametrize("value", [b"[" + b"[]," * 10**6 + b"1]", b"{" + b'"a":1,' * 10**6 + b'"b":1}', b"[" * 10**6])
@pytest.mark.parametrize("field", ["model", "stream", "lora_name"])
async def test_nothing_is_built_of_a_body_that_passes(field: str, value: bytes) -> None:
    """Its server has the words for what is wrong with it."""
    async with bench(entry("a")) as one:
        body = b'{"%b": %b}' % (field.encode(), value)
        tracemalloc.start()
        try:
            found = await one.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert found.status_code == 200 and len(one.asked) == 1
        assert peak < 12 * len(body)  # copies on both sides of three sockets; objects were 50 bytes for each byte
