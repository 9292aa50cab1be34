"""`X-Minisgl-Cached-Tokens`: the number of `usage`, whole and streamed, under both front ends; pages may read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.helpers.server import CONFIG, Frontend, chat_body, events, frontend

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
PAGE = "http://page.example"
HEADER = "x-minisgl-cached-tokens"


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[Frontend]:
    with frontend(config=msgspec.structs.replace(CONFIG, cors_origins=(PAGE,)), front_end=front_end) as running:
        yield running


def of_usage(answer: httpx.Response) -> int:
    if "ndjson" in answer.headers["content-type"]:
        usage = msgspec.json.decode(answer.text.splitlines()[-1])["usage"]
    elif "event-stream" in answer.headers["content-type"]:
        usage = events(answer.text)[-2]["usage"]
    else:
        usage = answer.json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", [CHAT, TEXT, GENERATE])
def test_cached_tokens_header_equals_usage(http: httpx.Client, path: str, n: int, stream: bool) -> None:
    text = f"of {path}{stream}{n} a long beginning say:ok"
    body: dict[str, Any] = chat_body(text) if path == CHAT else {"prompt": text}
    body |= {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}
    body |= {"n": n} if path != GENERATE else {}
    first, second = (http.post(path, json=body) for _ in range(2))
    assert int(first.headers[HEADER]) == of_usage(first)
    assert int(second.headers[HEADER]) == of_usage(second) > len(text) - 20


def test_cached_tokens_header_sums_prompts_and_is_missing_in_streams(http: httpx.Client) -> None:
    body = {"prompt": ["prompts one say:a", "prompts two say:b"], "n": 2}
    http.post(TEXT, json=body)
    answer = http.post(TEXT, json=body)
    assert int(answer.headers[HEADER]) == of_usage(answer) > 20
    stream = http.post(TEXT, json={**body, "stream": True})
    assert HEADER not in stream.headers and stream.headers["x-minisgl-max-tokens"] == "16,16"


def test_cors_exposes_both_headers(http: httpx.Client) -> None:
    answer = http.post(TEXT, json={"prompt": "say:a"}, headers={"origin": PAGE})
    exposed = answer.headers["access-control-expose-headers"].lower()
    assert HEADER in answer.headers and HEADER in exposed and "x-minisgl-max-tokens" in exposed


def test_errors_have_neither_header(http: httpx.Client) -> None:
    answer = http.post(TEXT, json={"prompt": "fail:x"})
    assert answer.status_code == 500
    assert not any(name.startswith("x-minisgl") for name in answer.headers)
