"""Fields that clients of other servers send: done as there, or refused by name; never ignored without a word."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from minisgl.server.core import fields
from tests.helpers.server import EOS, MAX_SEQ_LEN, Frontend, chat_body, check_error, events, post, prompt_text

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat_body("refused"),
    TEXT: {"prompt": "refused"},
    GENERATE: {"prompt": "refused"},
}


# ---------------------------------------------------------------------------------------------------------- refused

ASKED: dict[str, Any] = {
    "structural_tag": {"structures": []},
    "stop_regex": "a+",
    "use_beam_search": True,
    "length_penalty": 0.5,
    "early_stopping": True,
    "logits_processors": ["x"],
    "custom_params": {"a": 1},
    "return_hidden_states": True,
    "lora_path": "adapter",
    "mm_processor_kwargs": {"a": 1},
    "cache_salt": "pepper",
}
ASKED_OF_CHATS: dict[str, Any] = {
    "function_call": "auto",
    "documents": [{"text": "x"}],
    "chat_template": "{{ messages }}",
    "add_special_tokens": True,
    "enable_thinking": True,
    "max_new_tokens": 5,
    "min_new_tokens": 5,
}


@pytest.mark.parametrize("field", ASKED)
def test_unsupported_fields_are_refused_by_name(http: httpx.Client, server: Frontend, field: str) -> None:
    for path, body in BODIES.items():
        error = check_error(http.post(path, json={**body, field: ASKED[field]}), 400)
        assert (error["param"], error["code"]) == (field, "unsupported_value")
    nested = {"prompt": "refused", "sampling_params": {field: ASKED[field]}}
    assert check_error(http.post(GENERATE, json=nested), 400)["param"] == f"sampling_params.{field}"
    assert not server.engine.requests("refused")


@pytest.mark.parametrize("field", ASKED_OF_CHATS)
def test_unsupported_chat_fields_are_refused_by_name(http: httpx.Client, field: str) -> None:
    body = {**BODIES[CHAT], field: ASKED_OF_CHATS[field]}
    error = check_error(http.post(CHAT, json=body), 400)
    assert (error["param"], error["code"]) == (field, "unsupported_value")


def test_unsupported_fields_that_ask_for_nothing_are_not_named(http: httpx.Client) -> None:
    nothing = {name: values[0] for name, values in fields.SHARED.items() if values}
    answer = http.post(CHAT, json=chat_body("say:ok", **nothing))
    assert answer.status_code == 200 and "x-minisgl-ignored" not in answer.headers, answer.text


def test_refusal_suggests_the_supported_field(http: httpx.Client) -> None:
    for path, field, instead in (
        (CHAT, "max_new_tokens", "max_tokens"),
        (TEXT, "max_completion_tokens", "max_tokens"),
        (TEXT, "top_logprobs", "logprobs"),
    ):
        message = check_error(http.post(path, json={**BODIES[path], field: 5}), 400)["message"]
        assert f"use {instead}" in message
    nested = {"prompt": "a", "sampling_params": {"top_logprobs": 1}}
    assert "use" not in check_error(http.post(GENERATE, json=nested), 400)["message"]


@pytest.mark.parametrize(
    ("path", "table"), [(CHAT, fields.CHAT), (TEXT, fields.COMPLETION), (GENERATE, fields.GENERATE)]
)
def test_neutral_values_are_accepted(http: httpx.Client, path: str, table: fields.Table) -> None:
    body = chat_body("say:fine") if path == CHAT else {"prompt": "say:fine"}
    nothing = {field: values[0] if values else None for field, values in table.items()}
    for more in (nothing, dict.fromkeys(table)):
        assert http.post(path, json={**body, **more}).status_code == 200


def test_reasoning_effort_none_disables_thinking_in_the_template() -> None:
    from minisgl.server.core.bodies import ChatRequest

    def variables(**more: Any) -> object:
        return ChatRequest.model_validate(chat_body("a", **more)).template_variables()

    assert variables() == {}
    assert variables(reasoning_effort="none") == {"enable_thinking": False}
    own = {"enable_thinking": True, "x": 1}
    assert variables(reasoning_effort="none", chat_template_kwargs=own) == own


# ----------------------------------------------------------------------------------------------- words and token ids


def test_bad_words_reach_the_engine_as_ids_with_and_without_a_space(http: httpx.Client, server: Frontend) -> None:
    for i, (path, body) in enumerate(BODIES.items()):
        name = "messages" if path == CHAT else "prompt"
        marked = {name: chat_body(f"bad {i}")["messages"] if path == CHAT else f"bad {i}"}
        post(http, path, **{**body, **marked, "bad_words": ["ab", " c", "\n"], "allowed_token_ids": [97, 98]})
        sampling = server.engine.wait_for_request(f"bad {i}").sampling
        assert sampling.bad_token_ids == ((97, 98), (32, 97, 98), (99,), (32, 99), (10,))
        assert sampling.allowed_token_ids == (97, 98)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("bad_words", "ab", "bad_words"),
        ("bad_words", [5], "bad_words.0"),
        ("bad_words", ["a", ""], "bad_words.1"),
        ("bad_words", ["a" * 257], "bad_words.0"),
        ("bad_words", ["a"] * 257, "bad_words"),
        ("allowed_token_ids", [], "allowed_token_ids"),
        ("allowed_token_ids", [258], "allowed_token_ids"),
        ("allowed_token_ids", [1, -1], "allowed_token_ids.1"),
        ("allowed_token_ids", 5, "allowed_token_ids"),
    ],
)
def test_bad_words_and_ids_are_checked(
    http: httpx.Client, server: Frontend, field: str, value: object, param: str
) -> None:
    for path, body in BODIES.items():
        assert check_error(http.post(path, json={**body, field: value}), 400)["param"] == param
    assert not server.engine.requests("refused")


# -------------------------------------------------------------------------------------------- what answers tell more


@pytest.mark.parametrize("order", ["say", "burst"])
def test_token_ids_of_prompt_and_answer(http: httpx.Client, order: str) -> None:
    """Whole and in pieces; half a character's ids come with the next piece."""
    prompt, answer = list(f"{order}:hé".encode()), [*"hé".encode(), EOS]
    for n in (1, 2):
        body = {"prompt": [prompt], "return_token_ids": True, "n": n}
        for choice in post(http, TEXT, **body)["choices"]:
            assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, answer)
        found: dict[int, list[int]] = {}
        for event in events(http.post(TEXT, json={**body, "stream": True}).text)[:-1]:
            [choice] = event["choices"]
            assert ("prompt_token_ids" in choice) == (choice["index"] not in found)
            found[choice["index"]] = found.get(choice["index"], []) + choice["token_ids"]
        assert found == dict.fromkeys(range(n), answer)


@pytest.mark.parametrize("order", ["say", "burst"])
def test_token_ids_in_chats(http: httpx.Client, order: str) -> None:
    text = f"{order}:hé"
    prompt, answer = list(f"<user>{text}</user>\n<assistant>".encode()), [*"hé".encode(), EOS]
    for n in (1, 2):
        body = chat_body(text, return_token_ids=True, n=n)
        whole = post(http, CHAT, **body)
        assert whole["prompt_token_ids"] == prompt
        assert [choice["token_ids"] for choice in whole["choices"]] == [answer] * n
        first, *rest = events(http.post(CHAT, json={**body, "stream": True}).text)[:-1]
        assert first["prompt_token_ids"] == prompt and not any("prompt_token_ids" in event for event in rest)
        for i in range(n):
            choices = [choice for event in rest for choice in event["choices"] if choice["index"] == i]
            assert [one for choice in choices for one in choice.get("token_ids", [])] == answer
            assert "".join(choice["delta"].get("content", "") for choice in choices) == "hé"


def test_token_ids_of_generate(http: httpx.Client) -> None:
    body = {"prompt": "say:hé", "return_token_ids": True}
    whole = post(http, GENERATE, **body)
    assert whole["prompt_token_ids"] == list(b"say:h\xc3\xa9") and whole["token_ids"] == [*"hé".encode(), EOS]
    *lines, done = [json.loads(line) for line in http.post(GENERATE, json={**body, "stream": True}).text.splitlines()]
    assert lines[0]["prompt_token_ids"] == whole["prompt_token_ids"] and done["event"] == "done"
    assert [one for line in lines for one in line["token_ids"]] == whole["token_ids"]
    assert "".join(line["text_delta"] for line in lines) == "hé"


def test_usage_in_every_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in ((CHAT, chat_body("say:abc")), (TEXT, {"prompt": "say:abc"})):
        *chunks, last, _ = events(http.post(path, json={**body, "stream": True, "stream_options": options}).text)
        told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert told == sorted(told) and told[-1] == 4 and last["usage"] == chunks[-1]["usage"]
        assert (told[0] == 0) == (path == CHAT)  # whose first chunk has a role and no text
    asked = {"prompt": "say:abc", "stream": True, "stream_options": options}
    lines = [json.loads(line) for line in http.post(GENERATE, json=asked).text.splitlines()]
    assert all(line["usage"]["prompt_tokens"] == 7 for line in lines)
    asked["stream_options"] = {"continuous_usage_stats": True}
    first, *_ = [json.loads(line) for line in http.post(GENERATE, json=asked).text.splitlines()]
    assert "usage" not in first


# ----------------------------------------------------------------------------------------------------------- prompts


def test_the_last_tokens_of_a_prompt_are_kept(http: httpx.Client, server: Frontend) -> None:
    long = "x" * (2 * MAX_SEQ_LEN)
    for i, (path, body, expected) in enumerate(
        (
            (TEXT, {"prompt": f"{long}kept 0 say:ok"}, "kept 0 say:ok"),
            (TEXT, {"prompt": list(f"{long}kept 1 say:ok".encode())}, "kept 1 say:ok"),
            (GENERATE, {"prompt": f"{long}kept 2 say:ok"}, "kept 2 say:ok"),
            (CHAT, {"prompt": f"{long}kept 3 say:ok"}, "kept 3 say:ok"),
            (CHAT, chat_body(f"{long}kept 4 say:ok"), "kept 4 say:ok</user>\n<assistant>"),
        )
    ):
        answer = post(http, path, **body, truncate_prompt_tokens=len(expected), max_tokens=8)
        assert answer["usage"]["prompt_tokens"] == len(expected)
        assert prompt_text(server.engine.wait_for_request(f"kept {i}")) == expected
    short = {"prompt": ["say:a", f"{long}say:b"], "truncate_prompt_tokens": 6, "echo": True, "max_tokens": 1}
    assert [choice["text"] for choice in post(http, TEXT, **short)["choices"]] == ["say:aa", "xsay:bb"]


def test_minus_one_keeps_what_leaves_room_for_the_answer(http: httpx.Client) -> None:
    body = {"prompt": "x" * 600 + "fill:", "truncate_prompt_tokens": -1, "max_tokens": 12}
    usage = post(http, TEXT, **body)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (MAX_SEQ_LEN - 12, 12)
    assert post(http, CHAT, **chat_body("x" * 600, truncate_prompt_tokens=-1))["usage"]["total_tokens"] == MAX_SEQ_LEN
    assert post(http, TEXT, **{**body, "prompt": "say:ok"})["choices"][0]["text"] == "ok"


def test_truncate_prompt_tokens_out_of_range_is_refused(http: httpx.Client) -> None:
    for path, body in BODIES.items():
        for value in (0, -2, MAX_SEQ_LEN, "5", 1.5):
            error = check_error(http.post(path, json={**body, "truncate_prompt_tokens": value}), 400)
            assert error["param"] == "truncate_prompt_tokens"
    nested = {"prompt": "a", "sampling_params": {"truncate_prompt_tokens": 0}}
    assert check_error(http.post(GENERATE, json=nested), 400)["param"] == "sampling_params.truncate_prompt_tokens"
    body = {"prompt": "x" * 9 * MAX_SEQ_LEN, "truncate_prompt_tokens": 5}
    assert check_error(http.post(TEXT, json=body), 400)["code"] == "context_length_exceeded"
    assert check_error(http.post(TEXT, json={**body, "prompt": [258] * 600 + [1] * 5}), 400)["param"] == "prompt"


# --------------------------------------------------------------------------------------------------------- generate


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
def test_generate_takes_its_sampling_fields_at_the_top(http: httpx.Client, server: Frontend, name: str) -> None:
    body = post(
        http, GENERATE, **{name: 3}, prompt=f"top {name} say:Hello", temperature=0, ignore_eos=True, stop=["zz"]
    )
    assert body["text"] == "Hel" and body["finish_reason"] == "length"
    sampling = server.engine.wait_for_request(f"top {name}").sampling
    assert (sampling.temperature, sampling.ignore_eos, sampling.stop, sampling.max_tokens) == (0, True, ("zz",), 3)


def test_generate_takes_the_names_of_other_servers(http: httpx.Client, server: Frontend) -> None:
    post(
        http, GENERATE, text="names say:Hello", min_new_tokens=2, sampling_params={"sampling_seed": 7, "max_tokens": 4}
    )
    sampling = server.engine.wait_for_request("names").sampling
    assert (sampling.min_tokens, sampling.seed, sampling.max_tokens) == (2, 7, 4)


def test_generate_accepts_equal_duplicates(http: httpx.Client) -> None:
    twice = {"max_tokens": 2, "max_new_tokens": 2, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    assert post(http, GENERATE, prompt="say:Hello", text="say:Hello", temperature=0.0, **twice)["text"] == "He"


@pytest.mark.parametrize(
    ("body", "one", "other"),
    [
        ({"max_tokens": 3, "max_new_tokens": 4}, "max_tokens", "max_new_tokens"),
        ({"max_tokens": 3, "sampling_params": {"max_tokens": 4}}, "max_tokens", "sampling_params.max_tokens"),
        ({"max_tokens": 3, "sampling_params": {"max_new_tokens": 4}}, "max_tokens", "sampling_params.max_new_tokens"),
        ({"seed": 3, "sampling_params": {"sampling_seed": 4}}, "seed", "sampling_params.sampling_seed"),
        ({"stop": "a", "sampling_params": {"stop": "b"}}, "stop", "sampling_params.stop"),
        ({"stream": True, "sampling_params": {"stream": False}}, "stream", "sampling_params.stream"),
    ],
)
def test_generate_refuses_conflicting_duplicates(
    http: httpx.Client, body: dict[str, Any], one: str, other: str
) -> None:
    message = check_error(http.post(GENERATE, json={"prompt": "refused", **body}), 400)["message"]
    assert one in message.split(" ")[0] + message and other in message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 5}, "temperature"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_new_tokens": -2}, "max_new_tokens"),
        ({"n": 2}, "n"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"logit_bias": {"3": 101}}, "logit_bias.3"),
        ({"sampling_params": {"logit_bias": {"3": 101}}}, "sampling_params.logit_bias.3"),
        ({"sampling_params": {"sampling_seed": "x"}}, "sampling_params.sampling_seed"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"return_logprob": True}, "return_logprob"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"text": "another"}, "prompt"),
    ],
)
def test_generate_names_fields_as_they_were_written(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    error = check_error(http.post(GENERATE, json={"prompt": "refused", **body}), 400)
    assert error["param"] == param and error["message"].startswith(param)


# ------------------------------------------------------------------------------------------------------------- chats


def test_a_chat_with_a_prompt_is_not_rendered(http: httpx.Client, server: Frontend) -> None:
    for i, more in enumerate(({}, {"messages": []}, {"messages": None})):
        answer = post(http, CHAT, prompt=f"raw {i} say:Paris", max_tokens=16, **more)
        assert answer["object"] == "chat.completion" and answer["choices"][0]["message"]["content"] == "Paris"
        assert prompt_text(server.engine.wait_for_request(f"raw {i}")) == f"raw {i} say:Paris"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({}, "messages"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_chat_has_messages_or_a_prompt(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    assert check_error(http.post(CHAT, json=body), 400)["param"] == param


def test_refusals_of_an_assistant_are_part_of_its_history(http: httpx.Client, server: Frontend) -> None:
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "history"},
        {"role": "assistant", "content": [{"type": "text", "text": "So:"}, {"type": "refusal", "refusal": "R1"}]},
        {"role": "assistant", "content": None, "refusal": "R2"},
        {"role": "assistant", "content": "C", "refusal": None},
        {"role": "assistant", "content": [{"type": "text", "text": "T"}], "refusal": "R3"},
        {"role": "user", "content": "say:yes"},
    ]
    assert post(http, CHAT, messages=history)["choices"][0]["message"]["content"] == "yes"
    prompt = prompt_text(server.engine.wait_for_request("history"))
    at = [prompt.index(text) for text in ("So:", "R1", "R2", ">C<", "T", "R3")]
    assert at == sorted(at)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "messages.0"),
        ({"role": "user", "content": "a", "refusal": "no"}, "messages.0"),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}, "messages.0.content.0.refusal"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]}, "messages.0.content.0.refusal"),
        ({"role": "assistant", "content": "a", "refusal": 5}, "messages.0.refusal"),
    ],
)
def test_only_assistants_refuse(http: httpx.Client, message: dict[str, Any], param: str) -> None:
    assert check_error(http.post(CHAT, json={"messages": [message]}), 400)["param"] == param


# ------------------------------------------------------------------------------------------------ limits and numbers


def test_top_p_of_zero_is_greedy(http: httpx.Client, server: Frontend) -> None:
    for path, body in ((TEXT, {"prompt": "nucleus a"}), (CHAT, chat_body("nucleus b"))):
        post(http, path, **body, top_p=0)
    assert all(one.sampling.top_p == 0 and one.sampling.is_greedy for one in server.engine.requests("nucleus"))
