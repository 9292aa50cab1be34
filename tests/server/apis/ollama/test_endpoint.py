"""Ollama's API, call by call, against an engine of scripted replies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minisgl.server.apis.ollama.body import OllamaChatAnswer, OllamaChatRequest, OllamaEmbedAnswer, OllamaGenerateAnswer
from minisgl.server.apis.ollama.endpoint import conversation_of
from tests.helpers.fill_in import with_markers
from tests.helpers.server import MAX_SEQ_LEN, MODEL, Frontend, failed_step, frontend, prompt_text
from tests.server.apis.ollama.test_models import check_error

TOOL = {
    "type": "function",
    "function": {
        "name": "rate",
        "description": "Rate a city.",
        "parameters": {"type": "object", "properties": {"rank": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "rate", "arguments": {"rank": 7}}</tool_call>'
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "created_at")


@pytest.fixture(scope="module")
def server(parsing_server: Frontend) -> Frontend:
    return parsing_server


@pytest.fixture(scope="module")
def embedding(front_end: str) -> Iterator[httpx.Client]:
    with frontend(front_end=front_end, engine="cpu") as running, running.http() as client:
        yield client


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


def whole(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json={**body, "stream": False})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    (OllamaChatAnswer if path == "/api/chat" else OllamaGenerateAnswer).model_validate(found, strict=True)
    return found


def lines(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the lines make."""
    messages = [one["message"] for one in parts]
    found: dict[str, Any] = {"role": "assistant", "content": "".join(one["content"] for one in messages)}
    if thought := "".join(one.get("thinking", "") for one in messages):
        found["thinking"] = thought
    if calls := [call for one in messages for call in one.get("tool_calls", ())]:
        found["tool_calls"] = [{**call, "id": ""} for call in calls]
    return found


def test_a_whole_answer_of_a_chat(http: httpx.Client) -> None:
    found = whole(http, "/api/chat", **said("say:Hello"))
    times = {name: found.pop(name) for name in TIMES}
    assert times["created_at"].endswith("Z") and times["load_duration"] == 0
    assert times["total_duration"] == times["prompt_eval_duration"] + times["eval_duration"] > 0
    assert found == {
        "model": MODEL,
        "message": {"role": "assistant", "content": "Hello"},
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": len("<user>say:Hello</user>\n<assistant>"),
        "eval_count": 6,
    }


def test_streams_are_the_default_and_say_the_same(http: httpx.Client) -> None:
    body = said(f"say:<think>Hm, well.</think>Here: {CALL}\n{CALL} done", tools=[TOOL])
    found = lines(http, "/api/chat", **body)
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    message = whole(http, "/api/chat", **body)["message"]
    message["tool_calls"] = [{**call, "id": ""} for call in message["tool_calls"]]
    assert joined(found) == message
    functions = [{"index": i, "name": "rate", "arguments": {"rank": 7}} for i in range(2)]
    assert message == {
        "role": "assistant",
        "content": "Here: done",
        "thinking": "Hm, well.",
        "tool_calls": [{"id": "", "function": one} for one in functions],
    }
    assert found[-1]["message"] == {"role": "assistant", "content": ""} and found[-1]["done_reason"] == "stop"


def test_options_become_sampling_params(http: httpx.Client, server: Frontend) -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1, "seed": 5, "stop": ["l"], "num_predict": 20}
    options |= {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_ctx": 512}
    found = whole(http, "/api/chat", **said("options say:Hello", options=options))
    assert found["message"]["content"] == "He" and "warning" not in found
    sampling = server.engine.wait_for_request("options say:Hello").sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.8, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.repetition_penalty) == (5, 20, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert whole(http, "/api/chat", **said("say:Hello", options={"num_predict": 3}))["done_reason"] == "length"
    for every in (-1, -2):
        assert whole(http, "/api/chat", **said("say:Hello", options={"num_predict": every}))["eval_count"] == 6


def test_ignored_options_are_named(http: httpx.Client) -> None:
    options = {"mirostat": 2, "num_gpu": 1, "typical_p": 1.0, "num_ctx": 1 << 20, "a\r\nb: c": 1, "seed": -1}
    body = said("say:a", options=options, keep_alive=0, think="high")
    named = "options.mirostat, options.num_gpu, options.num_ctx, options, keep_alive"
    for answer in (http.post("/api/chat", json={**body, "stream": stream}) for stream in (False, True)):
        assert answer.status_code == 200, answer.text
        last = json.loads(answer.text.splitlines()[-1])
        assert last["warning"] == f"without effect here: {answer.headers['x-minisgl-ignored']}"
        assert answer.headers["x-minisgl-ignored"].removeprefix("think, ") == named
    assert "warning" not in whole(http, "/api/chat", **said("say:a", keep_alive="5m", options={"mirostat": 0}))


def test_calls_and_results_come_back_in(http: httpx.Client, server: Frontend) -> None:
    call = {"function": {"name": "rate", "arguments": {"rank": 7}}}
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rate."},
        {"role": "assistant", "content": "", "thinking": "So.", "tool_calls": [call, call]},
        {"role": "tool", "tool_name": "rate", "content": "rated one"},
        {"role": "tool", "content": "rated two"},
        {"role": "user", "content": "back in say:ok"},
    ]
    assert whole(http, "/api/chat", messages=history, tools=[TOOL])["message"]["content"] == "ok"
    prompt = prompt_text(server.engine.wait_for_request("back in say:ok"))
    places = [prompt.index(text) for text in ("Be brief.", '"rank": 7', "rated one", "rated two", "back in")]
    assert places == sorted(places)


def test_a_result_belongs_to_the_first_open_call_of_its_tool() -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": name}} for name in "abb"]}
    results = [{"role": "tool", "tool_name": name} for name in ("b", None, "b", "a")]
    parsing: Any = None  # not asked
    body = OllamaChatRequest.model_validate({"messages": [called, *results]})
    found = conversation_of(parsing, body)["messages"][1:]
    assert [one.get("tool_call_id") for one in found] == ["call_0_1", "call_0_0", "call_0_2", None]


def test_format_becomes_a_grammar(http: httpx.Client, server: Frontend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for i, form in enumerate(("json", schema, "")):
        whole(http, "/api/chat", **said(f"form {i} say:{{}}", format=form))
        grammar = server.engine.wait_for_request(f"form {i}").sampling.grammar
        assert (grammar is None) == (form == "")
    assert "json or a JSON schema" in check_error(http.post("/api/chat", json=said("say:a", format="xml")), 400)


def test_think_sets_the_template_variable(http: httpx.Client, front_end: str) -> None:
    thought = "say:<think>Hm.</think>Yes."
    for think in (None, True, "low"):
        message = whole(http, "/api/chat", **said(thought, think=think))["message"]
        assert (message["thinking"], message["content"]) == ("Hm.", "Yes.")
    whole(http, "/api/chat", **said(thought, think=False))
    with frontend(front_end=front_end) as running, running.http() as plain:
        assert "does not support thinking" in check_error(plain.post("/api/chat", json=said("say:a", think=True)), 400)
        assert whole(plain, "/api/chat", **said("say:a", think=False))["message"]["content"] == "a"


def test_log_probabilities(http: httpx.Client) -> None:
    body = said("say:ab", logprobs=True, top_logprobs=2)
    found = whole(http, "/api/chat", **body)["logprobs"]
    assert [one["token"] for one in found[:2]] == ["a", "b"] and len(found[0]["top_logprobs"]) == 2
    assert [one for part in lines(http, "/api/chat", **body) for one in part.get("logprobs", ())] == found


def test_a_prompt_is_a_message_unless_it_is_raw(http: httpx.Client, server: Frontend) -> None:
    found = whole(http, "/api/generate", prompt="templated say:Hello", system="Be brief.")
    assert (found["response"], found["done_reason"], found["eval_count"]) == ("Hello", "stop", 6)
    prompt = prompt_text(server.engine.wait_for_request("templated"))
    assert prompt == "<system>Be brief.</system>\n<user>templated say:Hello</user>\n<assistant>"
    *parts, last = lines(http, "/api/generate", prompt="raw say:Hello", raw=True, options={"temperature": 0})
    assert "".join(one["response"] for one in parts) == "Hello" and last["response"] == "" and last["done"]
    assert prompt_text(server.engine.wait_for_request("raw say:")) == "raw say:Hello"
    thought = whole(http, "/api/generate", prompt="say:<think>Hm.</think>Yes.")
    assert (thought["response"], thought["thinking"]) == ("Yes.", "Hm.")


def test_a_gap_is_filled(http: httpx.Client, front_end: str) -> None:
    assert "suffix" in check_error(http.post("/api/generate", json={"prompt": "a", "suffix": "b"}), 400)
    with frontend(front_end=front_end, tokenizer=with_markers()) as running, running.http() as filling:
        assert whole(filling, "/api/generate", prompt="ab", suffix="cd")["prompt_eval_count"] == 7


def test_body_without_prompt_loads_the_model(http: httpx.Client) -> None:
    for path, empty in (("/api/chat", {"message": {"role": "assistant", "content": ""}}), ("/api/generate", {})):
        answer = http.post(path, json={"model": MODEL, "keep_alive": 0})
        found = answer.json()
        assert answer.status_code == 200 and found["done"] is True and found["done_reason"] == "load"
        assert found == {**found, **empty} and found["warning"] == "without effect here: keep_alive"


def test_vectors(embedding: httpx.Client, http: httpx.Client) -> None:
    answer = embedding.post("/api/embed", json={"model": MODEL, "input": ["ab", "c"], "options": {"seed": 1}})
    found = answer.json()
    OllamaEmbedAnswer.model_validate(found, strict=True)
    assert len(found["embeddings"]) == 2 and found["prompt_eval_count"] == 3
    assert found["warning"] == "without effect here: options.seed"
    one = embedding.post("/api/embed", json={"input": "ab", "dimensions": 1}).json()
    assert len(one["embeddings"]) == 1 and len(one["embeddings"][0]) == 1 and "warning" not in one
    assert embedding.post("/api/embeddings", json={"prompt": "ab"}).json() == {"embedding": found["embeddings"][0]}
    long = {"input": "a" * (MAX_SEQ_LEN + 5)}
    assert embedding.post("/api/embed", json=long).json()["prompt_eval_count"] == MAX_SEQ_LEN - 1
    assert "context" in check_error(embedding.post("/api/embed", json={**long, "truncate": False}), 400)
    assert "embeddings need" in check_error(http.post("/api/embed", json={"input": "a"}), 400)


@pytest.mark.parametrize("times", [2, 9, 1000])
def test_embedding_of_a_long_text_is_truncated_at_its_end(embedding: httpx.Client, times: int) -> None:
    tail = "a" * (times * MAX_SEQ_LEN)
    wanted = embedding.post("/api/embed", json={"input": "b" + "a" * (MAX_SEQ_LEN - 2)}).json()["embeddings"]
    for given in ("b" + tail, ["b" + tail]):
        found = embedding.post("/api/embed", json={"input": given}).json()
        assert (found["prompt_eval_count"], found["embeddings"]) == (MAX_SEQ_LEN - 1, wanted)
    both = embedding.post("/api/embed", json={"input": ["c", "b" + tail]}).json()
    assert both["prompt_eval_count"] == MAX_SEQ_LEN and both["embeddings"][1:] == wanted
    assert embedding.post("/api/embeddings", json={"prompt": "b" + tail}).json()["embedding"] == wanted[0]


def test_errors_have_ollama_s_form_and_its_names(http: httpx.Client) -> None:
    image = {"role": "user", "content": "", "images": ["AAAA"]}
    wrong: list[tuple[str, dict[str, Any], int, str]] = [
        ("/api/chat", said("a", model="other"), 404, "model: 'other'"),
        ("/api/chat", {"messages": [image]}, 400, "messages.0.images"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role"),
        ("/api/chat", said("a", options={"temperature": 9}), 400, "options.temperature"),
        ("/api/chat", said("a", options={"num_predict": "x"}), 400, "options.num_predict"),
        ("/api/chat", said("a", format={"type": 5}), 400, "format"),
        ("/api/chat", said("a", tools=[{"type": "function"}]), 400, "tools.0.function"),
        ("/api/chat", said("x" * 5000), 400, "context length"),
        ("/api/generate", {"prompt": "a", "images": ["AAAA"]}, 400, "images"),
        ("/api/generate", {"prompt": "a", "context": [1]}, 400, "context"),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 400, "template"),
        ("/api/generate", {"prompt": "a", "raw": True, "think": True}, 400, "think"),
        ("/api/embed", {}, 400, "input"),
        ("/api/generate", {"prompt": "x" * 5000}, 400, "However, prompt has"),
    ]
    for path, body, status, words in wrong:
        assert words in check_error(http.post(path, json=body), status), (path, body)
    check_error(http.post("/api/chat", content=b"{", headers={"content-type": "application/json"}), 400)


def test_a_failure_in_a_stream_is_its_last_line(http: httpx.Client, server: Frontend) -> None:
    found: list[dict[str, Any]] = []
    with http.stream("POST", "/api/chat", json=said("hang:breaks")) as response:
        req_id = server.engine.wait_for_request("hang:breaks").req_id
        for line in response.iter_lines():
            if not found:
                server.engine.send(failed_step(req_id, "scripted failure"))
            found.append(json.loads(line))
    assert list(found[-1]) == ["error"] and "scripted failure" in found[-1]["error"]
    assert not any(one["done"] for one in found[:-1])
