"""llama.cpp's own routes, as its page and plugins of editors call them, against an engine of scripted replies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from minisgl.config import ApiKey
from minisgl.server.apis.llama_cpp.body import LlamaCppAnswer, Props, Slots
from tests.helpers.fill_in import MARKERS, with_markers
from tests.helpers.server import (
    CONFIG,
    EOS,
    MAX_SEQ_LEN,
    MODEL,
    Frontend,
    check_error,
    failed_step,
    frontend,
    prompt_ids,
)

PATH = "/completion"
VIM: dict[str, Any] = {  # as llama.vim asks
    "input_prefix": "def f(a):\n",
    "input_suffix": "\n    return b\n",
    "input_extra": [{"text": "b = 5", "filename": "c.py"}],
    "prompt": "    b = ",
    "id_slot": 0,
    "n_predict": 8,
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 500,
    "response_fields": ["content", "timings/prompt_n", "tokens_cached", "truncated", "nothing"],
}


@pytest.fixture(scope="module")
def filling(front_end: str) -> Iterator[Frontend]:
    with frontend(front_end=front_end, tokenizer=with_markers()) as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)


def post(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    LlamaCppAnswer.model_validate(found, strict=True)
    return found


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(block.removeprefix("data: ")) for block in answer.text.split("\n\n")[:-1]]


def test_an_answer_has_llama_cpp_s_shape(http: httpx.Client) -> None:
    found = post(http, prompt="say:a\nb", temperature=0, return_tokens=True, seed=-1)
    assert (found["content"], found["tokens"], found["stop"]) == ("a\nb", [*b"a\nb", EOS], True)
    assert (found["stop_type"], found["stopping_word"], found["has_new_line"]) == ("eos", "", True)
    assert (found["tokens_predicted"], found["tokens_evaluated"]) == (4, 7)
    assert (found["prompt"], found["model"], found["index"]) == ("say:a\nb", MODEL, 0)
    settings = found["generation_settings"]
    assert (settings["n_ctx"], settings["n_predict"], settings["temperature"]) == (MAX_SEQ_LEN, -1, 0)
    timings = found["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == 7 and timings["predicted_n"] == 4
    assert timings["prompt_ms"] > 0 and timings["predicted_ms"] >= 0
    for name in ("prompt", "predicted"):
        count, ms, each, rate = (timings[f"{name}_{of}"] for of in ("n", "ms", "per_token_ms", "per_second"))
        assert each * count == pytest.approx(ms) and rate * ms == pytest.approx(1000 * count if ms else 0)


def test_stop_type_names_what_ended_the_completion(http: httpx.Client) -> None:
    word = post(http, prompt="say:some text", stop=[" te"])
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("some", "word", " te")
    limit = post(http, prompt="say:some text", n_predict=3)
    assert (limit["content"], limit["stop_type"]) == ("som", "limit")
    nothing = post(http, prompt="say:some text", n_predict=0)
    assert (nothing["content"], nothing["stop_type"]) == ("", "limit")


def test_a_stream_ends_with_the_whole_but_its_text(http: httpx.Client) -> None:
    body = {"prompt": "say:a\nbc", "return_tokens": True}
    found = events(http.post(PATH, json={**body, "stream": True}))
    *parts, last = found
    assert "".join(one["content"] for one in parts) == "a\nbc" and last["content"] == ""
    assert [token for one in found for token in one["tokens"]] == [*b"a\nbc", EOS]
    assert all(one["stop"] is False for one in parts) and last["stop"] is True and last["has_new_line"]
    whole = post(http, **body)
    changing = {"content": "", "tokens": [], "timings": {}, "tokens_cached": 0, "generation_settings": {}}
    assert {**last, **changing} == {**whole, **changing}


def test_several_prompts_have_a_list(http: httpx.Client) -> None:
    found = http.post(PATH, json={"prompt": ["say:a", "say:b"]}).json()
    assert [(one["index"], one["content"], one["prompt"]) for one in found] == [(0, "a", "say:a"), (1, "b", "say:b")]
    ids = post(http, prompt=[*b"say:c"])
    assert (ids["content"], ids["prompt"]) == ("c", [*b"say:c"])


def test_a_failure_in_a_stream_is_an_event(http: httpx.Client, server: Frontend) -> None:
    text = ""
    with http.stream("POST", PATH, json={"prompt": "hang:breaks", "stream": True}) as response:
        req_id = server.engine.wait_for_request("hang:breaks").req_id
        for part in response.iter_text():
            if not text:
                server.engine.send(failed_step(req_id, "scripted failure"))
            text += part
    last = json.loads(text.split("\n\n")[-2].removeprefix("data: "))
    assert "scripted failure" in last["error"]["message"]


def test_ignored_fields_are_named_and_others_refused(http: httpx.Client) -> None:
    answer = http.post(PATH, json={"prompt": "say:a", "samplers": ["top_k"], "n_keep": 0, "repeat_last_n": 64})
    assert answer.headers["x-minisgl-ignored"] == "samplers, repeat_last_n"
    for field, value in (("mirostat", 2), ("dry_multiplier", 0.8), ("n_cmpl", 2), ("image_data", [{}])):
        assert check_error(http.post(PATH, json={"prompt": "say:a", field: value}), 400)["param"] == field
    assert check_error(http.post(PATH, json={}), 400)["param"] == "prompt"
    assert check_error(http.post(PATH, json={"prompt": "a", "n_predict": -2}), 400)["param"] == "n_predict"


def test_a_gap_is_filled(filling: Frontend) -> None:
    with filling.http() as http:
        answer = http.post("/infill", json=VIM)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-minisgl-ignored"] == "id_slot, n_indent, samplers, t_max_prompt_ms, t_max_predict_ms"
        found = answer.json()
        before = "--- c.py ---\nb = 5\n\ndef f(a):\n    b = "
        num_prompt = len(before) + len(VIM["input_suffix"]) + 3
        cached = found["tokens_cached"]
        assert found == {
            "content": "ok",
            "timings/prompt_n": num_prompt - cached,
            "tokens_cached": cached,
            "truncated": False,
        }
        prefix, suffix, middle = (with_markers().token_id(text) for text in MARKERS[:3])
        request = filling.engine.wait_for_request("return b")
        assert prompt_ids(request) == [prefix, *before.encode(), suffix, *VIM["input_suffix"].encode(), middle]
        empty = http.post("/infill", json={"input_prefix": "ab", "input_suffix": ""})
        assert empty.json()["tokens_evaluated"] == 5


def test_infill_without_fim_tokens_is_refused(http: httpx.Client) -> None:
    error = check_error(http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"}), 400)
    assert error["param"] == "input_suffix" and "no fill-in-the-middle tokens" in error["message"]
    assert check_error(http.post("/infill", json={"input_prefix": "a"}), 400)["param"] == "input_suffix"


def test_tokenize_and_detokenize_use_llama_cpp_fields(http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"content": "aé", "with_pieces": True}).json()
    assert found["tokens"] == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert http.post("/tokenize", json={"content": "ab"}).json()["tokens"] == [97, 98]
    assert http.post("/tokenize", json={"content": ""}).json()["tokens"] == []
    assert http.post("/detokenize", json={"tokens": [97, 98]}).json() == {"prompt": "ab", "content": "ab"}
    assert check_error(http.post("/tokenize", json={"content": "a", "prompt": "a"}), 400)["param"] == "prompt"


def test_a_conversation_is_rendered(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert http.post("/apply-template", json=body).json() == {"prompt": "<user>hi</user>\n<assistant>"}
    assert check_error(http.post("/apply-template", json={"messages": []}), 400)["param"] == "messages"
    assert check_error(http.post("/apply-template", json={"content": "a"}), 400)["param"] == "messages"


def test_props_and_slots_have_llama_cpp_shape(http: httpx.Client, server: Frontend) -> None:
    props = http.get("/props").json()
    Props.model_validate(props, strict=True)
    assert (props["model_alias"], props["default_generation_settings"]["n_ctx"]) == (MODEL, MAX_SEQ_LEN)
    assert props["eos_token"] == server.app.context.tokenizer.token_bytes(EOS).decode()
    assert "<user>" in props["chat_template"] or props["chat_template"]
    slots = http.get("/slots").json()
    Slots.model_validate(slots, strict=True)
    assert len(slots) == props["total_slots"] and slots[0] == {"id": 0, "n_ctx": MAX_SEQ_LEN, "is_processing": False}
    assert http.get("/v1/health").json()["status"] == http.get("/health").json()["status"] == "ok"


def test_routes_without_key_return_401(front_end: str) -> None:
    config = msgspec.structs.replace(CONFIG, api_keys=(ApiKey(name="a", key="k"),))
    with frontend(front_end=front_end, config=config) as running, running.http() as http:
        for path in ("/props", "/slots", "/v1/health"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers={"authorization": "Bearer k"}).status_code == 200
        assert http.post(PATH, json={"prompt": "say:a"}).status_code == 401
