"""A real server on the echo engine, talked to over sockets: exact texts, clean errors, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import openai
import psutil
import pytest

from minisgl.engine.echo import EchoModel
from minisgl.tokenizer import Tokenizer
from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.seconds import WAIT_S

POOL = ("--engine", "echo", "--num-pages", "96", "--page-size", "4", "--max-running-requests", "12")
LIMIT = 96 * 4 + 1


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[ServerProcess]:
    """A pool so small that the requests of a test evict and retract each other."""
    with serving(*POOL, "--frontend", front_end) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        yield client


def stats(http: httpx.Client) -> dict[str, int]:
    found: dict[str, int] = http.get("/health").json()["stats"]
    return found


def all_pages_back(http: httpx.Client) -> bool:
    now = stats(http)
    return (
        now["num_running"] + now["num_waiting"] == 0
        and now["num_free_pages"] + now["num_evictable_pages"] == now["num_pages"]
    )


def expected(prompt: str, seed: int, max_tokens: int, stop: tuple[str, ...] = ()) -> tuple[str, str]:
    """Text and finish reason of the prompt alone."""
    ids = Tokenizer.echo().encode(prompt).tolist()
    max_tokens = min(max_tokens, LIMIT - len(ids))
    out = EchoModel(seed=seed).generate(ids, max_tokens)
    ended = out[-1] == 256
    text = bytes(out[:-1] if ended else out).decode()
    cuts = [text.index(one) for one in stop if one in text]
    if cuts:
        return text[: min(cuts)], "stop"
    return text, "stop" if ended else "length"


def test_openai_client_streams_and_does_not(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused")
    assert [model.id for model in client.models.list()] == ["smollm2"]
    messages = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=30, seed=5)
    prompt = Tokenizer.echo().apply_chat_template(messages)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == expected(prompt, 5, 30)
    assert whole.usage is not None and whole.usage.prompt_tokens == len(prompt)
    stream = client.chat.completions.create(
        model="smollm2", messages=messages, max_tokens=30, seed=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    details = chunks[-1].usage.prompt_tokens_details
    assert details is not None and details.cached_tokens == (len(prompt) - 1) // 4 * 4  # all whole pages but the last


def test_completions_of_every_prompt_shape(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused")
    text = expected("abc", 1, 16)
    for prompt in ("abc", ["abc"], [97, 98, 99], [[97, 98, 99]]):
        choice = client.completions.create(model="smollm2", prompt=prompt, seed=1).choices[0]
        assert (choice.text, choice.finish_reason) == text
    both = client.completions.create(model="smollm2", prompt=["abc", "abd"], seed=1, n=2)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == text[0] and both.choices[2].text == expected("abd", 1, 16)[0]
    assert both.usage is not None and both.usage.prompt_tokens == 6


def test_generate_streams_json_lines(http: httpx.Client) -> None:
    body = {"prompt": "abc", "sampling_params": {"max_new_tokens": 20, "seed": 2}, "stream": True}
    with http.stream("POST", "/generate", json=body) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]
    text, reason = expected("abc", 2, 20)
    assert "".join(line["text_delta"] for line in lines[:-1]) == text
    assert lines[-1]["event"] == "done" and lines[-1]["finish_reason"] == reason


def test_stop_strings_cut_and_end(http: httpx.Client) -> None:
    stop = ("ta", "eo", "h ")
    found = set()
    for seed in range(12):
        body = {"prompt": "stop here", "max_tokens": 60, "seed": seed, "stop": list(stop)}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == expected("stop here", seed, 60, stop)
        found.add(choice["finish_reason"])
    assert "stop" in found
    until(lambda: all_pages_back(http), "a request ended by a stop string keeps pages")


BAD = [
    ("broken JSON", b"{", None),
    ("not an object", b"[1]", None),
    ("invalid UTF-8", b'{"prompt": "\xff"}', None),
    ("lone surrogate", b'{"prompt": "\\ud800"}', None),
    ("deep nesting", b"[" * 100_000, None),
    ("NaN", b'{"prompt": "a", "temperature": NaN}', "temperature"),
    ("no prompt", b"{}", "prompt"),
    ("empty prompt", b'{"prompt": ""}', "prompt"),
    ("no prompts", b'{"prompt": []}', "prompt"),
    ("mixed prompt", b'{"prompt": [[1, "a"]]}', "prompt.0.1"),
    ("id beyond the vocabulary", b'{"prompt": [258]}', "prompt"),
    ("temperature text", b'{"prompt": "a", "temperature": "hot"}', "temperature"),
    ("temperature bool", b'{"prompt": "a", "temperature": true}', "temperature"),
    ("temperature high", b'{"prompt": "a", "temperature": 2.5}', "temperature"),
    ("max_tokens negative", b'{"prompt": "a", "max_tokens": -2}', "max_tokens"),
    ("max_tokens huge", b'{"prompt": "a", "max_tokens": ' + b"9" * 30 + b"}", "max_tokens"),
    ("max_tokens fraction", b'{"prompt": "a", "max_tokens": 1.5}', "max_tokens"),
    ("top_p negative", b'{"prompt": "a", "top_p": -1}', "top_p"),
    ("n zero", b'{"prompt": "a", "n": 0}', "n"),
    ("many stops", b'{"prompt": "a", "stop": [' + b'"a",' * 64 + b'"a"]}', "stop"),
    ("empty stop", b'{"prompt": "a", "stop": ""}', "stop"),
    ("seed huge", b'{"prompt": "a", "seed": 9223372036854775808}', "seed"),
    ("stream text", b'{"prompt": "a", "stream": "yes"}', "stream"),
    ("echo", b'{"prompt": "a", "echo": "yes"}', "echo"),
]


@pytest.mark.parametrize(("body", "param"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_completions_are_400_and_name_the_field(http: httpx.Client, body: bytes, param: str | None) -> None:
    answer = http.post("/v1/completions", content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param is None or param in error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0.type"),
        ([{"content": "x"}], "messages.0.role"),
    ],
)
def test_bad_messages(http: httpx.Client, messages: object, param: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_too_long_too_large_unknown(http: httpx.Client) -> None:
    long = http.post("/v1/completions", json={"prompt": "a" * LIMIT})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    large = http.post("/v1/completions", content=b'{"prompt": "' + b"a" * 50_000_000 + b'"}')
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    unknown = http.post("/v1/completions", json={"model": "gpt-4", "prompt": "a"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert http.get("/nothing").status_code == 404 and http.get("/v1/completions").status_code == 405
    assert http.post("/v1/completions", json={"prompt": "a", "made_up_field": 1}).status_code == 200


def test_mutated_requests_never_break_the_server(http: httpx.Client) -> None:
    generator = random.Random(7)
    seed_body = json.dumps(
        {"prompt": "abc", "max_tokens": 3, "temperature": 0.5, "stop": ["x"], "n": 1, "seed": 3, "stream": False}
    ).encode()
    for _ in range(300):
        body = bytearray(seed_body)
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(len(body))
            kind = generator.randrange(3)
            if kind == 0:
                body[at] = generator.randrange(256)
            elif kind == 1:
                del body[at]
            else:
                body[at:at] = generator.choice([b"-", b"9", b'"', b"{", b"[", b"null", b"1e999"])
        answer = http.post("/v1/completions", content=bytes(body))
        assert answer.status_code in (200, 400, 404), (bytes(body), answer.text)
    assert http.get("/health").status_code == 200


def test_concurrent_clients_get_what_each_would_get_alone(server: ServerProcess, http: httpx.Client) -> None:
    """Shared prefixes, stop strings, disconnects, more work than the pool holds."""
    generator = random.Random(3)
    prefixes = ["", "You are a helpful assistant. ", "You are a helpful pirate. Speak like one. " * 2]

    async def one(client: httpx.AsyncClient, index: int) -> None:
        prompt = generator.choice(prefixes) + f"question {generator.randrange(20)}"
        seed, max_tokens = generator.randrange(5), generator.randrange(1, 120)
        stop = ("ta", "zz") if generator.random() < 0.3 else ()
        body = {"prompt": prompt, "seed": seed, "max_tokens": max_tokens, "stop": list(stop), "stream": True}
        leave_after = generator.randrange(20) if generator.random() < 0.25 else None
        text, reason, chunks = "", None, 0
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    text, reason, chunks = text + choice["text"], choice["finish_reason"], chunks + 1
                if leave_after is not None and chunks > leave_after:
                    return
        assert (text, reason) == expected(prompt, seed, max_tokens, stop), f"client {index}"

    async def everyone() -> None:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S, limits=limits) as client:
            await asyncio.gather(*(one(client, index) for index in range(300)))

    before = stats(http)["num_retracted_total"]
    asyncio.run(everyone())
    until(lambda: all_pages_back(http), "pages leaked")
    assert stats(http)["num_retracted_total"] > before, "the pool is too large to test retraction"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_pages(server: ServerProcess, http: httpx.Client, stream: bool) -> None:
    until(lambda: all_pages_back(http), "not idle at the start")
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "going away", "max_tokens": 300, "ignore_eos": True, "stream": stream}).encode()
    steps = stats(http)["num_steps_total"]
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        until(lambda: stats(http)["num_steps_total"] > steps + 5, "the request does not run")
    until(lambda: all_pages_back(http), "a client that went away keeps its pages")


def test_metrics_add_up(http: httpx.Client) -> None:
    until(lambda: all_pages_back(http), "not idle")
    text = http.get("/metrics").text
    value = {name: float(number) for name, number in re.findall(r"^(minisgl:[^\s]+) ([\d.e+-]+)$", text, re.M)}
    finished = sum(number for name, number in value.items() if name.startswith("minisgl:requests_finished_total"))
    assert finished == value["minisgl:requests_accepted_total"] > 0
    assert value["minisgl:requests_running"] == value["minisgl:requests_waiting"] == 0
    assert value["minisgl:cached_tokens_total"] > 0 and value['minisgl:ttft_seconds_bucket{le="0.001"}'] >= 0


def test_http_process_has_no_torch(server: ServerProcess) -> None:
    maps = psutil.Process(server.process.pid).memory_maps()
    assert not [one.path for one in maps if "libtorch" in one.path]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_cleanly(signum: int) -> None:
    server = ServerProcess(("--engine", "echo"))
    try:
        with httpx.stream(
            "POST",
            server.url + "/v1/completions",
            json={"prompt": "x", "max_tokens": 8000, "stream": True},
            timeout=WAIT_S,
        ) as answer:
            next(answer.iter_lines())
            assert server.stop(signum) == 0
    finally:
        server.kill()


def test_a_killed_engine_ends_the_server_with_a_message() -> None:
    server = ServerProcess(("--engine", "echo"))
    try:
        engine = server.children()[0]
        body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=WAIT_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine.kill()
            last = [line for line in lines if line.startswith("data: {")][-1]
        assert json.loads(last[6:])["error"]["code"] == "engine_unavailable"
        assert server.process.wait(WAIT_S) == 1
        assert any("engine process died" in line for line in server.lines)
        server.check_no_files()
    finally:
        server.kill()


def test_a_killed_server_takes_its_engine_along() -> None:
    server = ServerProcess(("--engine", "echo"))
    try:
        engine = server.children()[0]
        server.process.kill()
        engine.wait(WAIT_S)
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--model", "./nowhere"), "no such folder"),
        (("--engine", "echo", "--page-size", "0"), "page_size"),
        (("--engine", "echo", "--tp", "0"), "tp: 0: must be at least 1"),
        (("--engine", "echo", "--port", "70000"), "--port"),
        (("--engine", "echo", "--speculative", "ngram:many"), "must be ngram:K or model:FILE[:K]"),
    ],
)
def test_a_bad_start_says_what_to_change(args: tuple[str, ...], reason: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minisgl", "serve", *args],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode in (1, 2) and reason in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "minisgl", "serve", "--engine", "echo", "--port", port],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    assert done.returncode == 2 and "choose another" in done.stderr
