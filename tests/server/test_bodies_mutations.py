"""Bodies that were once valid, then damaged at random: the answer is a success or a 4xx in the one shape, never a 422,
a 5xx or a hang. Seeded; a failure names its body."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.server import chat_body, check_error, events

SIZES = [250, pytest.param(1700, marks=pytest.mark.slow)]  # per endpoint and kind; the large one makes 10,000 of all
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 1,
    "n": 2,
    "max_tokens": 4,
    "min_tokens": 1,
    "stop": ["b", "zz"],
    "stop_token_ids": [5, 6],
    "ignore_eos": False,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"65": 3.5},
    "allowed_token_ids": [97, 98],
    "bad_words": ["zz", " y"],
    "truncate_prompt_tokens": 40,
    "return_token_ids": True,
    "priority": 1,
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **chat_body(
            [{"type": "text", "text": "say:abc"}],
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        ),
        **SAMPLING,
        "max_completion_tokens": 3,
        "response_format": {"type": "text"},
        "tools": [],
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": False,
        "add_generation_prompt": True,
    },
    "/v1/completions": {"prompt": ["say:a", "say:b"], "stream": False, "echo": True, "best_of": 3, **SAMPLING},
    "/generate": {"prompt": "say:abc", "stream": True, "sampling_params": {**SAMPLING, "n": 1, "max_new_tokens": 4}},
}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**40),
    *(0.0, -0.0, 1.5, 1e308, float("nan"), float("inf")),
    *("", "hot", "\x00", chr(0xD800), "\u65e5\u672c", "x" * 2000),
    *([], [[]], [None], [1, "a"], ["a", 1], [[1], [2]], [257, 256], [{}]),
    *({}, {"type": "text"}, {"a": {"b": [{}] * 3}}, {"role": "user", "content": "say:x"}),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside."""
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def mutate(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        found = list(places(body))
        if not found:
            break
        container, key = rng.choice(found)
        kind = rng.random()
        if kind < 0.7:
            container[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind < 0.8:
            del container[key]
        elif kind < 0.9:
            container[key] = [copy.deepcopy(container[key]) for _ in range(rng.randint(1, 5))]
        else:
            other, at = rng.choice(found)
            container[key] = copy.deepcopy(other[at])
    return body


def damage(valid: bytes, rng: random.Random) -> bytes:
    body = bytearray(valid)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body))
        match rng.randrange(4):
            case 0:
                body[at] = rng.randrange(256)
            case 1:
                del body[at : at + rng.randint(1, 20)]
            case 2:
                body[at:at] = rng.choice([b"[", b"}", b'"', b"\\u", b"\xf0\x9f", b"1e999", b"-", b"\x00", b"null"])
            case _:
                body[at:at] = body[at : at + rng.randint(1, 60)]
    return bytes(body)


def check(http: httpx.Client, path: str, body: bytes) -> int:
    response = http.post(path, content=body)
    status = response.status_code
    if status != 200:
        assert status in (400, 404), (status, response.text, body)
        check_error(response)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert events(response.text)[-1] == "[DONE]" and '"error"' not in response.text, (response.text, body)
    return status


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("path", VALID)
def test_mutated_json(http: httpx.Client, path: str, size: int) -> None:
    rng = random.Random(f"{path} {size}")
    found = {check(http, path, json.dumps(mutate(VALID[path], rng)).encode()) for _ in range(size)}
    assert {200, 400} <= found  # the mutations are neither all harmless nor all fatal


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("path", VALID)
def test_damaged_bytes(http: httpx.Client, path: str, size: int) -> None:
    rng = random.Random(f"{path} {size}")
    valid = json.dumps(VALID[path]).encode()
    found = {check(http, path, damage(valid, rng)) for _ in range(size)}
    assert {200, 400} <= found


def test_the_valid_bodies_are_valid(http: httpx.Client) -> None:
    for path, body in VALID.items():
        assert http.post(path, json=body).status_code == 200
