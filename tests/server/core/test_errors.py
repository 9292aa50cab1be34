"""What clients do wrong: each gets a 4xx in OpenAI's shape that names the field, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.server import MAX_SEQ_LEN, MODEL, Frontend, chat_body, check_error

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HUGE = 10**30


@pytest.fixture
def http(server: Frontend) -> Iterator[httpx.Client]:
    """Afterwards the server must still answer, and nothing of a refused request may have reached the engine."""
    with server.http() as client:
        yield client
        assert client.post(TEXT, json={"prompt": "say:on"}).json()["choices"][0]["text"] == "on"


SAMPLING: list[tuple[str, object]] = [
    ("temperature", "hot"),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", True),
    ("temperature", [1]),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", HUGE),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_p", "1"),
    ("top_p", float("-inf")),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", HUGE),
    ("max_tokens", -2),
    ("max_tokens", 1.0),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("max_tokens", HUGE),
    ("min_tokens", -1),
    ("n", 0),
    ("n", 129),
    ("n", False),
    ("seed", "x"),
    ("seed", 2**63),
    ("seed", 1.5),
    ("stop", ""),
    ("stop", 5),
    ("stop", [str(i) for i in range(65)]),
    ("stop", ["a", ""]),
    ("stop", {}),
    ("stop_token_ids", 5),
    ("stop_token_ids", [258]),
    ("stop_token_ids", [1] * 300),
    ("ignore_eos", 1),
    ("stream", "yes"),
    ("stream_options", True),
    ("model", 5),
    ("presence_penalty", 2.5),
    ("presence_penalty", "much"),
    ("frequency_penalty", -3),
    ("logit_bias", {"258": 1}),
    ("logit_bias", {"five": 1}),
    ("logit_bias", {"-5": 1}),
    ("logit_bias", [5]),
    ("repetition_penalty", 0),
    ("repetition_penalty", 11),
    ("min_p", 1.1),
    ("min_p", -0.1),
    ("priority", 2**31),
    ("user", 5),
    ("metadata", "m"),
    ("response_format", "json"),
    ("response_format", ["text"]),
    ("include_stop_str_in_output", True),
    ("skip_special_tokens", False),
]


@pytest.mark.parametrize(("field", "value"), SAMPLING)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_sampling_fields(http: httpx.Client, server: Frontend, field: str, value: object, stream: bool) -> None:
    for path, body in ((CHAT, chat_body("refused")), (TEXT, {"prompt": "refused"})):
        sent = json.dumps({"stream": stream, **body, field: value})  # httpx itself refuses NaN
        error = check_error(http.post(path, content=sent), 400)
        assert error["param"] == field and error["message"].startswith(field)
        assert error["type"] == "invalid_request_error"
    assert not server.engine.requests("refused")


@pytest.mark.parametrize(
    ("field", "value"), [("stop", ["a", 5]), ("stop_token_ids", [-1]), ("stop_token_ids", [1, True])]
)
def test_bad_items_are_named_by_their_place(http: httpx.Client, field: str, value: list[object]) -> None:
    error = check_error(http.post(TEXT, json={"prompt": "a", field: value}), 400)
    assert error["param"] == f"{field}.{len(value) - 1}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 2),
        ("top_logprobs", 2),  # without logprobs
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", []),
        ("add_generation_prompt", "no"),
        ("continue_final_message", 1),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("modalities", ["audio"]),
        ("audio", {}),
        ("max_completion_tokens", -2),
        ("max_completion_tokens", "5"),
    ],
)
def test_chat_fields(http: httpx.Client, field: str, value: object) -> None:
    assert check_error(http.post(CHAT, json=chat_body("refused", **{field: value})), 400)["param"] == field


def test_more_top_logprobs_than_there_may_be(http: httpx.Client) -> None:
    body = chat_body("refused", logprobs=True, top_logprobs=21)
    assert check_error(http.post(CHAT, json=body), 400)["param"] == "top_logprobs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", -1),
        ("suffix", "x"),
        ("best_of", 0),
        ("best_of", 129),
        ("echo", "yes"),
    ],
)
def test_completion_fields(http: httpx.Client, field: str, value: object) -> None:
    assert check_error(http.post(TEXT, json={"prompt": "refused", field: value}), 400)["param"] == field


def test_the_best_of_a_stream_is_not_known(http: httpx.Client) -> None:
    body = {"prompt": "refused", "best_of": 2, "stream": True}
    assert check_error(http.post(TEXT, json=body), 400)["param"] == "best_of"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        ([5], "messages.0"),
        ([{}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": "a"}, {"role": "king", "content": "b"}], "messages.1.role"),
        ([{"role": "user", "content": ["a"]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content.0.type"),
    ],
)
def test_bad_messages(http: httpx.Client, messages: object, param: str) -> None:
    assert check_error(http.post(CHAT, json={"messages": messages}), 400)["param"] == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt"),
        ([[]], "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        (None, "prompt"),
        (["a", 5], "prompt.1"),
        ([5, "a"], "prompt.1"),
        ([-1], "prompt.0"),
        ([True], "prompt.0"),
        ([1.5], "prompt.0"),
        ([HUGE], "prompt.0"),
        ([258], "prompt"),
        ([[1], [258]], "prompt"),
        ([[1], 2], "prompt.1"),
        ([[1], ["a"]], "prompt.1.0"),
        (["a"] * 257, "prompt"),
    ],
)
def test_bad_prompts(http: httpx.Client, prompt: object, param: str) -> None:
    assert check_error(http.post(TEXT, json={"prompt": prompt}), 400)["param"] == param


def test_a_missing_field_says_so(http: httpx.Client) -> None:
    assert check_error(http.post(TEXT, json={}), 400)["code"] == "missing_required_parameter"
    assert check_error(http.post(CHAT, json={}), 400)["param"] == "messages"


def test_too_many_choices_are_refused(http: httpx.Client) -> None:
    for stream in (False, True):
        body = {"prompt": ["refused"] * 9, "n": 128, "stream": stream}
        assert check_error(http.post(TEXT, json=body), 400)["param"] == "n"


@pytest.mark.parametrize("stream", [False, True])
def test_context_length(http: httpx.Client, server: Frontend, stream: bool) -> None:
    for path, field, body in (
        (TEXT, "prompt", {"prompt": "r" * MAX_SEQ_LEN}),
        (TEXT, "prompt", {"prompt": [[1], [1] * MAX_SEQ_LEN]}),
        (CHAT, "messages", chat_body("r" * MAX_SEQ_LEN)),
        ("/generate", "input_ids", {"input_ids": [1] * (MAX_SEQ_LEN + 100)}),
    ):
        error = check_error(http.post(path, json={**body, "stream": stream}), 400)
        assert error["code"] == "context_length_exceeded" and error["param"] == field
        # LiteLLM looks for this phrase, in lower case
        assert f"this model's maximum context length is {MAX_SEQ_LEN} tokens. " in error["message"].lower()
        assert field in error["message"]
    longest = "say:" + "x" * (MAX_SEQ_LEN - 5)  # leaves room for one token
    answer = http.post(TEXT, json={"prompt": longest, "max_tokens": 99}).json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a"',
        b"null",
        b"[]",
        b'"prompt"',
        b'{"prompt": "\xff\xfe"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": "\\ud80"}',
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 50_000,
        b'{"prompt": "a", "seed": ' + b"1" * 100_000 + b"}",
        b"\x00" * 1000,
        "prompt=a&model=b".encode("utf-16"),
    ],
    ids=range(15),
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/generate"])
def test_broken_json(http: httpx.Client, path: str, body: bytes) -> None:
    error = check_error(http.post(path, content=body), 400)
    assert error["code"] == "invalid_json" and error["message"].startswith("body: ")


def test_deep_but_valid_json_is_refused_by_its_field(http: httpx.Client) -> None:
    deep = b'{"prompt":' + b"[" * 150 + b"]" * 150 + b"}"
    assert check_error(http.post(TEXT, content=deep), 400)["param"] == "prompt.0.0"


def test_half_a_million_bad_items_are_one_error(http: httpx.Client) -> None:
    for path, field in ((TEXT, "prompt"), (CHAT, "messages"), (TEXT, "stop"), ("/generate", "input_ids")):
        body = b'{"prompt":"a","%s":[%s1.5]}' % (field.encode(), b"1.5," * 500_000)
        if field == "prompt":
            body = body.replace(b'"prompt":"a",', b"", 1)
        assert check_error(http.post(path, content=body), 400)["param"] == f"{field}.0"


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model(http: httpx.Client, stream: bool) -> None:
    for path, body in ((CHAT, chat_body("refused")), (TEXT, {"prompt": "refused"}), ("/generate", {"prompt": "a"})):
        error = check_error(http.post(path, json={**body, "model": "gpt-99", "stream": stream}), 404)
        assert error["code"] == "model_not_found" and error["param"] == "model" and "gpt-99" in error["message"]
    assert check_error(http.get("/v1/models/gpt-99"), 404)["code"] == "model_not_found"
    assert http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    for path in ("/", "/v2", "/v2/chat/completions", "/v1/completions/x", "/%ff%00%ed%a0%80", "/v1/embeddings/x"):
        assert check_error(http.post(path, json={}), 404)["code"] == "not_found"
    response = http.get(CHAT)
    assert check_error(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    check_error(http.delete("/health"), 405)


def test_a_body_over_the_limit(http: httpx.Client) -> None:
    body = b'{"prompt": "' + b"x" * 50_000_000 + b'"}'
    for path in (CHAT, TEXT, "/generate"):
        assert check_error(http.post(path, content=body), 413)["code"] == "body_too_large"
    pieces = (b"x" * 1_000_000 for _ in range(50))  # chunked: no length is announced
    assert check_error(http.post(TEXT, content=pieces), 413)["code"] == "body_too_large"
