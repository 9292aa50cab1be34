"""Requests that are refused for their size, many at once: what they may take, and whom they may not disturb.

No text that cannot fit reaches the tokenizer, no value of a body with too many of them becomes an object,
large bodies are in hand in turns and small ones do not wait, and nothing of a refused request stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import psutil
import pydantic_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.config import Limits
from minisgl.sampling_params import Bounds
from minisgl.server.apis.anthropic import endpoint as messages_endpoint
from minisgl.server.apis.responses import endpoint as responses_endpoint
from minisgl.server.core import request as server_request
from minisgl.server.core.bodies import ChatMessage
from minisgl.server.core.errors import ApiError
from minisgl.server.core.request import MAX_LOGGED_CHARS, SMALL_BYTES, HttpRequest, check_shape
from minisgl.server.core.waiting import Turns
from minisgl.tokenizer import TooManyTokens
from tests.helpers.e2e import serving, until
from tests.helpers.server import CONFIG, MAX_SEQ_LEN, WAIT_S, Frontend, chat_body, check_error, frontend

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SIZE = 1 << 20
# by kind: path, body, the field that the refusal names
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "spaces": (CHAT, chat_body(" " * SIZE), "messages"),
    "no spaces": (TEXT, {"prompt": "a" * SIZE}, "prompt"),
    "emoji": (CHAT, chat_body("\U0001f600" * (SIZE // 4)), "messages"),
    "many prompts": (TEXT, {"prompt": ["hello " * (SIZE // 6 // 256)] * 256}, "prompt"),
    "token ids": (TEXT, {"prompt": [7] * (SIZE // 2)}, "prompt"),
    "input ids": ("/generate", {"input_ids": [7] * (SIZE // 2)}, "input_ids"),
    "many messages": (CHAT, {"messages": [{"role": "user", "content": "hi"}] * (SIZE // 32)}, "messages"),
    "long messages": (CHAT, {"messages": [{"role": "user", "content": "x" * (SIZE // 2000)}] * 2000}, "messages"),
    "detokenize": ("/detokenize", {"tokens": [7] * (SIZE // 2)}, "tokens"),
}


def encoded(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


@pytest.mark.parametrize("kind", list(REFUSED))
def test_many_at_once_take_little_and_leave_nothing(server: Frontend, kind: str) -> None:
    """Sixteen of a megabyte at once: encoded whole they took gigabytes, and part of it stayed."""
    path, body, field = REFUSED[kind]
    content = encoded(body)
    text = server.app.context.tokenizer.text
    num_encoded = text.cache_stats()["bytes_encoded"]
    process = psutil.Process()
    post = {"content": content, "headers": {"content-type": "application/json"}, "timeout": WAIT_S}
    with ThreadPoolExecutor(16) as pool:
        httpx.post(server.url + path, **post)
        gc.collect()
        before = process.memory_info().rss
        gc.disable()  # what only a collection frees counts
        try:
            answers = [pool.submit(httpx.post, server.url + path, **post) for _ in range(16)]
            errors = [check_error(one.result(), 400) for one in answers]
        finally:
            gc.enable()
    assert all(error["param"] == field for error in errors), errors[0]
    assert all(len(error["message"]) < 300 and any(c.isdigit() for c in error["message"]) for error in errors)
    server.wait_until(lambda: server.app.context.turns.num_bytes == 0)
    assert process.memory_info().rss - before < 64 * 2**20
    assert text.cache_stats()["bytes_encoded"] == num_encoded


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize"])
def test_many_counts_at_once_take_little(front_end: str, path: str) -> None:
    """The server encodes the whole text of a count, of one request at a time. It is a process of its own, so that what
    other tests have left in memory does not count."""
    text = "hello " * (SIZE // 6)
    content = encoded({"input": text} if "responses" in path else chat_body(text))
    post = {"content": content, "headers": {"content-type": "application/json"}, "timeout": WAIT_S}
    with serving("--served-model-name", "scripted", "--frontend", front_end) as server, ThreadPoolExecutor(8) as pool:
        process = psutil.Process(server.process.pid)
        first = httpx.post(server.url + path, **post)
        most = process.memory_info().rss + 64 * 2**20
        found = [one.result() for one in [pool.submit(httpx.post, server.url + path, **post) for _ in range(8)]]
        assert all(one.status_code == 200 and one.content == first.content for one in found), first.text[:200]
        most += 2 * sum(len(one.content) for one in found)
        until(lambda: process.memory_info().rss < most, "the memory of the counts")


def test_nothing_of_a_refused_request_waits_for_a_collection(server: Frontend) -> None:
    def is_gone() -> bool:
        return {ChatMessage, ApiError, TooManyTokens}.isdisjoint(map(type, gc.get_objects()))

    for path, body, _ in REFUSED.values():
        content = encoded(body)
        gc.collect()
        gc.disable()
        try:
            httpx.post(server.url + path, content=content, headers={"content-type": "application/json"}, timeout=WAIT_S)
            server.wait_until(is_gone)  # a thread that has handed over its result may still hold it for a moment
        finally:
            gc.enable()


# ------------------------------------------------------------------------------------------------------------- turns

BEGUN = 2 * SMALL_BYTES
"""Of a body have come: it takes a turn."""


def announce(server: Frontend, size: int, sent: bytes) -> socket.socket:
    return server.connect(f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n\r\n".encode() + sent)


def test_large_bodies_wait_in_order_and_small_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.server.core.request.STALLED_S", WAIT_S)
    config = msgspec.structs.replace(CONFIG, limits=Limits(max_encoding_bytes=300_000))
    content = encoded({"prompt": "say:ok", "user": "x" * 200_000})
    with frontend(config=config) as server, server.http() as http, contextlib.ExitStack() as stack:
        turns, context = server.app.context.turns, server.app.context
        first = stack.enter_context(announce(server, len(content), content[:BEGUN]))
        server.wait_until(lambda: turns.num_bytes == len(content))
        second = stack.enter_context(announce(server, len(content), content))
        server.wait_until(lambda: turns.num_waiting == 1 and context.queue.num_requests == 0)
        third = stack.enter_context(announce(server, len(content), content))
        server.wait_until(lambda: turns.num_waiting == 2)
        assert http.post(TEXT, json={"prompt": "say:ok"}).status_code == 200
        assert (turns.num_bytes, turns.num_waiting) == (len(content), 2)
        first.sendall(content[BEGUN:])
        assert [one.recv(12) for one in (first, second, third)] == [b"HTTP/1.1 200"] * 3
        server.wait_until(lambda: turns.num_bytes == 0)


def test_bodies_that_are_only_announced_take_nothing() -> None:
    """Neither turns nor room in the queue, however many there are."""
    config = msgspec.structs.replace(CONFIG, limits=Limits(max_encoding_bytes=1, max_queued_requests=4))
    content = encoded({"prompt": "say:ok", "user": "x" * 200_000})
    with frontend(config=config) as server, server.http() as http, contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(announce(server, 8 << 20, b""))
        assert http.post(TEXT, json={"prompt": "say:ok"}).status_code == 200
        assert http.post(TEXT, content=content, headers={"content-type": "application/json"}).status_code == 200
        turns = server.app.context.turns
        assert (turns.num_bytes, turns.num_waiting) == (0, 0)


def test_a_silent_body_loses_the_turn_that_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.server.core.request.STALLED_S", 0.1)
    config = msgspec.structs.replace(CONFIG, limits=Limits(max_encoding_bytes=1))
    content = encoded({"prompt": "say:ok", "user": "x" * 200_000})
    with frontend(config=config) as server, contextlib.ExitStack() as stack:
        silent = stack.enter_context(announce(server, len(content), content[:BEGUN]))
        server.wait_until(lambda: server.app.context.turns.num_bytes == 1)
        second = stack.enter_context(announce(server, len(content), content))
        assert second.recv(12) == b"HTTP/1.1 200"
        assert silent.recv(12) == b"HTTP/1.1 408"


def test_a_client_that_leaves_gives_its_turn_to_the_next() -> None:
    config = msgspec.structs.replace(CONFIG, limits=Limits(max_encoding_bytes=1))  # one at a time
    content = encoded({"prompt": "say:ok", "user": "x" * 200_000})
    with frontend(config=config) as server, contextlib.ExitStack() as stack:
        turns = server.app.context.turns
        first = stack.enter_context(announce(server, len(content), content[:BEGUN]))
        server.wait_until(lambda: turns.num_bytes == 1)
        second = stack.enter_context(announce(server, len(content), content))
        server.wait_until(lambda: turns.num_waiting == 1)
        first.close()
        assert second.recv(12) == b"HTTP/1.1 200"


def test_who_sends_slowly_does_not_keep_a_turn_that_others_want() -> None:
    """A pause of the machine may end the second, too, where the limit is short."""
    assert any(b"200" in second_beside_a_slow_one(limit_s) for limit_s in (0.2, 2.0, 10.0))


def second_beside_a_slow_one(limit_s: float) -> bytes:
    config = msgspec.structs.replace(CONFIG, limits=Limits(max_encoding_bytes=1, slow_client_timeout=limit_s))
    content = encoded({"prompt": "say:ok", "user": "x" * 200_000})
    with frontend(config=config) as server, contextlib.ExitStack() as stack:
        turns = server.app.context.turns
        slow = stack.enter_context(announce(server, len(content), content[:BEGUN]))
        server.wait_until(lambda: turns.num_bytes == 1 or not server.connections)
        second = stack.enter_context(announce(server, len(content), content))
        second.setblocking(False)
        answered = b""
        at = BEGUN
        while not answered:
            with contextlib.suppress(BlockingIOError):
                answered = second.recv(12) or b"closed"
            with contextlib.suppress(ConnectionError):  # it is refused with 408, and its connection closed
                slow.sendall(content[at : at + 1])  # never silent for long
            at += 1
            assert at < len(content)
            server.wait_until(lambda: True)
        return answered


def test_a_body_of_unknown_length_takes_a_turn_when_it_is_large() -> None:
    config = msgspec.structs.replace(CONFIG, limits=Limits(max_encoding_bytes=10**9))
    content = encoded({"prompt": "say:ok", "user": "x" * (2 * SMALL_BYTES)})
    head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with frontend(config=config) as server, contextlib.ExitStack() as stack:
        turns = server.app.context.turns
        part = content[:-5]
        client = stack.enter_context(server.connect(head.encode() + f"{len(part):x}\r\n".encode() + part + b"\r\n"))
        server.wait_until(lambda: turns.num_bytes == config.limits.max_body_bytes)
        client.sendall(b"5\r\n" + content[-5:] + b"\r\n0\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 200"
        server.wait_until(lambda: turns.num_bytes == 0)


def test_a_running_answer_holds_no_turn() -> None:
    content = encoded({"prompt": "hang:x", "user": "x" * 200_000})
    with frontend() as server, announce(server, len(content), content):
        server.engine.wait_for_request("hang:x")
        assert server.app.context.turns.num_bytes == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=20))
def test_turns_are_in_order_and_never_too_many(asked: list[tuple[int, bool]]) -> None:
    """Whoever is cancelled, waiting or in the moment in which its turn comes, leaves nothing behind."""

    async def run() -> None:
        turns, order = Turns(10, lambda _: None), list[int]()

        async def one(index: int, size: int) -> None:
            held = await turns.take(size)
            try:
                order.append(index)
                assert turns.num_bytes <= 10
                await asyncio.sleep(0)
            finally:
                turns.give(held)

        tasks = [asyncio.create_task(one(i, size)) for i, (size, _) in enumerate(asked)]
        await asyncio.sleep(0)
        for task, (_, leaves) in zip(tasks, asked, strict=True):
            if leaves and not task.done() and turns.num_waiting:
                task.cancel()
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == sorted(order) and (turns.num_waiting, turns.num_bytes) == (0, 0)

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------------------- values


def num_values(data: Any) -> tuple[int, int]:
    """Values within others, keys too; lists, objects and keys."""
    if isinstance(data, dict):
        inner = [num_values(one) for one in data.values()]
        marks, keys = 1 + max(0, 2 * len(data) - 1), len(data)
    elif isinstance(data, list):
        inner = [num_values(one) for one in data]
        marks, keys = 1 + max(0, len(data) - 1), 0
    else:
        return 0, 0
    return marks + sum(one[0] for one in inner), 1 + keys + sum(one[1] for one in inner)


JSON = st.recursive(
    st.one_of(st.integers(), st.text(alphabet='\\"[]{},:a\U0001f600', max_size=12), st.none()),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='\\",:[', max_size=4), inner, max_size=4)
    ),
    max_leaves=30,
)


def shape_bounds(values: int, containers: int) -> Bounds:
    return Bounds(max_values=values, more_values=0, max_containers=containers)


@settings(max_examples=300, deadline=None)
@given(data=JSON, stretch=st.integers(2, 40), indent=st.sampled_from([None, 1]))
def test_values_are_counted_outside_of_texts(data: Any, stretch: int, indent: int | None) -> None:
    body = json.dumps({"prompt": data}, indent=indent, ensure_ascii=False).encode()
    values, containers = num_values({"prompt": data})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_request, "STRETCH", stretch)
        patch.setattr(server_request, "BOUNDS", shape_bounds(values, containers))
        check_shape(body, 0)
        patch.setattr(server_request, "BOUNDS", shape_bounds(values - 1, containers))
        with pytest.raises(ApiError, match="values in the body so far"):
            check_shape(body, 0)
        patch.setattr(server_request, "BOUNDS", shape_bounds(values, containers - 1))
        with pytest.raises(ApiError, match="lists, objects and fields"):
            check_shape(body, 0)


@settings(max_examples=300, deadline=None)
@given(data=st.dictionaries(st.text(alphabet='\\",:[{a', max_size=6), JSON, max_size=4), stretch=st.integers(2, 40))
def test_a_body_of_too_many_values_names_the_field_that_is_open(data: dict[str, Any], stretch: int) -> None:
    """However its texts are cut, and whatever stands in them."""
    body = encoded({**data, "last": [[], {"a": "b"}, []]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_request, "STRETCH", stretch)
        containers = num_values({**data, "last": [[], {"a": "b"}]})[1]
        patch.setattr(server_request, "BOUNDS", shape_bounds(1 << 19, containers))
        with pytest.raises(ApiError, match=r"^last: must have at most"):
            check_shape(body, 0)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(2, 9))
def test_what_is_not_json_is_left_to_the_parser(body: bytes, stretch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_request, "STRETCH", stretch)
        check_shape(body, 0)


def test_quotes_in_a_text_are_not_searched_again_from_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON in a prompt. The interpreter stands still meanwhile."""

    def took(stretch: int) -> float:
        monkeypatch.setattr(server_request, "STRETCH", stretch)
        body = encoded({"prompt": '"' * stretch})  # as long as two of them
        began = time.thread_time()
        check_shape(body, MAX_SEQ_LEN)
        return time.thread_time() - began

    few, many = (min(took(stretch) for _ in range(3)) for stretch in (1 << 10, 1 << 14))
    assert many < 64 * few  # 16 times as much; it would be 256 times


def test_a_body_of_too_many_values_is_not_parsed_whole(server: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what comes before the limit, for the field's name."""
    sizes: list[int] = []
    parse = pydantic_core.from_json
    monkeypatch.setattr(pydantic_core, "from_json", lambda data, **more: sizes.append(len(data)) or parse(data, **more))
    content = encoded({"user": "a, b" * 1000, "prompt": [[]] * (4 << 17)})
    answer = httpx.post(
        server.url + TEXT, content=content, headers={"content-type": "application/json"}, timeout=WAIT_S
    )
    error = check_error(answer, 400)
    assert (error["param"], error["code"]) == ("prompt", "too_many_values") and str(1 << 16) in error["message"]
    assert max(sizes) < len(content) / 2


def test_what_is_made_of_all_of_a_large_body_is_made_off_the_event_loop(
    server: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[tuple[str, int]] = []
    for module in (messages_endpoint, responses_endpoint):

        def noted(*given: Any, to_chat: Any = module.to_chat, name: str = module.__name__) -> Any:
            where.append((name.split(".")[3], threading.get_ident()))
            return to_chat(*given)

        monkeypatch.setattr(module, "to_chat", noted)
    loop = server.on_loop(threading.get_ident)
    for size in (10, SMALL_BYTES):
        user = {"role": "user", "content": "say:" + "x " * (size // 2)}
        # the gateway leaves to the Python server what goes on with an answer, and log probabilities of responses
        asked = {"max_tokens": 4, "messages": [user, {"role": "assistant", "content": "x"}]}
        httpx.post(f"{server.url}/v1/messages", json=asked, timeout=WAIT_S)
        with_logprobs = {"input": [user], "include": ["message.output_text.logprobs"]}
        httpx.post(f"{server.url}/v1/responses", json=with_logprobs, timeout=WAIT_S)
    assert [(name, thread == loop) for name, thread in where] == [
        ("anthropic", True),
        ("responses", True),
        ("anthropic", False),
        ("responses", False),
    ]


def test_a_prompt_of_as_many_ids_as_the_context_is_let_through() -> None:
    body = encoded({"prompt": [7] * 600_000})
    check_shape(body, 600_000)
    with pytest.raises(ApiError):
        check_shape(body, MAX_SEQ_LEN)


def test_no_more_of_an_answer_is_kept_than_is_logged() -> None:
    found = HttpRequest("POST", TEXT, "id", output="")
    for _ in range(MAX_LOGGED_CHARS):
        found.add_output("ab")
    assert found.output == "ab" * (MAX_LOGGED_CHARS // 2)
    silent = HttpRequest("POST", TEXT, "id")
    silent.add_output("ab")
    assert silent.output is None
