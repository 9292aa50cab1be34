"""Both front ends get the same requests, valid, odd and broken, and answer the same: status, headers, JSON, every
streamed event.

Where the extension has no gateway, the Python server is compared with itself: then it is the comparison that is tested.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from minisgl import receipt
from minisgl.config import ApiKey, EngineConfig, ServerConfig
from minisgl.message import AdapterChanged, AddRequest
from minisgl.tokenizer import Tokenizer
from tests.helpers.answers import Answer, Client, differ
from tests.helpers.bodies import (
    CHAT,
    COMPLETION,
    FUNCTIONS,
    GENERATE,
    agent_bodies,
    answers,
    fails_alike,
    odd_prompts,
    plain_texts,
    scored_completions,
    seeds,
    usual_bodies,
    written,
)
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.edges import at_edges
from tests.helpers.fill_in import MARKERS, with_markers
from tests.helpers.gateway import has_gateway
from tests.helpers.http_requests import GOOD_HEAD, KEY, ORIGIN, Request, framed, requests
from tests.helpers.long_fuzz import for_long
from tests.helpers.server import MODEL, Frontend, chat_body, frontend
from tests.helpers.thinking import marked_ids, thinking_tokenizer

# Bodies of embeddings, responses and messages as clients send them: strategies of hypothesis.
EMBEDDINGS, MESSAGES, RESPONSES = "/v1/embeddings", "/v1/messages", "/v1/responses"

_ids = st.lists(st.integers(0, 255), min_size=1, max_size=9)
inputs = st.one_of(
    plain_texts,
    st.lists(st.one_of(plain_texts, st.just("a")), min_size=1, max_size=4),
    _ids,
    st.lists(_ids, min_size=1, max_size=3),
    st.just(["x"] * 300),
)


@st.composite
def embedding_bodies(draw: st.DrawFn) -> dict[str, Any]:
    body: dict[str, Any] = {"input": draw(inputs)}
    for name, values in {
        "model": ["adapter", "scripted", None],
        "encoding_format": ["float", "base64", None],
        "dimensions": [1, 2, 3, 5, None],
        "pooling": ["mean", "last"],
        "priority": [0, -3],
        "user": ["u", None],
    }.items():
        if draw(st.booleans()):
            body[name] = draw(st.sampled_from(values))
    if draw(st.integers(0, 5)) == 0:
        body |= draw(
            st.sampled_from(
                [
                    {"dimensions": 0},
                    {"dimensions": 1.0},
                    {"encoding_format": "int8"},
                    {"pooling": "max"},
                    {"priority": 9},
                    {"truncate_prompt_tokens": 2},
                    {"model": "other"},
                    {"input": "x" * 600},
                    {"input": ["x"] * 1025},
                    {"unknown": 1},
                ]
            )
        )
    if draw(st.integers(0, 9)) == 0:
        body["input"] = draw(odd_prompts)
    return body


# ---------------------------------------------------------------------------------------------------------- messages

_block = st.one_of(
    plain_texts.map(lambda text: {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}),
    st.just({"type": "text", "text": "a"}),
)
_of_user = st.one_of(
    plain_texts,
    st.lists(_block, min_size=1, max_size=3),
    st.sampled_from(
        [
            [{"type": "tool_result", "tool_use_id": "c", "content": "5"}],
            [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "é"}],
                    "is_error": True,
                },
                {"type": "text", "text": "so"},
            ],
            [{"type": "tool_result", "tool_use_id": "c"}],
        ]
    ),
)
_of_assistant = st.one_of(
    plain_texts,
    st.sampled_from(
        [
            [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "thinking", "thinking": "é"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c", "name": "get", "input": {"a": 1.0, "b": [1e5, None, "é\n"], "c": {}}},
            ],
            [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "b"}],
            [{"type": "tool_use", "id": "c", "name": "now", "input": {}}, {"type": "text", "text": "x"}],
            [],
        ]
    ),
)
_tools = st.lists(st.sampled_from(FUNCTIONS), min_size=1, max_size=3, unique_by=lambda one: str(one["name"])).map(
    lambda found: [
        {"input_schema": {"type": "object"}, **{k: v for k, v in one.items() if k != "parameters"}}
        | ({"input_schema": one["parameters"]} if "parameters" in one else {})
        for one in found
    ]
)
_schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OF_MESSAGES: dict[str, st.SearchStrategy[Any]] = {
    "system": st.one_of(plain_texts, st.lists(_block, max_size=3)),
    "tools": _tools,
    "thinking": st.sampled_from(
        [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}]
    ),
    "stream": st.booleans(),
    "stop_sequences": st.sampled_from([["}"], ["hm", "\n\n"], ["k"], []]),
    "stop": st.sampled_from(["o", ["v"]]),
    "temperature": st.sampled_from([0, 0.5, 1]),
    "top_k": st.sampled_from([0, 5]),
    "top_p": st.sampled_from([0.9, 1]),
    "metadata": st.just({"user_id": "u"}),
    "receipt": st.booleans(),
    "output_config": st.sampled_from([{"effort": "low"}, {"format": {"type": "json_schema", "schema": _schema}}, {}]),
    "output_format": st.just({"type": "json_schema", "schema": _schema}),
    "service_tier": st.sampled_from(["auto", "standard_only"]),
    "model": st.sampled_from(["adapter", "scripted", None]),
    "priority": st.sampled_from([-3, 0]),
    "stop_token_ids": st.just([107]),
    "chat_template_kwargs": st.sampled_from([{"enable_thinking": False}, {"x": [1, 2.5]}]),
}
_odd_messages = st.sampled_from(
    [
        {"max_tokens": 0},
        {"max_tokens": None},
        {"n": 2},
        {"n": 1},
        {"system": 5},
        {"system": [{"type": "image"}]},
        {"tool_choice": {"type": "any"}, "tools": []},
        {"tool_choice": {"type": "tool", "name": "nobody"}},
        {"tools": [{"name": "a b", "input_schema": {}}]},
        {"tools": [{"name": "a", "input_schema": {"maximum": 10**30}}]},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"stop_sequences": [""]},
        {"stop_sequences": ["a"] * 65},
        {"response_format": {"type": "text"}},
        {"thinking": {"type": "often"}},
        {"output_format": {"type": "text"}},
        {"stream_options": {"include_usage": True}},
        {"container": "x"},
        {"logprobs": True},
        {"unknown": 1},
        {"messages": []},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "robot", "content": "a"}]},
        {"messages": [{"role": "assistant", "content": "say:a"}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "c", "name": "n", "input": {}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]},
        {"messages": [{"role": "user", "content": [["text", "a"]]}]},
        {"messages": [["user", "a"]]},
    ]
)


@st.composite
def message_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """As Anthropic's clients send them; the engine's answer is in the last message."""
    body: dict[str, Any] = {"seed": draw(seeds), "max_tokens": draw(st.sampled_from([100, 100, 20])), "messages": []}
    for _ in range(draw(st.integers(0, 2))):
        body["messages"].append({"role": "user", "content": draw(_of_user)})
        body["messages"].append({"role": "assistant", "content": draw(_of_assistant)})
    last = draw(answers)
    for name, values in OF_MESSAGES.items():
        if draw(st.integers(0, 2)) == 0:
            body[name] = draw(values)
    if "tools" in body and draw(st.booleans()):
        choice = draw(st.sampled_from(["auto", "any", "none", "tool"]))
        body["tool_choice"] = {"type": choice, **({"name": body["tools"][0]["name"]} if choice == "tool" else {})}
        if draw(st.booleans()):
            body["tool_choice"]["disable_parallel_tool_use"] = draw(st.booleans())
    if not fails_alike(body) or body.get("stop_sequences"):
        last = last.replace("fail:", "say:", 1)
    body["messages"].append({"role": "user", "content": last})
    if draw(st.integers(0, 7)) == 0:
        body |= draw(_odd_messages)
    if draw(st.integers(0, 7)) == 0:
        body |= [draw(at_edges(MESSAGES))]
    return body


# --------------------------------------------------------------------------------------------------------- responses

_items = st.lists(
    st.sampled_from(
        [
            {"role": "user", "content": "hi"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "é"}], "id": "msg_1"},
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "so"}, {"type": "refusal", "refusal": "n"}],
            },
            {"role": "assistant", "content": "well"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "é"}], "encrypted_content": None},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c", "name": "get", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "é"}]},
            {"role": "user", "content": []},
        ]
    ),
    max_size=5,
)
_response_tools = st.lists(
    st.sampled_from(FUNCTIONS), min_size=1, max_size=3, unique_by=lambda one: str(one["name"])
).map(lambda found: [{"type": "function", **one} for one in found])
_format = {"type": "json_schema", "name": "a", "schema": _schema, "strict": None}
OF_RESPONSES: dict[str, st.SearchStrategy[Any]] = {
    "instructions": plain_texts,
    "tools": _response_tools,
    "parallel_tool_calls": st.booleans(),
    "text": st.sampled_from(
        [{"format": {"type": "text"}}, {"format": {"type": "json_object"}}, {"format": _format}, {}]
    ),
    "reasoning": st.sampled_from([{"effort": "none"}, {"effort": "low", "summary": "auto"}, {"summary": None}]),
    "max_output_tokens": st.sampled_from([100, 20, 1]),
    "max_tool_calls": st.just(3),
    "include": st.sampled_from([["reasoning.encrypted_content"], []]),
    "truncation": st.sampled_from(["auto", "disabled"]),
    "metadata": st.sampled_from([{"a": "b"}, {}]),
    "user": st.just("u"),
    "safety_identifier": st.just("s"),
    "prompt_cache_key": st.just("k"),
    "receipt": st.booleans(),
    "stream": st.booleans(),
    "stop": st.sampled_from(["o", ["v"]]),
    "temperature": st.sampled_from([0, 0.5, 1]),
    "top_p": st.sampled_from([0.9, 1]),
    "service_tier": st.just("auto"),
    "background": st.just(False),
    "model": st.sampled_from(["adapter", "scripted", None]),
    "chat_template_kwargs": st.sampled_from([{"enable_thinking": False}, {"x": [1, 2.5]}]),
}
_odd_responses = st.sampled_from(
    [
        {"previous_response_id": "resp_1"},
        # streamed, it depends on the moment which section has those of a marker
        {"top_logprobs": 2, "stream": False},
        {"include": ["message.output_text.logprobs"], "stream": False},
        {"max_output_tokens": 0},
        {"max_tokens": 5},
        {"n": 2},
        {"background": True},
        {"text": {"format": {"type": "json_schema"}}},
        {"text": {"format": {"type": "xml"}}},
        {"text": {"verbosity": "low"}},
        {"reasoning": {"summary": "detailed"}},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": {"type": "function"}},
        {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "nobody"}]}},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "mcp"}]},
        {"tools": [{"type": "custom", "name": "a"}, {"type": "namespace", "name": "n", "tools": []}]},
        {"tools": [{"type": "function", "name": "a b"}]},
        {"metadata": {"a": 1}},
        {"metadata": {str(i): "x" for i in range(17)}},
        {"response_format": {"type": "text"}},
        {"conversation": "c"},
        {"truncation": "often"},
        {"input": []},
        {"input": None},
        {"input": 5},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": [{"id": "msg_1"}]},
        {"input": [{"role": "tool", "content": "a"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
        {"input": [{"type": "function_call", "call_id": "c"}]},
        {"input": [{"type": "function_call", "call_id": "c", "name": "a", "namespace": "n", "arguments": "{}"}]},
        {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "a", "input": "x"}]},
        {"input": [{"type": "compaction", "encrypted_content": "x"}]},
        {"input": [{"type": "reasoning", "content": "a"}]},
        {"input": [["user", "a"]]},
        {"unknown": 1},
    ]
)


@st.composite
def response_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """As OpenAI's clients send them; the engine's answer is in the last item."""
    body: dict[str, Any] = {"seed": draw(seeds), "store": draw(st.booleans())}
    last = draw(answers)
    for name, values in OF_RESPONSES.items():
        if draw(st.integers(0, 2)) == 0:
            body[name] = draw(values)
    if "tools" in body and draw(st.booleans()):
        name = {"type": "function", "name": body["tools"][0]["name"]}
        allowed = [{"type": "allowed_tools", "mode": mode, "tools": [name]} for mode in ("auto", "required")]
        body["tool_choice"] = draw(st.sampled_from(["auto", "none", "required", name, *allowed]))
    if not fails_alike(body):
        last = last.replace("fail:", "say:", 1)
    body["input"] = draw(st.sampled_from([last, [*draw(_items), {"role": "user", "content": last}]]))
    if draw(st.integers(0, 7)) == 0:
        body |= draw(_odd_responses)
    if draw(st.integers(0, 7)) == 0:
        body |= [draw(at_edges(RESPONSES))]
    return body


FLAGS = (
    *("--engine", "echo", "--cache", "naive", "--max-seq-len", "512", "--served-model-name", "m"),
    *("--api-key", KEY, "--cors-origin", ORIGIN, "--max-body-bytes", "20000", "--slow-client-timeout", "5"),
    *("--context-margin", "7"),
)
LOOSE = settings(
    deadline=None,
    database=None,
    derandomize=True,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)
USUAL_SHARE = 0.95  # that the gateway answers by itself


@dataclass
class Pair:
    """Two servers that differ in their front ends, and a client of each."""

    rust: ServerProcess | Frontend
    python: ServerProcess | Frontend

    def __post_init__(self) -> None:
        self.clients = [Client(_address(self.rust.url)), Client(_address(self.python.url))]

    def ask(self, request: Request) -> list[Answer | None]:
        for client in self.clients:
            client.send(request)
        return [client.receive(request) for client in self.clients]

    def check(self, request: Request) -> Answer | None:
        rust, python = self.ask(request)
        note(f"{request.raw()!r}")
        note(f"rust: {rust}\npython: {python}")
        assert not differ(rust, python, request)
        return python

    def close(self) -> None:
        for client in self.clients:
            client.close()


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    first = "rust" if has_gateway() else "python"
    with serving(*FLAGS, "--frontend", first) as rust, serving(*FLAGS, "--frontend", "python") as python:
        found = Pair(rust, python)
        yield found
        found.close()


def well_formed(answer: Answer | None) -> None:
    """A success, or a refusal in the one shape; whatever came, it is nobody's 422 or 5xx."""
    if answer is not None:
        assert answer.status < 500 and answer.status != 422
        assert answer.status >= 400 or b'"error"' not in answer.body
        assert answer.status < 400 or not answer.body or list(json.loads(answer.body)) == ["error"]


def test_random_requests_get_equal_responses(pair: Pair) -> None:
    """Several hundred, always the same."""

    @settings(LOOSE, max_examples=800)
    @given(requests())
    def run(request: Request) -> None:
        well_formed(pair.check(request))

    run()


@pytest.mark.slow
def test_many_random_requests_get_equal_responses(pair: Pair, times: int) -> None:
    """Others than those."""

    def check(request: Request) -> None:
        well_formed(pair.check(request))

    for_long(check, given(requests()), LOOSE, 4_000 * times)


def counts(server: ServerProcess | Frontend) -> dict[str, int]:
    """Requests by what the gateway did with them."""
    found = httpx.get(f"{server.url}/stats", headers={"Authorization": f"Bearer {KEY}"}).json()["http"]["gateway"]
    return {name: found[name] for name in ("answered", "passed_on")}


def usual(path: str, body: dict[str, Any]) -> Request:
    text = written(body, ascii_only=False).encode()
    return Request("POST", path, framed(GOOD_HEAD, text), text)


@pytest.mark.skipif(not has_gateway(), reason="the extension has no gateway")
@pytest.mark.parametrize("path", [CHAT, COMPLETION, GENERATE])
def test_usual_requests_are_answered_by_the_gateway(pair: Pair, path: str) -> None:
    pair.close()  # what is no plain HTTP made a tunnel of its connection
    before = counts(pair.rust)
    asked = 0
    fresh = Pair(pair.rust, pair.python)  # what was odd on a connection leaves it to the Python server

    @settings(LOOSE, max_examples=60)
    @given(usual_bodies(path))
    def run(body: dict[str, Any]) -> None:
        nonlocal asked
        answer = fresh.check(usual(path, body))
        assert answer is not None and answer.status == 200, answer
        asked += not body.get("receipt")  # which only Python gives

    run()
    fresh.close()
    found = counts(pair.rust)
    answered = found["answered"] - before["answered"]
    assert answered >= USUAL_SHARE * asked, f"{answered} of {asked} were answered by the gateway"


ADAPTER = "adapter"
LIMITED = ServerConfig(
    engine=EngineConfig(model=MODEL, load_format="dummy"),  # which has a digest, and no files
    api_keys=(ApiKey(name="a", key=KEY, max_priority=4),),
)
KINDS = ("tokens", "texts", "plain")


def _serves_adapter(server: Frontend) -> None:
    """Its engine has one that requests may name; receipts have a digest of its folder."""
    folder = str(Path(__file__).parent)
    number = server.on_loop(lambda: server.client.adapters.load(ADAPTER, folder)).number
    server.engine.send(AdapterChanged(number, "loaded"))
    server.wait_until(lambda: server.client.adapters.number(ADAPTER) is not None)


@dataclass
class Agents(Pair):
    """Two servers with scripted engines: what these get is compared, too."""

    def asked(self, server: ServerProcess | Frontend, before: int) -> list[AddRequest]:
        """What reached the engine, without the numbers of requests."""
        assert isinstance(server, Frontend)
        found = [one for one in server.engine.received[before:] if isinstance(one, AddRequest)]
        return [msgspec.structs.replace(one, req_id=i) for i, one in enumerate(found)]

    def check(self, request: Request) -> Answer | None:
        assert isinstance(self.rust, Frontend) and isinstance(self.python, Frontend)
        before = len(self.rust.engine.received), len(self.python.engine.received)
        answer = super().check(request)
        there, here = self.asked(self.rust, before[0]), self.asked(self.python, before[1])
        note(f"rust: {there}\npython: {here}")
        assert there == here
        return answer


def agents(kind: str, config: ServerConfig = LIMITED) -> contextlib.AbstractContextManager[Agents]:
    """`tokens`: the model thinks, and its markers are tokens; `texts`: they are none; `plain`: it does not think, and
    its template knows no tools."""
    tokenizer = Tokenizer.echo() if kind == "plain" else thinking_tokenizer(has_tokens=kind == "tokens")
    settings: dict[str, Any] = {
        "tokenizer": tokenizer,
        "marks": marked_ids(tokenizer),
        "config": config,
        "engine": "cpu",
        "max_seq_len": 4096,
    }
    first = "rust" if has_gateway() else "python"

    @contextlib.contextmanager
    def serving() -> Iterator[Agents]:
        with frontend(front_end=first, **settings) as rust, frontend(**settings) as python:
            for one in (rust, python):
                _serves_adapter(one)
            found = Agents(rust, python)
            yield found
            found.close()

    return serving()


@st.composite
def of_agents(draw: st.DrawFn) -> Request:
    kinds = {
        CHAT: agent_bodies(),
        COMPLETION: scored_completions(),
        EMBEDDINGS: embedding_bodies(),
        MESSAGES: message_bodies(),
        RESPONSES: response_bodies(),
    }
    path = draw(st.sampled_from([CHAT, CHAT, *kinds]))
    body = draw(kinds[path])
    return usual(path, body)


@pytest.mark.parametrize("kind", KINDS)
def test_agent_requests_get_equal_responses(kind: str) -> None:
    """Tools, forms, log probabilities, thoughts, adapters: the gateway answers nearly all chats and completions that
    are in order."""
    num_good = 0
    with agents(kind) as found:

        @settings(LOOSE, max_examples=150)
        @given(of_agents())
        def run(request: Request) -> None:
            nonlocal num_good
            answer = found.check(request)
            needs_python = request.target not in (CHAT, COMPLETION) or json.loads(request.body).get("receipt")
            num_good += answer is not None and answer.status in (200, 500) and not needs_python

        run()
        counted = counts(found.rust) if has_gateway() else {"answered": num_good}
    assert counted["answered"] >= USUAL_SHARE * num_good, f"{counted} of {num_good}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_agent_requests_get_equal_responses(kind: str, times: int) -> None:
    with agents(kind) as found:

        def check(request: Request) -> None:
            found.check(request)

        for_long(check, given(of_agents()), LOOSE, 7_000 * times)


RECEIPTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat_body("say:Water, mostly 40 %")),
    (CHAT, chat_body("burst:Water, mostly", logprobs=True, top_logprobs=1, n=2, stop=["most"])),
    (CHAT, chat_body("say:", model=ADAPTER)),  # nothing but its end
    (COMPLETION, {"prompt": "say:10 and 2", "logprobs": 0, "stop_token_ids": [50], "max_tokens": 30}),
    (COMPLETION, {"prompt": ["say:\xe9", "say:b"], "n": 2, "temperature": 0.3, "logit_bias": {"65": 1.5}}),
    (MESSAGES, chat_body("say:Water", max_tokens=4)),
    (RESPONSES, {"input": "say:Water", "store": False}),
]


def signing(folder: Path) -> ServerConfig:
    """With a key of receipts."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "key").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    return msgspec.structs.replace(LIMITED, receipt_key=str(folder / "key"))


@pytest.mark.parametrize("stream", [False, True])
def test_receipts_are_given_behind_the_gateway(stream: bool, tmp_path: Path) -> None:
    """The same, signed, as by the Python server alone."""
    with agents("plain", signing(tmp_path)) as found:
        for path, body in RECEIPTS:
            request = usual(path, {**body, "seed": 5, "receipt": True, "stream": stream})
            answer, other = found.ask(request)
            assert answer is not None and answer.status == 200 and not differ(answer, other, request), (answer, other)
            num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
            assert answer.body.count(b'"signer":"') == body.get("n", 1) * num_prompts


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stream", [False, True])
def test_a_receipt_that_cannot_be_made_is_an_error(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("ordered by a test")

    with agents("plain") as found:
        request = usual(CHAT, chat_body("say:Water", seed=5, receipt=True, stream=stream))
        assert not differ(*found.ask(request), request)
        monkeypatch.setattr(receipt, "make", fail)
        for answer in found.ask(request):
            assert answer is not None and answer.status == (200 if stream else 500)
            assert b'"internal_error"' in answer.body and b'"receipt"' not in answer.body


def test_receipts_are_refused_alike_where_unsupported() -> None:
    """Of an engine whose sums depend on the batch; others go on."""
    first = "rust" if has_gateway() else "python"
    with frontend(front_end=first) as rust, frontend() as python:
        pair = Pair(rust, python)
        for more, status in (({"receipt": True}, 400), ({}, 200), ({"receipt": {"adapter": 0}}, 400)):
            request = usual(CHAT, chat_body("say:a", seed=5, **more))
            one, other = pair.ask(request)
            assert one is not None and one.status == status and not differ(one, other, request), (one, other)
        pair.close()


def test_fill_in_the_middle_gives_equal_responses() -> None:
    """`suffix`, for a tokenizer that has the tokens, against engines of scripted replies."""
    first = "rust" if has_gateway() else "python"
    with frontend(front_end=first, tokenizer=with_markers()) as rust, frontend(tokenizer=with_markers()) as python:
        pair = Pair(rust, python)
        good: list[Any] = ["</user>", "</user>" + MARKERS[0], "", None]
        for status, more in (
            *((200, {"suffix": one, "stream": stream}) for one in good for stream in (False, True)),
            *((400, {"suffix": one}) for one in (5, "x" * 600)),
            (400, {"suffix": "</user>", "echo": True}),
        ):
            body = {"model": MODEL, "prompt": "def f(say:gap", "max_tokens": 20, "return_token_ids": True, **more}
            request = usual(COMPLETION, body)
            one, other = pair.ask(request)
            assert one is not None and one.status == status and not differ(one, other, request), (one, other)
        pair.close()


@given(st.data())
@settings(LOOSE, max_examples=50)
def test_the_comparison_sees_differences(data: st.DataObject) -> None:
    """Of an answer that was changed anywhere but in what may differ."""
    request = Request("POST", CHAT, ())
    body = b'{"id":"chatcmpl-0123456789abcdef0123456789abcdef","created":5,"choices":[{"index":0,"text":"ab"}]}'
    head = [("content-type", "application/json"), ("x-request-id", "req-0123456789abcdef01234567"), ("date", "1")]
    one = Answer(200, head, body, False)
    same = Answer(200, [*head[:2], ("date", "2")], body.replace(b"5,", b"6,", 1), False)
    assert not differ(one, same, request)
    at = data.draw(st.integers(body.index(b"choices"), len(body) - 1))
    other = Answer(200, head, body[:at] + b"1" + body[at + 1 :], False)
    with contextlib.suppress(ValueError):  # no JSON any more
        assert other.body == body or differ(one, other, request)
    assert differ(one, Answer(201, head, body, False), request)
    assert differ(one, Answer(200, head[:1], body, False), request)
    assert differ(one, Answer(200, head, body, True), request)
    assert differ(one, None, request)


def test_what_a_seed_would_fix_is_not_compared_without_one() -> None:
    """The text, how it ended, and which stop string ended it; how the answer is built still is."""

    def answer(more: str, last: str = "}") -> Answer:
        body = f'{{"choices":[{{"index":0,"text":{more}{last}]}}'
        head = [("content-type", "application/json"), ("content-length", str(len(body)))]
        return Answer(200, head, body.encode(), False)

    one, other = answer('"","finish_reason":"stop","matched_stop":"a"'), answer('"l","finish_reason":"length"')
    free, seeded = Request("POST", COMPLETION, (), is_seeded=False), Request("POST", COMPLETION, ())
    assert not differ(one, other, free)
    assert differ(one, other, seeded)
    assert differ(one, answer('"l","finish_reason":"length"', ',"x":1}'), free)


def stream(*events: str) -> Answer:
    body = "".join(f"data: {one}\n\n" for one in events)
    return Answer(200, [("content-type", "text/event-stream; charset=utf-8")], body.encode(), False)


def test_the_comparison_joins_events() -> None:
    def event(text: str, reason: str = "null", index: int = 0, more: str = "") -> str:
        return f'{{"choices":[{{"index":{index},"text":"{text}","finish_reason":{reason}}}]{more}}}'

    request = Request("POST", COMPLETION, ())
    one = stream(event("a"), event("b"), event("c", '"stop"'), "[DONE]")
    assert not differ(one, stream(event("ab"), event("c", '"stop"'), "[DONE]"), request)
    assert not differ(one, stream(event("abc", '"stop"'), "[DONE]"), request)
    for other in (
        stream(event("a"), event("x"), event("c", '"stop"'), "[DONE]"),
        stream(event("a"), event("b"), event("c", '"length"'), "[DONE]"),
        stream(event("a"), event("b"), event("c", '"stop"')),
        stream(event("a"), event("b", more=',"usage":null'), event("c", '"stop"'), "[DONE]"),
        stream(event("a"), event("b"), event("c", '"stop"'), '{"error":{}}', "[DONE]"),
        stream(event("a"), event("b", index=1), event("c", '"stop"'), "[DONE]"),
    ):
        assert differ(one, other, request)
