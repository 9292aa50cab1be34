"""nginx and LiteLLM's proxy before two servers, configured as deploy/ shows: what clients of such a proxy see, and what
servers behind it see of clients."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.helpers.e2e import until
from tests.helpers.proxies import NUM_ROWS, SLOW_MS, WAIT_S, Proxied, proxied, sent

pytestmark = pytest.mark.timeout(300)  # a failure, not a measurement
LONG = 1000  # tokens; in slow motion they take longer than anybody waits here


@pytest.fixture(scope="module", params=["nginx", "litellm"])
def proxy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    with proxied(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


def chat(text: str = "Hello", num_tokens: int = 8, **more: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "smollm2", "messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "seed": 7, **more}


def ask(proxy: Proxied, body: dict[str, Any] | None = None, request_id: str | None = None) -> httpx.Response:
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    with proxy.http() as http:
        return http.post("/v1/chat/completions", json=body or chat(), headers=headers)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def pieces(lines: Iterator[str]) -> Iterator[str]:
    """Of a stream, each as it comes; its end must be there."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                if piece := choice["delta"].get("content"):
                    yield piece
    raise AssertionError("the stream has no end")


def test_a_chat_is_the_servers_own_whole_and_streamed(proxy: Proxied) -> None:
    body = chat(num_tokens=32)
    with proxy.backends[0].http() as http:
        text = text_of(http.post("/v1/chat/completions", json=body))
    assert text_of(ask(proxy, body)) == text
    with proxy.http() as http, http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert "".join(pieces(response.iter_lines())) == text


def test_a_stream_comes_as_it_is_made(proxy: Proxied) -> None:
    """In slow motion the last token is minutes away: who buffers shows nothing until the time-out."""
    body = chat(num_tokens=LONG, stream=True)
    with proxy.http() as http:
        with proxy.slow_motion():
            stream = http.send(http.build_request("POST", "/v1/chat/completions", json=body), stream=True)
            told = pieces(stream.iter_lines())
            text = next(told) + next(told)
            assert proxy.num_running() == 1
        text += "".join(told)
        stream.close()
    assert text == text_of(ask(proxy, chat(num_tokens=LONG)))


def test_a_request_has_one_id_on_both_sides(proxy: Proxied) -> None:
    request_id = f"test-{uuid.uuid4()}"
    response = ask(proxy, request_id=request_id)
    assert request_id in (response.headers.get("x-request-id"), response.headers.get("llm_provider-x-request-id"))
    until(lambda: any(one.answered(request_id) for one in proxy.backends), "no server logs the client's id")


def test_a_long_prompt_gets_the_servers_own_answer(proxy: Proxied) -> None:
    """2 MiB: more than nginx takes unless told."""
    response = ask(proxy, chat("a" * (1 << 21)))
    assert response.status_code == 400 and "context" in response.json()["error"]["message"], response.text


def test_full_servers_refuse_and_are_asked_again(proxy: Proxied) -> None:
    with proxy.slow_motion():
        with contextlib.ExitStack() as stack:
            for one in proxy.backends:
                for number in range(NUM_ROWS):
                    stack.enter_context(sent(one.url, one.key, chat(num_tokens=LONG)))
                    one.wait_for("requests_running", number + 1)
                stack.enter_context(sent(one.url, one.key, chat(num_tokens=LONG)))
                one.wait_for("requests_waiting", 1)
            response = ask(proxy)
            assert response.status_code == 429, response.text
            found = {response.headers.get(name) for name in ("retry-after", "llm_provider-retry-after")} - {None}
            assert found and all(int(value) >= 1 for value in found if value), dict(response.headers)
        until(lambda: proxy.num_running() == 0, "they still run")
    assert text_of(ask(proxy)), "servers that were full are servers"


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_ends_its_request(proxy: Proxied, streamed: bool) -> None:
    """It would run for minutes."""
    with proxy.slow_motion():
        with sent(proxy.url, proxy.key, chat(num_tokens=LONG, stream=streamed)) as client:
            until(lambda: proxy.num_running() == 1, "it does not run")
            if streamed:
                assert client.recv(1)
        until(lambda: proxy.num_running() == 0, "it still runs")


def test_a_server_that_drains_gets_nothing_new_and_comes_back(proxy: Proxied) -> None:
    first, _ = proxy.backends
    first.slow_motion(SLOW_MS)
    with sent(first.url, first.key, chat(num_tokens=LONG)):
        first.wait_for("requests_running", 1)
        first.process.process.terminate()
        until(lambda: httpx.get(f"{first.url}/readyz", timeout=WAIT_S).status_code == 503, "it does not drain")
        for number in range(4):
            assert text_of(ask(proxy, chat(f"{number}")))
    assert first.process.process.wait(WAIT_S) == 0
    assert text_of(ask(proxy))
    first.again()

    def is_back() -> bool:
        request_id = f"test-{uuid.uuid4()}"
        assert text_of(ask(proxy, request_id=request_id))
        until(lambda: any(one.answered(request_id) for one in proxy.backends), "nobody logs it")
        return first.answered(request_id)

    until(is_back, "it is never asked again")


def test_a_server_that_dies_leaves_all_to_the_other(proxy: Proxied) -> None:
    """The last one of a proxy: it takes a server away. Whose answer had not begun is answered by the other."""
    with ThreadPoolExecutor(1) as threads:
        with proxy.slow_motion():
            waiting = threads.submit(ask, proxy, chat(num_tokens=LONG))
            until(lambda: proxy.num_running() == 1, "it does not run")
            [lost] = [one for one in proxy.backends if one.number("requests_running")]
            lost.die()
            proxy.backends.remove(lost)
            proxy.backends[0].wait_for("requests_running", 1)
        text = text_of(waiting.result(WAIT_S))
    for _ in range(4):
        assert text_of(ask(proxy, chat(num_tokens=LONG))) == text
