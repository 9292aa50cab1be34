"""A client that goes away: the engine is told at once, streaming or not, whatever the request waits for."""

from __future__ import annotations

import gc
import json
import socket
from typing import Any

import pytest

from minisgl.frontend.output_processor import RequestState
from minisgl.message import AbortRequest, FinishRequest
from minisgl.server.core.generation import Generation
from minisgl.server.core.request import HttpRequest
from minisgl.server.core.running import Running
from tests.helpers.server import Frontend, chat_body, failed_step, read_until

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def body_of(path: str, prompt: str, **more: object) -> dict[str, Any]:
    if path in (CHAT, MESSAGES):
        return chat_body(prompt, **({"max_tokens": 100} if path == MESSAGES else {}), **more)
    return {"input" if path == RESPONSES else "prompt": prompt, **more}


def check_nothing_lives(server: Frontend) -> None:
    server.wait_until(lambda: server.num_live == 0)


@pytest.mark.parametrize("path", [CHAT, TEXT, GENERATE, RESPONSES, MESSAGES])
@pytest.mark.parametrize("text", ["", "x"])  # gone before the first token, and after it
def test_disconnect_of_waiting_client_aborts_the_request(server: Frontend, path: str, text: str) -> None:
    marker = f"whole {path} hang:{text}"
    with server.send(path, body_of(path, marker)):
        request = server.engine.wait_for_request(marker)
        if text:
            server.wait_until(lambda: server.num_live == 1)
    server.engine.wait_for_end(AbortRequest, {request.req_id})
    check_nothing_lives(server)


@pytest.mark.parametrize("path", [CHAT, TEXT, GENERATE, RESPONSES, MESSAGES])
@pytest.mark.parametrize("text", ["", "xyz"])
def test_disconnect_of_streaming_client_aborts_the_request(server: Frontend, path: str, text: str) -> None:
    marker = f"stream {path} hang:{text}"
    with server.send(path, body_of(path, marker, stream=True)) as connection:
        request = server.engine.wait_for_request(marker)
        if text:
            read_until(connection, b"z")
    server.engine.wait_for_end(AbortRequest, {request.req_id})
    check_nothing_lives(server)


def test_reset_counts_as_disconnect(server: Frontend) -> None:
    connection = server.send(TEXT, body_of(TEXT, "reset hang:abc", stream=True))
    request = server.engine.wait_for_request("reset hang")
    read_until(connection, b'c"')
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # close with RST
    connection.close()
    server.engine.wait_for_end(AbortRequest, {request.req_id})


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_of_every_prompt_is_aborted(server: Frontend, stream: bool) -> None:
    marker = f"many {stream}"
    prompts = [f"{marker} {i} hang:a" for i in range(3)]
    with server.send(TEXT, {"prompt": prompts, "n": 4, "stream": stream}):
        server.engine.wait_for(lambda _: len(server.engine.requests(marker)) == 12)
    server.engine.wait_for_end(AbortRequest, {one.req_id for one in server.engine.requests(marker)})
    check_nothing_lives(server)


def test_only_what_still_runs_is_aborted(server: Frontend) -> None:
    with server.send(TEXT, {"prompt": ["half say:a", "half hang:b", "half hang:cSTOP"], "stop": "STOP"}):
        ended, hangs, stopped = server.engine.wait_for(
            lambda _: found if len(found := server.engine.requests("half ")) == 3 else None
        )
        server.engine.wait_for_end(FinishRequest, {stopped.req_id})
        server.wait_until(lambda: server.num_live == 1)
    server.engine.wait_for_end(AbortRequest, {hangs.req_id})
    aborted = [one.req_id for one in server.engine.received if isinstance(one, AbortRequest)]
    assert ended.req_id not in aborted and stopped.req_id not in aborted
    assert len(aborted) == len(set(aborted))


@pytest.mark.parametrize("stream", [False, True])
def test_one_failed_choice_ends_the_others(server: Frontend, stream: bool) -> None:
    marker = f"fails {stream}"
    with server.send(TEXT, {"prompt": [f"{marker} hang:a", f"{marker} hang:b"], "stream": stream}) as connection:
        first, second = server.engine.wait_for(
            lambda _: found if len(found := server.engine.requests(marker)) == 2 else None
        )
        server.engine.send(failed_step(first.req_id, "went wrong"))
        server.engine.wait_for_end(AbortRequest, {second.req_id})
        read_until(connection, b"went wrong")


@pytest.mark.python_front_end
def test_a_client_that_stops_reading_can_still_leave(server: Frontend) -> None:
    """Its socket is full and the server waits to write; the end of the connection must get through."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(server.address)
    content = json.dumps({"prompt": ["full fill:"] * 8, "n": 8, "max_tokens": 490, "stream": True}).encode()
    connection.sendall(
        b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (TEXT.encode(), len(content))
    )
    connection.sendall(content)
    server.engine.wait_for(lambda _: len(server.engine.requests("full fill")) == 64)
    # tokens heap up where they are few otherwise: the server is stuck in a write
    server.wait_until(lambda: sum(len(one.tokens) >= 50 for one in server.client.processor.live.values()) == 64)
    connection.close()
    server.engine.wait_for_end(AbortRequest, {one.req_id for one in server.engine.requests("full fill")})


def test_the_connection_survives_its_requests(server: Frontend) -> None:
    """Watching for a disconnect must not eat the next request of a connection that is kept alive."""
    with server.http() as http:
        for i in range(20):
            path = (CHAT, TEXT, GENERATE)[i % 3]
            answer = chr(0x4E00 + i)
            response = http.post(path, json=body_of(path, f"say:{answer}", stream=i % 2 == 0))
            assert response.status_code == 200 and answer in response.text
    check_nothing_lives(server)


@pytest.mark.python_front_end
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_with_pipelined_request_aborts_the_first(server: Frontend, stream: bool) -> None:
    """Pipelining: the first one is being answered, the second one waits for that."""
    marker = f"first {stream} hang:x"
    with server.send(TEXT, body_of(TEXT, marker, max_tokens=100, stream=stream)) as connection:
        request = server.engine.wait_for_request(marker)
        if stream:
            read_until(connection, b'"x"')
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        server.wait_until(lambda: any(one.pipeline for one in server.connections))
    server.engine.wait_for_end(AbortRequest, {request.req_id})
    check_nothing_lives(server)


def test_answers_need_no_garbage_collection(server: Frontend) -> None:
    """Cycles of every request would add up to pauses for all of them."""
    gc.collect()
    gc.disable()
    try:
        with server.http() as http:
            for path in (CHAT, TEXT, GENERATE):
                for stream in (False, True):
                    http.post(path, json=body_of(path, "say:abc", stream=stream))
        with server.send(TEXT, body_of(TEXT, "cycles hang:abc", stream=True)) as connection:
            read_until(connection, b'c"')
        check_nothing_lives(server)
        kinds = (Running, Generation, RequestState, HttpRequest)
        server.wait_until(lambda: not any(type(one) in kinds for one in gc.get_objects()))
    finally:
        gc.enable()
