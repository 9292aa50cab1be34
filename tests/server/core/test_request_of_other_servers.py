"""What clients of other servers write: their names, their lengths, their paths."""

from __future__ import annotations

import httpx
import pytest

from minisgl.server.core.fields import SHARED
from tests.helpers.server import chat_body, post

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


def test_a_base_url_may_lack_v1(http: httpx.Client) -> None:
    assert post(http, "/completions", prompt="say:on")["choices"][0]["text"] == "on"
    assert post(http, "/chat/completions", **chat_body("say:on"))["choices"][0]["message"]["content"] == "on"
    assert http.get("/models").json() == http.get("/v1/models").json()
    assert http.post("/embeddings", json={}).json() == http.post("/v1/embeddings", json={}).json()


def test_an_alias_is_the_field_that_does_the_same(http: httpx.Client) -> None:
    for path, body in (
        (CHAT, chat_body("say:abcdef")),
        (TEXT, {"prompt": "say:abcdef"}),
        (GENERATE, {"prompt": "say:abcdef"}),
    ):
        answer = post(http, path, **body, n_predict=3, repeat_penalty=1.0)
        assert answer["usage"]["completion_tokens"] == 3
        refused = http.post(path, json={**body, "n_predict": 3, "max_tokens": 4})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "n_predict"


LLAMA_CPP = "typical_p mirostat dry_multiplier xtc_probability dynatemp_range repeat_last_n samplers top_n_sigma"
WEBUI = "tfs_z top_a smoothing_factor epsilon_cutoff eta_cutoff penalty_alpha guidance_scale negative_prompt num_beams"


@pytest.mark.parametrize("field", [*LLAMA_CPP.split(), *WEBUI.split(), "options", "think", "format"])
def test_what_would_change_the_answer_and_is_not_known_is_refused(http: httpx.Client, field: str) -> None:
    for path, body in ((CHAT, chat_body("say:a")), (TEXT, {"prompt": "say:a"}), (GENERATE, {"prompt": "say:a"})):
        for value in SHARED[field]:
            assert http.post(path, json={**body, field: value}).status_code == 200
        refused = http.post(path, json={**body, field: 0.5})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field


def test_lengths_to_the_end_and_of_nothing(http: httpx.Client) -> None:
    chat, text = chat_body("say:abc"), {"prompt": "say:abc"}
    for path, body in ((CHAT, chat), (TEXT, text), (GENERATE, text), (GENERATE, {"text": "say:abc"})):
        name = "max_new_tokens" if "text" in body else "max_tokens"
        whole, nothing = post(http, path, **body, **{name: -1}), post(http, path, **body, **{name: 0})
        for answer, shown, num_tokens in ((whole, "abc", 4), (nothing, "", 0)):
            choice = answer["choices"][0] if "choices" in answer else answer
            assert (choice["message"]["content"] if path == CHAT else choice["text"]) == shown
            assert answer["usage"]["completion_tokens"] == num_tokens
        told = http.post(path, json={**body, name: 0, "stream": True})
        assert told.status_code == 200 and "length" in told.text


def test_a_list_of_prompts_may_have_a_list_of_parameters(http: httpx.Client) -> None:
    params = {"max_new_tokens": 2}
    body = {"text": ["say:abc", "say:def"], "sampling_params": [params, params]}
    assert [one["text"] for one in http.post(GENERATE, json=body).json()] == ["ab", "de"]
    body["sampling_params"] = [params, {"max_new_tokens": 3, "stop": ["f"]}]
    for stream in (False, True):
        answer = http.post(GENERATE, json={**body, "stream": stream})
        assert answer.status_code == 200, answer.text
        assert '"text":"ab"' in answer.text and '"text":"de"' in answer.text and '"matched":"f"' in answer.text
    ids = {"input_ids": [[*b"fill:"], [*b"fill:"]], "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3}]}
    assert [one["meta_info"]["completion_tokens"] for one in http.post(GENERATE, json=ids).json()] == [2, 3]
    for wrong, param in (
        ([params], "sampling_params"),
        ([params, {"n": 2}], "sampling_params.1.n"),
        ([params, {"temperature": 9}], "sampling_params.1.temperature"),
        ([params, {"max_new_tokens": 0}], "sampling_params"),
        ([params, 5], "sampling_params.1"),
    ):
        refused = http.post(GENERATE, json={**body, "sampling_params": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text


def test_options_of_a_stream_need_a_stream(http: httpx.Client) -> None:
    for path, body in ((CHAT, chat_body("say:a")), (TEXT, {"prompt": "say:a"})):
        refused = http.post(path, json={**body, "stream_options": {"include_usage": True}})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream_options"


def test_what_has_no_effect_is_named_in_a_header(http: httpx.Client) -> None:
    for stream in (False, True):
        answer = http.post(CHAT, json=chat_body("say:a", reasoning_effort="low", verbosity="high", stream=stream))
        assert answer.status_code == 200 and answer.headers["x-minisgl-ignored"] == "reasoning_effort, verbosity"
    assert "x-minisgl-ignored" not in http.post(CHAT, json=chat_body("say:a", verbosity="medium")).headers
    responses = {"input": "say:a", "reasoning": {"effort": "high", "summary": "detailed"}, "text": {"verbosity": "low"}}
    messages = {**chat_body("say:a"), "max_tokens": 5, "output_config": {"effort": "max"}}
    for path, body, names in (
        ("/v1/responses", responses, "reasoning_effort, verbosity"),
        ("/v1/messages", messages, "reasoning_effort"),
        ("/v1/messages", {**messages, "thinking": {"type": "disabled"}}, None),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 200 and answer.headers.get("x-minisgl-ignored") == names, path


def test_many_stop_texts(http: httpx.Client) -> None:
    assert post(http, TEXT, prompt="say:abc", stop=[*map(str, range(63)), "c"])["choices"][0]["text"] == "ab"


def test_a_schema_may_be_a_text(http: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": '{"type": 5}'}}
    refused = http.post(CHAT, json=chat_body("say:a", response_format=form))
    assert refused.status_code == 400 and "schema" in refused.json()["error"]["param"]
    assert "input should be" not in refused.text.lower()


def test_sglang_s_names_of_what_is_served(http: httpx.Client) -> None:
    assert http.get("/get_server_info").json() == http.get("/get_model_info").json()
