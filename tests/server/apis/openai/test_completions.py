"""POST /v1/completions and POST /generate, streamed and not, against an engine of scripted replies."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.helpers.server import EOS, MODEL, Frontend, chat_body, events, post, prompt_ids

PATH = "/v1/completions"


def ids(text: str) -> list[int]:
    return list(text.encode())


# ------------------------------------------------------------------------------------------------------- completions


def test_whole_answer_has_the_exact_shape(http: httpx.Client) -> None:
    body = post(http, PATH, model=MODEL, prompt="say:Hello")
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "text": "Hello",
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": EOS,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 6,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize(("side", "kept"), [("left", "ay:ok"), ("right", "say:o"), (None, "ay:ok")])
def test_truncation_side_chooses_the_kept_tokens(http: httpx.Client, side: str | None, kept: str) -> None:
    asked = {"truncate_prompt_tokens": 5, "truncation_side": side, "max_tokens": 1, "return_token_ids": True}
    for body in ({"prompt": "say:ok"}, {"prompt": ids("say:ok")}):
        assert post(http, PATH, **body, **asked)["choices"][0]["prompt_token_ids"] == ids(kept)


def test_tokens_are_shown_as_ids(http: httpx.Client) -> None:
    asked = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    found = post(http, PATH, **{"prompt": "say:ok", "logprobs": 1, **asked})["choices"][0]["logprobs"]
    assert found["tokens"] == [f"token_id:{one}" for one in ids("ok")]
    assert all(one.startswith("token_id:") for top in found["top_logprobs"] for one in top)
    chat = post(http, "/v1/chat/completions", **chat_body("say:ok", logprobs=True, top_logprobs=1, **asked))
    for one in chat["choices"][0]["logprobs"]["content"]:
        assert one["token"] == bytes(one["bytes"]).decode() and one["token"].startswith("token_id:")
        assert one["top_logprobs"][0]["token"].startswith("token_id:")
    answer = http.post("/generate", json={"text": "say:ok", "return_tokens_as_token_ids": True})
    assert answer.status_code == 400 and "return_tokens_as_token_ids" in answer.text


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("asked", "matched"),
    [
        ({"stop": ["there", "lo"]}, ["lo"]),
        ({"stop_token_ids": [ord("x"), ord("o")]}, [ord("o")]),
        ({"stop": "x"}, [EOS]),
        ({}, [EOS]),
        ({"stop": "lo", "max_tokens": 2}, []),
    ],
)
def test_matched_stop_is_reported(http: httpx.Client, path: str, asked: dict[str, Any], matched: list[Any]) -> None:
    body = {"prompt": "say:Hello there"} if path == PATH else chat_body("say:Hello there")
    choice = post(http, path, **body, **asked)["choices"][0]
    assert [choice["matched_stop"]] == matched if matched else "matched_stop" not in choice
    answer = http.post(path, json={**body, **asked, "stream": True}).text
    assert [
        chunk["choices"][0]["matched_stop"] for chunk in events(answer)[:-1] if "matched_stop" in str(chunk)
    ] == matched


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("say:a", ["a"]),
        (["say:a"], ["a"]),
        (["say:a", "say:b", "say:c"], ["a", "b", "c"]),
        (ids("say:a"), ["a"]),
        ([ids("say:a"), ids("say:b")], ["a", "b"]),
    ],
)
def test_every_prompt_shape(http: httpx.Client, prompt: object, texts: list[str]) -> None:
    body = post(http, PATH, prompt=prompt)
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
    assert body["usage"]["prompt_tokens"] == 5 * len(texts)


def test_n_choices_of_several_prompts_come_in_order(http: httpx.Client) -> None:
    body = post(http, PATH, prompt=["say:a", "say:b"], n=2)
    assert [choice["text"] for choice in body["choices"]] == ["a", "a", "b", "b"]
    assert body["usage"]["prompt_tokens"] == 10 and body["usage"]["completion_tokens"] == 8
    response = http.post(PATH, json={"prompt": ["say:a", "say:b"], "n": 2, "stream": True})
    chunks = [event for event in events(response.text) if event != "[DONE]"]
    texts = dict.fromkeys(range(4), "")
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "a", 1: "a", 2: "b", 3: "b"}


def test_default_limit_is_sixteen_tokens(http: httpx.Client) -> None:
    choice = post(http, PATH, prompt=f"say:{'x' * 40}")["choices"][0]
    assert choice["text"] == "x" * 16 and choice["finish_reason"] == "length"
    choice = post(http, PATH, prompt=f"say:{'x' * 40}", max_tokens=30)["choices"][0]
    assert choice["text"] == "x" * 30


def test_stream_and_usage_chunk(http: httpx.Client) -> None:
    body = {"prompt": "say:Hello", "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(http.post(PATH, json=body).text)
    assert done == "[DONE]" and last["choices"] == [] and last["usage"]["total_tokens"] == 15
    assert all(chunk["object"] == "text_completion" and chunk["usage"] is None for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"


def test_token_id_prompts_reach_the_engine_unchanged(http: httpx.Client, server: Frontend) -> None:
    post(http, PATH, prompt=[*ids("as they are"), 257, 0, 256])
    assert prompt_ids(server.engine.wait_for_request("as they are"))[-3:] == [257, 0, 256]


# ---------------------------------------------------------------------------------------------------------- generate


@pytest.mark.parametrize("prompt", [{"prompt": "say:Hello"}, {"input_ids": ids("say:Hello")}])
def test_generate_returns_plain_completion(http: httpx.Client, prompt: dict[str, Any]) -> None:
    body = post(http, "/generate", **{**prompt, "sampling_params": {"temperature": 0}})
    usage = body.pop("usage")
    if "input_ids" in prompt:  # SGLang's own fields come on top
        assert body.pop("output_ids") == body["token_ids"] and body.pop("meta_info")["prompt_tokens"] == 9
    else:
        assert body.pop("matched_stop") == EOS
    assert body == {"text": "Hello", "token_ids": [*ids("Hello"), EOS], "finish_reason": "stop"}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (9, 6)


def test_generate_streams_json_lines(http: httpx.Client) -> None:
    response = http.post("/generate", json={"prompt": "say:Hällo", "stream": True})
    assert response.headers["content-type"].startswith("application/x-ndjson")
    *lines, last = [json.loads(line) for line in response.text.splitlines()]
    assert all(list(line) == ["text_delta"] for line in lines)
    assert "".join(line["text_delta"] for line in lines) == "Hällo"
    assert last["event"] == "done" and last["finish_reason"] == "stop" and last["usage"]["completion_tokens"] == 7


def test_generate_drops_tokens_after_a_stop_string(http: httpx.Client) -> None:
    body = post(http, "/generate", prompt="burst:one two three", sampling_params={"stop": "two"})
    assert body["text"] == "one " and body["token_ids"] == ids("one two")
