"""What breaks around the gateway, and within one of its requests, stays there."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from types import ModuleType

import httpx
import msgspec
import pytest

from minisgl.config import Limits
from minisgl.message import AbortRequest
from minisgl.metrics.gateway import shown
from minisgl.step import FinishReason
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.echo import echo_json
from tests.helpers.answers import Answer, Client
from tests.helpers.bodies import CHAT, COMPLETION
from tests.helpers.e2e import ServerProcess, until
from tests.helpers.gateway import has_gateway
from tests.helpers.http_requests import Request, framed
from tests.helpers.scripted_engine import one_token
from tests.helpers.server import (
    CONFIG,
    WAIT_S,
    Frontend,
    chat_body,
    check_error,
    events,
    frontend,
    read_all,
    read_until,
    until_in_time,
)

pytestmark = pytest.mark.skipif(not has_gateway(), reason="the extension has no gateway")
HEAD = (("Host", "localhost"), ("Content-Type", "application/json"))
PASSED_ON = {"echo": True}  # the gateway is not sure of it


def post(prompt: str, *headers: tuple[str, str], **fields: object) -> Request:
    body = json.dumps({"prompt": prompt, **fields}).encode()
    return Request("POST", COMPLETION, (*framed(HEAD, body), *headers), body)


def text_of(answer: Answer | None) -> str:
    assert answer is not None and answer.status == 200, answer
    if answer.header("content-type").startswith("text/event-stream"):
        return "".join(one["choices"][0]["text"] for one in events(answer.body.decode())[:-1])
    found: str = json.loads(answer.body)["choices"][0]["text"]
    return found


@pytest.fixture
def server() -> Iterator[Frontend]:
    with frontend(front_end="rust") as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)


def counts(server: Frontend) -> tuple[int, int]:
    assert server.gateway is not None
    found = shown(server.gateway.readings())
    return found["answered"], found["passed_on"]


def test_responses_are_counted_by_the_answering_server(server: Frontend) -> None:
    client = Client(server.address)
    assert text_of(client.ask(post("say:a"))) == "a"
    server.wait_until(lambda: counts(server) == (1, 0))
    assert text_of(client.ask(post("say:b", **PASSED_ON))) == "say:bb"
    server.wait_until(lambda: counts(server) == (1, 1))
    client.close()


def test_pipelined_requests_of_both_kinds_are_answered_in_order(server: Frontend) -> None:
    wanted = [
        post(f"say:{i}", **{**({"stream": True} if i % 3 == 0 else {}), **(PASSED_ON if i % 2 else {})})
        for i in range(9)
    ]
    client = Client(server.address)
    for one in wanted:
        client.send(one)
    answers = [text_of(client.receive(one)) for one in wanted]
    assert answers == [f"say:{i}{i}" if i % 2 else f"{i}" for i in range(9)]
    client.close()


def test_gateway_serves_while_the_python_server_restarts(server: Frontend, caplog: pytest.LogCaptureFixture) -> None:
    """What the gateway answers itself goes on meanwhile; what it passes on is answered then."""
    stream, other = Client(server.address), Client(server.address)
    with server.connect(post("lives hang:abc", stream=True).raw()):
        request = server.engine.wait_for_request("lives ")
        for _ in range(2):
            python = server.http_server.server
            server.on_loop(lambda python=python: setattr(python, "should_exit", True))  # type: ignore[misc]
            assert text_of(other.ask(post("say:on"))) == "on"
            server.wait_until(lambda python=python: server.http_server.server is not python)  # type: ignore[misc]
            assert text_of(stream.ask(post("say:again", **PASSED_ON))) == "say:againagain"
            assert server.num_live == 1
    server.engine.wait_for_end(AbortRequest, {request.req_id})
    stream.close()
    other.close()


def test_an_event_loop_that_stands_still_stops_no_stream(server: Frontend) -> None:
    """What is prepared goes on and ends, what is not waits for it; the process is alive."""
    client = Client(server.address)
    with server.connect(post("lives hang:a", stream=True, max_tokens=2).raw()) as stream:
        request = server.engine.wait_for_request("lives ")
        read_until(stream, b'"text":"a"')
        with server.standing_still():
            client.send(post("say:on"))
            server.engine.send(one_token(request.req_id, ord("b"), FinishReason.LENGTH))
            assert b'"text":"b"' in read_until(stream, b"[DONE]")
            with server.http() as http:
                assert http.get("/livez").status_code == 200
        assert text_of(client.receive(post("say:on"))) == "on"
    client.close()


def test_a_request_not_prepared_in_time_returns_504() -> None:
    config = msgspec.structs.replace(CONFIG, limits=Limits(request_timeout=1.0))
    with frontend(config=config, front_end="rust") as server, server.http() as http:
        with server.standing_still():
            answer = http.post(COMPLETION, json={"prompt": "say:late"}, headers={"x-request-id": "late-1"})
            assert check_error(answer, 504)["code"] == "request_timeout"
            assert answer.headers["x-request-id"] == "late-1"
        answer = until_in_time(lambda: http.post(COMPLETION, json={"prompt": "say:on"}), lambda one: one.is_success)
        assert answer.json()["choices"][0]["text"] == "on"


def test_schemas_that_are_nested_too_deeply_are_refused(front_end: str) -> None:
    """Else no call could be told from text."""
    schema: dict[str, object] = {"type": "string"}
    for _ in range(70):
        schema = {"type": "object", "properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "get", "parameters": schema}}]
    with frontend(front_end=front_end, engine="cpu", max_seq_len=4096) as server, server.http() as http:
        answer = http.post(CHAT, json=chat_body("say:a", tools=tools))
        assert "nested too deeply" in check_error(answer, 400)["message"]


def test_a_disconnect_before_preparation_frees_the_capacity(server: Frontend) -> None:
    gateway = server.gateway
    assert gateway is not None
    with server.standing_still():
        for number in range(3):
            with server.connect(post(f"say:gone {number}").raw()):
                until(lambda: gateway.num_open == 1, "nobody asks")
            until(lambda: gateway.num_open == 0, "who has left is still asked for")
    client = Client(server.address)
    assert text_of(client.ask(post("say:on"))) == "on"
    client.close()
    until(lambda: (gateway.waiting(), gateway.num_open) == ((0, 0, 0), 0), "room is kept for nobody")


def test_a_disconnect_during_preparation_releases_the_turn(server: Frontend) -> None:
    turns = server.app.context.turns
    held = server.awaited(turns.take(2**62))  # every turn there is
    with server.connect(post("x" * 100_000).raw()):
        until(lambda: turns.num_waiting == 1, "its body waits for no turn")
    until(lambda: turns.num_waiting == 0, "who has left waits for his turn")
    server.on_loop(lambda: turns.give(held))


def test_clients_with_incomplete_headers_block_no_other() -> None:
    config = msgspec.structs.replace(CONFIG, limits=Limits(slow_client_timeout=1.0))
    with frontend(config=config, front_end="rust") as server, contextlib.ExitStack() as stack:
        halves = (post("say:never").raw()[: 10 + i % 80] for i in range(200))
        idle = [stack.enter_context(server.connect(one)) for one in halves]
        client = Client(server.address)
        assert text_of(until_in_time(lambda: client.ask(post("say:on")), lambda one: one is not None)) == "on"
        client.close()
        for one in idle:
            read_all(one, or_reset=True)  # 408, or nothing: then it is closed
        assert not server.engine.requests("never")


@pytest.fixture
def panicking_server(panicking: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Frontend]:
    """A request whose id begins with "panic-" panics in its gateway."""
    monkeypatch.setattr("minisgl.server.gateway.gateway_class", lambda: panicking.Gateway)
    tokenizer = Tokenizer.echo()
    tokenizer.text = panicking.TextTokenizer(text=echo_json())  # the module's own
    with frontend(front_end="rust", tokenizer=tokenizer) as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)


@pytest.mark.timeout(900)  # the extension may have to be built
@pytest.mark.parametrize("stream", [False, True])
def test_a_panic_is_an_error_of_its_own_request(panicking_server: Frontend, stream: bool) -> None:
    server = panicking_server
    with server.connect(post("lives hang:abc", stream=True).raw()):
        server.engine.wait_for_request("lives ")
        with server.http() as http:
            answer = http.post(
                COMPLETION, json={"prompt": "say:a", "stream": stream}, headers={"x-request-id": "panic-1"}
            )
            assert check_error(answer, 500)["code"] == "internal_error"
            assert http.post(COMPLETION, json={"prompt": "say:on"}).json()["choices"][0]["text"] == "on"
        server.wait_until(lambda: server.num_live == 1)


# ------------------------------------------------------------------------------------------------------ whole servers

ENDLESS = {"stream": True, "max_tokens": 8000, "ignore_eos": True}
ECHO = ("--engine", "echo", "--frontend", "rust")


@pytest.mark.slow
def test_a_prompt_of_4_mb_does_not_stall_255_streams() -> None:
    """It is refused or answered, and no stream stands still meanwhile."""
    with ServerProcess(
        (*ECHO, "--max-running-requests", "256", "--max-seq-len", "8192", "--num-pages", "150000")
    ) as server:
        url = httpx.URL(server.url)
        assert url.port is not None
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(socket.create_connection((url.host, url.port), WAIT_S)) for _ in range(255)]
            for i, one in enumerate(streams):
                one.sendall(post(f"{i}", **ENDLESS).raw())
            for one in streams:
                assert one.recv(65536)
            answer = httpx.post(server.url + COMPLETION, json={"prompt": "ab " * (4 * 2**20 // 3)}, timeout=WAIT_S)
            assert check_error(answer, 400)["code"] == "context_length_exceeded"
            for one in streams:
                assert one.recv(65536), "a stream has ended"
        until(lambda: httpx.get(server.url + "/health").json()["requests_open"] == 0, "streams of nobody are left")
        assert server.stop() == 0
