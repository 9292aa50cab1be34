"""What the frontend refuses, and how: queue, times, sizes, keys, slow clients. Real sockets, a scripted engine."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import openai
import pytest

from minisgl.config import Limits, ServerConfig
from minisgl.message import AbortRequest
from minisgl.server.routes import POSTS, ROUTES
from minisgl.tokenizer import Tokenizer
from tests.helpers.server import (
    CONFIG,
    MODEL,
    WAIT_S,
    chat_body,
    check_error,
    events,
    frontend,
    hanging,
    read_all,
    until_in_time,
)

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def configured(**limits: Any) -> ServerConfig:
    return msgspec.structs.replace(CONFIG, limits=Limits(**limits))


# ------------------------------------------------------------------------------------------------------------- queue


def test_a_full_queue_is_429_before_any_work(front_end: str) -> None:
    with frontend(config=configured(max_queued_requests=2), front_end=front_end) as server, server.http() as http:
        with hanging(server, "first "):
            with hanging(server, "second "):
                for path, body in ((TEXT, {"prompt": "third"}), (CHAT, chat_body("third")), (TEXT, {"prompt": 5})):
                    answer = http.post(path, json=body)
                    error = check_error(answer, 429)
                    assert error["code"] == "queue_full" and "2 requests are queued" in error["message"]
                    assert int(answer.headers["retry-after"]) >= 1
                assert http.get("/livez").status_code == http.get("/readyz").status_code == 200
                assert http.get("/health").json()["requests_queued"] == 2
            server.wait_until(lambda: server.waiting[0] == 1)
            assert http.post(TEXT, json={"prompt": "say:ok"}).json()["choices"][0]["text"] == "ok"
            # two more do not fit beside the one that waits
            assert check_error(http.post(TEXT, json={"prompt": "many say:ok", "n": 2}), 429)["code"] == "queue_full"
        server.wait_until(lambda: server.waiting[0] == 0)
        assert len(http.post(TEXT, json={"prompt": "many say:ok", "n": 3}).json()["choices"]) == 3  # alone they do
        assert not server.engine.requests("third")


def test_a_queue_is_full_by_tokens_too(front_end: str) -> None:
    with frontend(config=configured(max_queued_tokens=40), front_end=front_end) as server, server.http() as http:
        with hanging(server, "first ", max_tokens=1):
            error = check_error(http.post(TEXT, json={"prompt": "second " + "x" * 40}), 429)
            assert error["code"] == "queue_full" and "tokens" in error["message"]
            assert http.post(TEXT, json={"prompt": "say:ok"}).status_code == 200
        assert not server.engine.requests("second ")


def test_the_count_of_waiting_survives_every_way_to_end(front_end: str) -> None:
    with frontend(front_end=front_end) as server, server.http() as http:
        for prompt in ("say:a", "fail:", "fail:b", "burst:c"):
            http.post(TEXT, json={"prompt": prompt, "n": 3})
        http.post(TEXT, json={"prompt": "say:abcdef", "stop": "c"})
        with hanging(server, "gone "):
            server.wait_until(lambda: server.waiting == (1, 11))
        server.wait_until(lambda: server.num_live == 0)
        server.wait_until(lambda: server.waiting == (0, 0))


# ------------------------------------------------------------------------------------------------------------- times


def test_request_over_the_timeout_is_504(front_end: str) -> None:
    with frontend(config=configured(request_timeout=1.0), front_end=front_end) as server, server.http() as http:
        error = check_error(http.post(TEXT, json={"prompt": "late hang:abc", "n": 2}), 504)
        assert error["code"] == "request_timeout" and "--request-timeout" in error["message"]
        late = chat_body("late hang:abc", stream=True)
        answer = until_in_time(lambda: http.post(CHAT, json=late), lambda one: '"c"' in one.text)
        *pieces, last, done = events(answer.text)
        assert answer.status_code == 200 and done == "[DONE]" and last["error"]["code"] == "request_timeout"
        assert "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces) == "abc"
        server.engine.wait_for_end(AbortRequest, {one.req_id for one in server.engine.requests("late ")})
        assert answer_in_time(http).json()["choices"][0]["text"] == "ok"


def answer_in_time(http: httpx.Client) -> httpx.Response:
    return until_in_time(lambda: http.post(TEXT, json={"prompt": "say:ok"}), lambda one: one.status_code == 200)


def test_body_that_never_arrives_is_408(front_end: str) -> None:
    with frontend(config=configured(slow_client_timeout=1.0), front_end=front_end) as server:
        head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n"

        def ask() -> bytes:
            with server.connect(head.encode() + b"{") as client:
                return read_all(client, or_reset=True)

        # a pause may use up the time for the head: then the connection closes
        assert b"body_timeout" in until_in_time(ask, lambda found: found.startswith(b"HTTP/1.1 408 "))
    errors = {route.path: set(route.errors) for route in ROUTES if route.method == "post"}
    for path in POSTS:  # all of them read bodies under the same limits
        assert {408, 413, 429, 504} <= errors[path]


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nhost:"])
def test_headers_that_never_arrive_close_the_connection(front_end: str, sent: bytes) -> None:
    config = configured(slow_client_timeout=1.0)
    with frontend(config=config, front_end=front_end) as server, server.connect(sent) as client:
        assert read_all(client, or_reset=True) == b""


def test_client_that_stops_reading_a_stream_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """6 MB of stream for a client that reads none of it: its requests end, others are served meanwhile."""
    with (
        caplog.at_level(logging.WARNING, "minisgl.server"),
        frontend(config=configured(slow_client_timeout=1.0)) as server,
        server.http() as http,
    ):
        body = json.dumps({"prompt": "slow fill:", "n": 64, "stream": True, "max_tokens": 500, "logprobs": 0}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(server.address)
            head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\nx-request-id: slowpoke\r\n"
            head += f"content-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            server.engine.wait_for_request("slow ")
            assert answer_in_time(http).json()["choices"][0]["text"] == "ok"
            server.wait_until(lambda: server.num_live == 0)
        ids = {one.req_id for one in server.engine.requests("slow ")}
        assert len(ids) == 64
        server.engine.wait_for_end(AbortRequest, ids)
        server.wait_until(lambda: any("slowpoke: dropped" in record.getMessage() for record in caplog.records))


def test_client_that_reads_no_response_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """Answers that are whole, for a client that reads none: the connection goes, with those that wait on it."""
    with (
        caplog.at_level(logging.WARNING, "minisgl.server"),
        frontend(config=configured(slow_client_timeout=1.0)) as server,
    ):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(server.address)
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 400)
            server.wait_until(
                lambda: any(
                    ": dropped: its client has read nothing" in record.getMessage() for record in caplog.records
                )
            )
            client.settimeout(WAIT_S)
            assert read_all(client, or_reset=True).count(b"HTTP/1.1 200") < 400
        with server.http() as http:
            assert answer_in_time(http).status_code == 200


def test_a_prompt_that_waits_for_the_tokenizer_counts_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends in time, or with its client; and it is never submitted."""
    busy = threading.Event()
    encode = Tokenizer.encode_batch

    def slow(self: Tokenizer, texts: Any, *args: Any, **kwargs: Any) -> Any:
        if "slow" in texts[0]:
            busy.wait(WAIT_S)
        return encode(self, texts, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode_batch", slow)
    with frontend(config=configured(request_timeout=1.0)) as server, server.http() as http:
        for body in ({"prompt": "slow"}, {"prompt": "slow", "stream": True}):
            assert check_error(http.post(TEXT, json=body), 504)["code"] == "request_timeout"
        busy.set()
        assert answer_in_time(http).status_code == 200
        assert not server.engine.requests("slow")
    busy.clear()
    with frontend() as server, server.http() as http:
        with server.send(TEXT, {"prompt": "slow"}):
            server.wait_until(lambda: server.app.context.queue.num_requests == 1)
        server.wait_until(lambda: server.app.context.queue.num_requests == 0)
        busy.set()
        assert http.post(TEXT, json={"prompt": "say:ok"}).status_code == 200
        assert not server.engine.requests("slow")


def test_a_late_stream_frees_the_engine_though_its_client_does_not_read() -> None:
    config = configured(request_timeout=1.0, slow_client_timeout=WAIT_S)
    with frontend(config=config) as server, socket.socket() as client:
        body = json.dumps({"prompt": "late fill:", "n": 64, "stream": True, "max_tokens": 500, "logprobs": 0}).encode()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.address)
        client.sendall(
            f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
        server.engine.wait_for_request("late ")
        server.engine.wait_for_end(AbortRequest, {one.req_id for one in server.engine.requests("late ")})
        server.wait_until(lambda: server.num_live == 0)


# ------------------------------------------------------------------------------------------------------------- sizes


def test_sizes_are_limited() -> None:
    with frontend(config=configured(max_body_bytes=100_000)) as server, server.http() as http:
        assert check_error(http.post(TEXT, content=b"x" * 100_001), 413)["code"] == "body_too_large"
        messages = [{"role": "user", "content": "a"}] * 4097
        for body in (
            {"messages": messages[:2000], "pad": "x" * 40_000},  # 2,000 messages are a prompt that is too long
            {"messages": [{"role": "user", "content": ""}] * 2500, "stop": "y" * 5000},
        ):
            assert http.post(CHAT, json=body).status_code in (400, 413)
        error = check_error(http.post(TEXT, json={"prompt": "a", "stop": ["b", "y" * 5000]}), 400)
        assert error["param"] == "stop" and "4096" in error["message"]
        error = check_error(http.post(TEXT, json={"prompt": ["a"] * 257}), 400)
        assert error["param"] == "prompt" and "256" in error["message"]
    with frontend() as server, server.http() as http:
        error = check_error(http.post(CHAT, json={"messages": messages}), 400)
        assert error["param"] == "messages" and "4096" in error["message"]


LARGE = "word " * 800_000  # 4 MB


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": LARGE}),
        (CHAT, chat_body(LARGE)),
        (CHAT, {"messages": [{"role": "user", "content": LARGE[:1000]}] * 4000}),
        ("/tokenize", {"prompt": LARGE}),  # it counts what is too long
    ],
    ids=["text", "chat", "messages", "tokenize"],
)
def test_a_large_prompt_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """They are answered while it is looked at, however long that takes."""
    begun, others_are_done = threading.Event(), threading.Event()
    encode = Tokenizer.encode

    def held(self: Tokenizer, text: str, *args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert others_are_done.wait(WAIT_S)
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", held)
    data = json.dumps(body).encode()
    with frontend() as server, server.http() as http, ThreadPoolExecutor(1) as pool:
        large = pool.submit(httpx.post, server.url + path, content=data, timeout=WAIT_S)
        assert begun.wait(WAIT_S)
        for _ in range(3):
            assert http.post(TEXT, json={"prompt": "say:ok"}).json()["choices"][0]["text"] == "ok"
        others_are_done.set()
        if path == "/tokenize":
            assert large.result().status_code == 200
        else:
            assert check_error(large.result(), 400)["code"] == "context_length_exceeded"


# ----------------------------------------------------------------------------------------------- keys, ids, page rules


def test_the_api_key() -> None:
    config = msgspec.structs.replace(CONFIG, api_key="open sesame")
    with frontend(config=config) as server, server.http() as http:
        for path in ("/livez", "/readyz"):
            assert http.get(path).status_code == 200
        for path in ("/health", "/metrics", "/v1/models", "/version", "/docs", "/openapi.json", "/nowhere"):
            answer = http.get(path)
            assert check_error(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for given in ("Bearer wrong", "Bearer", "open sesame", "Basic open sesame", "Bearer open sesam\u00e9"):
            headers = {"authorization": given.encode("latin-1")}
            assert check_error(http.post(TEXT, json={"prompt": "no"}, headers=headers), 401)
        assert not server.engine.requests("no")
        with openai.OpenAI(base_url=server.url + "/v1", api_key="open sesame", max_retries=0) as client:
            assert client.completions.create(model=MODEL, prompt="say:yes").choices[0].text == "yes"


def test_request_ids(front_end: str) -> None:
    with frontend(front_end=front_end) as server, server.http() as http:
        assert http.get("/livez", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        made = {http.get("/livez").headers["x-request-id"] for _ in range(5)}
        assert len(made) == 5 and all(one.startswith("req-") for one in made)
        for bad in ("a b", "x" * 129, 'q"', "\u00e9"):
            got = http.get("/livez", headers={"x-request-id": bad.encode("latin-1")}).headers["x-request-id"]
            assert got.startswith("req-")
        answers = [
            http.post(TEXT, json={}),
            *(http.post(TEXT, json={"prompt": "say:a", "stream": True}) for _ in range(5)),
        ]
        made = {answer.headers["x-request-id"] for answer in answers}
        assert len(made) == 6 and all(re.fullmatch("req-[0-9a-f]{24}", one) for one in made), made


def test_access_lines(caplog: pytest.LogCaptureFixture) -> None:
    """One line a request, with counts and times and no word of the prompt or the answer."""
    with caplog.at_level(logging.INFO, "minisgl.access"), frontend() as server, server.http() as http:
        http.post(TEXT, json={"prompt": "secret say:hush", "n": 2}, headers={"x-request-id": "one"})
        http.post(CHAT, json=chat_body("secret say:hush", stream=True), headers={"x-request-id": "two"})
        http.post(TEXT, json={"prompt": 5}, headers={"x-request-id": "three"})
        with hanging(server, "gone secret "):
            pass
        server.wait_until(lambda: len(lines(caplog)) == 4)
    found = {line["request_id"]: line for line in lines(caplog)}
    one = found["one"]
    assert (one["method"], one["path"], one["status"], one["finish_reason"]) == ("POST", TEXT, 200, "stop")
    assert (one["prompt_tokens"], one["generated_tokens"]) == (2 * 15, 2 * 5) and one["cached_tokens"] > 0
    assert 0 < one["ttft_s"] <= one["e2e_s"]
    assert found["two"]["status"] == 200 and found["two"]["generated_tokens"] == 5
    assert found["three"]["status"] == 400 and found["three"]["error"] == "invalid_value"
    gone = next(line for line in found.values() if line["request_id"].startswith("req-"))
    assert gone["status"] == "gone" and gone["finish_reason"] == "abort"
    assert "secret" not in str(found) and "hush" not in str(found)


@pytest.mark.parametrize("wanted", [False, True])
def test_probes_get_access_lines_only_if_asked_for(caplog: pytest.LogCaptureFixture, wanted: bool) -> None:
    config = msgspec.structs.replace(CONFIG, access_log_probes=wanted)
    probes = ["/livez", "/readyz", "/health", "/metrics", "/livez/", "/web/js/main.js"]
    with caplog.at_level(logging.INFO, "minisgl.access"), frontend(config=config) as server, server.http() as http:
        for path in (*probes, "/v1/models"):
            assert http.get(path).status_code == 200
        server.wait_until(lambda: bool(lines(caplog)) and lines(caplog)[-1]["path"] == "/v1/models")
    assert [line["path"] for line in lines(caplog)] == (probes if wanted else []) + ["/v1/models"]


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == "minisgl.access"]  # type: ignore[attr-defined]


def test_prompts_and_answers_are_logged_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    config = msgspec.structs.replace(CONFIG, log_prompts=True)
    with caplog.at_level(logging.INFO, "minisgl.access"), frontend(config=config) as server, server.http() as http:
        http.post(TEXT, json={"prompt": "secret say:hush"})
        server.wait_until(lambda: len(lines(caplog)) == 1)
    assert "secret" in lines(caplog)[0]["prompt"] and lines(caplog)[0]["output"] == "hush"


MANY = 200_000
PARTS = [{"type": "text", "text": "a"}] * 5000


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (TEXT, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(MANY)}}, "logit_bias"),
        (TEXT, {"prompt": "a", "stop": ["b"] * MANY}, "stop"),
        (CHAT, {"messages": [{"role": "user", "content": PARTS}]}, "messages.0.content"),
    ],
    ids=["logit_bias", "stop", "parts"],
)
def test_too_many_values_give_a_short_error(path: str, body: dict[str, Any], field: str) -> None:
    with frontend() as server, server.http() as http:
        answer = http.post(path, json=body)
    assert check_error(answer, 400)["param"] == field and len(answer.content) < 400
