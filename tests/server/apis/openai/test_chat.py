"""POST /v1/chat/completions: OpenAI's shapes, streamed and not, against an engine of scripted replies."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from minisgl.message import FinishRequest
from minisgl.sampling_params import choice_seed
from minisgl.server.apis.openai import chat
from minisgl.server.core import admission
from tests.helpers.server import (
    EOS,
    MAX_SEQ_LEN,
    MODEL,
    Frontend,
    chat_body,
    check_error,
    events,
    failed_step,
    prompt_text,
)

PATH = "/v1/chat/completions"
ODD_TEXT = '日本 👩‍👩‍👧 ß\u0000\u2028 \\ " end'


def whole(http: httpx.Client, content: object, **more: object) -> dict[str, Any]:
    response = http.post(PATH, json=chat_body(content, **more))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def streamed(http: httpx.Client, content: object, **more: object) -> list[Any]:
    response = http.post(PATH, json=chat_body(content, stream=True, **more))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    assert found.pop() == "[DONE]" and "[DONE]" not in found
    return found


def texts_of(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    return texts


def test_whole_answer_has_the_exact_shape(http: httpx.Client) -> None:
    body = whole(http, "say:Hello")
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    prompt = "<user>say:Hello</user>\n<assistant>"
    assert body == {
        "model": MODEL,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": EOS,
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": 6,  # the EOS was generated too
            "total_tokens": len(prompt) + 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }


def test_stream_has_role_first_one_finish_and_no_usage_unasked(http: httpx.Client) -> None:
    chunks = streamed(http, "say:Hello there")
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[0]["id"].startswith("chatcmpl-")
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["model"] == MODEL for chunk in chunks)
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and not any("role" in delta for delta in deltas[1:])
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert texts_of(chunks) == {0: "Hello there"}


def test_include_usage_adds_one_chunk_without_choices(http: httpx.Client) -> None:
    *chunks, last = streamed(http, "say:abc", stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 4


def test_cached_tokens_are_reported(http: httpx.Client) -> None:
    whole(http, "cached? say:x")
    again = whole(http, "cached? say:x")["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1


@pytest.mark.parametrize("order", ["say", "burst"])
def test_no_character_is_split_lost_or_repeated(http: httpx.Client, order: str) -> None:
    assert whole(http, f"{order}:{ODD_TEXT}")["choices"][0]["message"]["content"] == ODD_TEXT
    chunks = streamed(http, f"{order}:{ODD_TEXT}")
    assert texts_of(chunks) == {0: ODD_TEXT}
    assert "\ufffd" not in "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_n_choices_share_the_prompt_and_differ_in_seed(http: httpx.Client, server: Frontend) -> None:
    body = whole(http, "three say:abc", n=3, seed=7)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["abc"] * 3
    sent = server.engine.requests("three say:abc")
    assert [one.sampling.seed for one in sent] == [7, choice_seed(7, 1), choice_seed(7, 2)]
    assert all(one.sampling.n == 1 for one in sent) and len({one.req_id for one in sent}) == 3
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] == len(prompt_text(sent[0]))
    chunks = streamed(http, "say:abc", n=3)
    assert texts_of(chunks) == {0: "abc", 1: "abc", 2: "abc"}
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


def test_without_a_seed_each_request_gets_its_own(http: httpx.Client, server: Frontend) -> None:
    for _ in range(2):
        whole(http, "seedless")
    seeds = {one.sampling.seed for one in server.engine.requests("seedless")}
    assert len(seeds) == 2 and None not in seeds


@pytest.mark.parametrize("stop", ["wor", ["zzz", "wor"]])
@pytest.mark.parametrize("order", ["hang", "burst"])  # tokens one by one, and all at once
def test_stop_string_truncates_text_and_ends_the_request(
    http: httpx.Client, server: Frontend, order: str, stop: object
) -> None:
    marker = f"{len(server.engine.received)} {order}:hello world and more"
    before = {one.req_id for one in server.engine.requests(marker)}
    body = whole(http, marker, stop=stop)
    assert body["choices"][0]["message"]["content"] == "hello "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len("hello wor")  # not what came in the same breath
    chunks = streamed(http, marker, stop=stop)
    assert texts_of(chunks) == {0: "hello "}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    sent = {one.req_id for one in server.engine.requests(marker)} - before
    if order == "hang":  # a burst has ended before its text is seen
        server.engine.wait_for_end(FinishRequest, sent)


def test_partial_stop_string_at_the_end_is_text(http: httpx.Client) -> None:
    assert whole(http, "say:hello wo", stop="world")["choices"][0]["message"]["content"] == "hello wo"


def test_stop_token_ids_end_and_are_no_text(http: httpx.Client) -> None:
    choice = whole(http, "say:abXcd", stop_token_ids=[ord("X")])["choices"][0]
    assert choice["message"]["content"] == "ab" and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limits_end_with_length(http: httpx.Client, name: str) -> None:
    choice = whole(http, "say:Hello", **{name: 3})["choices"][0]
    assert choice["message"]["content"] == "Hel" and choice["finish_reason"] == "length"


def test_limits_reach_the_engine_resolved(http: httpx.Client, server: Frontend) -> None:
    for marker, given in (("lim-a", {}), ("lim-b", {"max_tokens": 10**9, "min_tokens": 10**9}), ("lim-c", {})):
        whole(http, marker, **given)
        request = server.engine.wait_for_request(marker)
        left = MAX_SEQ_LEN - len(prompt_text(request))
        assert request.sampling.max_tokens == left
        assert request.sampling.min_tokens <= left
    whole(http, "lim-d", max_tokens=5, max_completion_tokens=4)
    assert server.engine.wait_for_request("lim-d").sampling.max_tokens == 4


def test_sampling_fields_reach_the_engine(http: httpx.Client, server: Frontend) -> None:
    given = {"temperature": 0, "top_p": 0.5, "top_k": 7, "min_tokens": 2, "ignore_eos": True, "seed": -3}
    whole(http, "fields say:abcdef", max_tokens=4, **given)
    sampling = server.engine.wait_for_request("fields").sampling
    assert {name: getattr(sampling, name) for name in given} == given
    whole(http, "defaults")
    sampling = server.engine.wait_for_request("defaults").sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_tokens) == (1.0, 1.0, -1, 0)


def test_null_is_the_default_and_unknown_fields_are_ignored(http: httpx.Client, server: Frontend) -> None:
    names = "temperature top_p top_k seed n max_tokens max_completion_tokens min_tokens stop stop_token_ids ignore_eos"
    more = "stream stream_options logprobs top_logprobs tools tool_choice response_format logit_bias model"
    nulls: dict[str, object] = dict.fromkeys(f"{names} {more}".split())
    body = whole(http, "nulls say:fine", **{**nulls, "user": "someone", "no_such_field": [1]})
    assert body["choices"][0]["message"]["content"] == "fine"
    sampling = server.engine.wait_for_request("nulls").sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (1.0, 1.0, -1, ())


def test_neutral_values_are_accepted(http: httpx.Client) -> None:
    nothing = {
        "logprobs": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
    }
    assert whole(http, "say:fine", **nothing)["choices"][0]["message"]["content"] == "fine"


def test_every_role_and_both_kinds_of_content(http: httpx.Client, server: Frontend) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "developer", "content": [{"type": "text", "text": "D1"}, {"type": "text", "text": "D2"}]},
        {"role": "user", "content": "roles"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]},
        {"role": "tool", "content": "T", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "text", "text": "say:yes"}]},
    ]
    response = http.post(PATH, json={"messages": messages})
    assert response.json()["choices"][0]["message"]["content"] == "yes"
    lines = prompt_text(server.engine.wait_for_request("roles")).split("\n")
    assert lines[0] == "<system>S</system>" and lines[1].startswith("<system>D1") and "D2" in lines[1] + lines[2]
    assert lines[-1] == "<assistant>" and "<tool>T</tool>" in lines


def test_an_error_before_the_first_token_is_a_status(http: httpx.Client) -> None:
    for stream in (False, True):
        error = check_error(http.post(PATH, json=chat_body("fail:", stream=stream)), 500)
        assert error["message"] == "scripted failure" and error["code"] == "engine_error"


def test_an_error_in_a_stream_is_its_last_event(http: httpx.Client, server: Frontend) -> None:
    body = chat_body("to fail hang:begun", stream=True)
    with http.stream("POST", PATH, json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        text = ""
        while text != "begun":
            text += texts_of(events(next(lines) + "\n\n")).get(0, "")
        server.engine.send(failed_step(server.engine.wait_for_request("to fail").req_id, "went wrong"))
        *_, last, done = events("".join(f"{line}\n\n" for line in lines))
    assert last["error"]["message"] == "went wrong" and done == "[DONE]"


def test_many_log_probabilities_are_formatted_off_the_event_loop(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, formatted = [], chat.chat_logprobs
    monkeypatch.setattr(
        chat,
        "chat_logprobs",
        lambda *of, **how: threads.append(threading.current_thread().name) or formatted(*of, **how),
    )
    few = whole(http, "say:abc", logprobs=True, return_token_ids=True)
    monkeypatch.setattr(admission, "MANY_LOGPROBS", 1)
    many = whole(http, "say:abc", logprobs=True, return_token_ids=True)
    assert threads[-1] == "encode-long" != threads[0]
    assert many["choices"] == few["choices"]
