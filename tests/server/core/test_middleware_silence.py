"""No stream is silent for long: its head comes before a long prompt is computed, then what is no event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from minisgl.config import Silence
from minisgl.server.core.streams import STREAMED
from tests.helpers.server import CONFIG, Frontend, chat_body, failed_step, frontend

NUM_PINGS = 3
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat_body("TEXT"),
    "/v1/completions": {"prompt": "TEXT"},
    "/v1/responses": {"input": "TEXT"},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "TEXT"}]},
    "/generate": {"prompt": "TEXT"},
    "/completion": {"prompt": "TEXT"},
    "/api/chat": {"messages": [{"role": "user", "content": "TEXT"}]},
    "/api/generate": {"prompt": "TEXT"},
}
"""A body of each route that may stream."""
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "generate by text": ("/generate", {"text": "TEXT"}),
    "generate raw": ("/api/generate", {"prompt": "TEXT", "raw": True}),
    "chat with log probabilities": ("/v1/chat/completions", chat_body("TEXT", logprobs=True, prompt_logprobs=1)),
    "two choices": ("/v1/chat/completions", chat_body("TEXT", n=2)),
}
CASES = [*BODIES.items(), *MORE.values()]
IDS = [*BODIES, *MORE]


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[Frontend]:
    config = msgspec.structs.replace(CONFIG, silence=Silence(head_wait=0.0, longest=0.02))
    with frontend(front_end=front_end, config=config) as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)


def is_ping(path: str, part: bytes) -> bool:
    """Whether a part of a stream says only that the stream lives, as the clients of `path` know it."""
    if path == "/v1/messages":
        return part == b'event: ping\ndata: {"type":"ping"}'
    if path.startswith("/api/"):
        text = {"message": {"role": "assistant", "content": ""}} if path == "/api/chat" else {"response": ""}
        found = {**json.loads(part), "model": "", "created_at": ""}
        return bool(found == {"model": "", "created_at": "", **text, "done": False})
    return part in (b": ping", b'{"text_delta":""}')


def parts(answer: httpx.Response) -> Iterator[bytes]:
    end = b"\n" if answer.headers["content-type"] == "application/x-ndjson" else b"\n\n"
    rest = b""
    for data in answer.iter_raw():
        *found, rest = (rest + data).split(end)
        yield from found
    assert not rest


def test_clients_and_proxies_wait_longer_than_a_stream_is_silent() -> None:
    assert Silence() == Silence(head_wait=1.0, longest=15.0)


def test_every_route_that_may_stream_is_asked() -> None:
    assert BODIES.keys() | {"/infill"} == STREAMED.keys()  # which is shown as /completion is


@pytest.mark.parametrize(("path", "body"), CASES, ids=IDS)
def test_stream_without_token_says_that_it_lives_until_its_error(
    server: Frontend, http: httpx.Client, path: str, body: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    marker = f"waits {request.node.name} hang:"
    asked = json.loads(json.dumps(body).replace("TEXT", marker))
    with http.stream("POST", path, json={**asked, "stream": True}) as answer:
        assert answer.status_code == 200
        found = parts(answer)
        for _ in range(NUM_PINGS):
            assert is_ping(path, part := next(found)), part
        server.engine.wait_for_request(marker)  # pings may come before the engine has it
        for one in server.engine.requests(marker):
            server.engine.send(failed_step(one.req_id, "it fell"))
        rest = [part for part in found if not is_ping(path, part)]
    error = next(part for part in rest if b"it fell" in part)
    assert b"error" in error and rest.index(error) >= len(rest) - 2, rest  # [DONE] may come behind it


@pytest.mark.parametrize("path", BODIES)
def test_stream_that_stops_after_tokens_says_that_it_lives(http: httpx.Client, path: str) -> None:
    asked = json.loads(json.dumps(BODIES[path]).replace("TEXT", "then hang:ab"))
    with http.stream("POST", path, json={**asked, "stream": True}) as answer:
        found, num = parts(answer), 0
        while num < NUM_PINGS:  # in a row: after the last part that has text
            num = num + 1 if is_ping(path, next(found)) else 0
