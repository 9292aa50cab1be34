"""/generate and the questions about a server as SGLang's documentation shows them."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from minisgl.message import AbortRequest
from tests.helpers.server import CONFIG, MAX_SEQ_LEN, MODEL, WAIT_S, Frontend, check_error, events, frontend

EOS = 256


def ids(text: str) -> list[int]:
    return list(text.encode())


def post(http: httpx.Client, **body: Any) -> Any:
    response = http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("prompt", [{"text": "say:Hello"}, {"input_ids": ids("say:Hello")}])
def test_an_answer_has_what_sglang_s_clients_read(http: httpx.Client, prompt: dict[str, Any]) -> None:
    answer = post(http, **prompt, sampling_params={"temperature": 0, "max_new_tokens": 32}, rid="mine")
    assert answer["text"] == "Hello" and answer["output_ids"] == answer["token_ids"] == [*ids("Hello"), EOS]
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": 9,
        "completion_tokens": 6,
        "cached_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    }


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"max_new_tokens": 2}, {"type": "length", "length": 2}),
        ({"stop": ["xx", "ll"]}, {"type": "stop", "matched": "ll"}),
        ({"stop_token_ids": ids("o")}, {"type": "stop", "matched": ids("o")[0]}),
    ],
)
def test_finish_reason_names_what_ended_it(http: httpx.Client, asked: dict[str, Any], reason: dict[str, Any]) -> None:
    assert post(http, text="say:Hello", sampling_params=asked)["meta_info"]["finish_reason"] == reason
    assert streamed(http, text="say:Hello", sampling_params=asked)[-1]["meta_info"]["finish_reason"] == reason


def streamed(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    response = http.post("/generate", json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *found, last = events(response.text)
    assert last == "[DONE]"
    return found


def test_a_stream_has_all_of_the_text_each_time(http: httpx.Client) -> None:
    found = streamed(http, text="say:Hällo wörld")
    texts = [one["text"] for one in found]
    assert texts[-1] == "Hällo wörld" and all(b.startswith(a) for a, b in itertools.pairwise(texts))
    assert all(one["meta_info"]["finish_reason"] is None for one in found[:-1])
    last, whole = found[-1], post(http, text="say:Hällo wörld")
    for answer in (last, whole):
        del answer["meta_info"]["e2e_latency"], answer["meta_info"]["id"]
        answer["meta_info"]["cached_tokens"] = answer["usage"]["prompt_tokens_details"]["cached_tokens"] = 0
    assert last == whole


def test_several_texts_have_a_list_of_answers(http: httpx.Client) -> None:
    found = post(http, text=["say:one", "say:two"], rid="r")
    assert [one["text"] for one in found] == ["one", "two"]
    assert [one["meta_info"]["id"] for one in found] == ["r-0", "r-1"]
    assert [one["text"] for one in post(http, input_ids=[ids("say:x"), ids("say:yy")])] == ["x", "yy"]
    assert [one["text"] for one in post(http, text=["say:one"])] == ["one"]
    assert [one["text"] for one in post(http, text="say:n", sampling_params={"n": 2})] == ["n", "n"]
    last = {one["index"]: one["text"] for one in streamed(http, text=["say:one", "say:two"])}
    assert last == {0: "one", 1: "two"}


def test_prompt_gets_the_plain_shape(http: httpx.Client) -> None:
    names = ["text", "token_ids", "finish_reason", "matched_stop", "usage"]
    assert list(post(http, prompt="say:a")) == list(post(http, prompt="say:a", text="say:a")) == names


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "input_ids": [1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [258]}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids.0"),
        ({"text": []}, "text"),
        ({"text": [1]}, "text.0"),
        ({"text": ["a", ""]}, "text"),
        ({"text": 5}, "text"),
        ({"input_ids": [[1], [258]]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids.1"),
        ({"text": "a", "input_ids": [97]}, "prompt"),
        ({"text": ["x" * MAX_SEQ_LEN]}, "text"),
        ({"text": "a", "rid": 5}, "rid"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"prompt": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"prompt": "a", "sampling_params": {"max_new_tokens": -2}}, "sampling_params.max_new_tokens"),
        ({"prompt": "a", "sampling_params": {"max_tokens": -2}}, "sampling_params.max_tokens"),
        ({"prompt": "a", "sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"prompt": "a", "sampling_params": {"stop_token_ids": [258]}}, "sampling_params.stop_token_ids"),
        ({"prompt": "a", "return_logprob": True}, "return_logprob"),
        ({"text": "a", "return_logprob": [True]}, "return_logprob"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [5]}, "token_ids_logprob"),
        ({"text": "a", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
    ],
)
def test_invalid_fields_are_named(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        assert check_error(http.post("/generate", json={**body, "stream": stream}), 400)["param"] == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [{"rid": "one"}, {"abort_all": True}])
def test_abort_request_ends_requests_by_rid(
    server: Frontend, http: httpx.Client, stream: bool, asked: dict[str, Any]
) -> None:
    """With what it has; other ids end nothing."""
    prompt = f"{stream}{len(asked)}{next(iter(asked))} hang:so far"
    body = {"text": prompt, "rid": "one", "stream": stream, "sampling_params": {"n": 2}}
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(lambda: httpx.post(f"{server.url}/generate", json=body, timeout=WAIT_S))
        running = [server.engine.wait_for_request(prompt), *server.engine.requests(prompt)]
        server.wait_until(lambda: server.num_live == 2)
        assert http.post("/abort_request", json={"rid": "another"}).status_code == 200
        assert check_error(http.post("/abort_request", json={}), 400)["param"] == "rid"
        assert not answer.done() and server.num_live == 2
        done = http.post("/abort_request", json=asked)
        assert (done.status_code, done.content) == (200, b"")
        found = events(answer.result().text)[:-1][-2:] if stream else answer.result().json()
    assert [one["meta_info"]["finish_reason"]["type"] for one in found] == ["abort", "abort"]
    server.engine.wait_for_end(AbortRequest, {one.req_id for one in running})


def test_forms_in_the_sampling_parameters_reach_the_engine(http: httpx.Client, server: Frontend) -> None:
    schema = json.dumps({"type": "object"})
    for i, form in enumerate(({"json_schema": schema}, {"regex": "a+"}, {"ebnf": 'root ::= "a"'})):
        post(http, text=f"form {i} say:x", sampling_params=form)
        assert server.engine.wait_for_request(f"form {i}").sampling.grammar


def test_model_info_shows_no_server_path(front_end: str, tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    engine = msgspec.structs.replace(CONFIG.engine, model=str(folder))
    config = msgspec.structs.replace(CONFIG, engine=engine, served_model_name="mine")
    with frontend(front_end=front_end, config=config) as server, server.http() as http:
        for path in ("/get_model_info", "/v1/models"):
            text = http.get(path).text
            assert "my-model" in text and str(tmp_path) not in text


def test_model_info_describes_the_served_model(http: httpx.Client) -> None:
    for path in ("/get_model_info", "/model_info"):
        found = http.get(path).json()
        assert found["is_generation"] is True and found["model_path"] and found["tokenizer_path"]
        assert found["served_model_name"] == MODEL and found["max_model_len"] == MAX_SEQ_LEN
    assert http.get("/health_generate").status_code == 200
