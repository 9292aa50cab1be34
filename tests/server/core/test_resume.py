"""A stream that was begun on one server and is taken up on another: what a client gets is one stream, wherever it was
cut, for every API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import msgspec
import pytest

from minisgl.config import ConfigError
from minisgl.server.core.resume import LINE, MARKS, Mark, Said
from tests.helpers.server import CONFIG, Frontend, chat_body, check_error, frontend

pytestmark = pytest.mark.python_front_end  # the gateway writes no marks

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_call>'
TOOL = {"name": "add", "parameters": {"type": "object"}}
TEXT = "say:Grüße aus Köln, 漢字!"


def turn(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], "stream": True, **more}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", turn(TEXT, stream_options={"include_usage": True})),
    "chat, logprobs": ("/v1/chat/completions", turn(TEXT, logprobs=True, top_logprobs=1)),
    "chat, n": ("/v1/chat/completions", turn(TEXT, n=3)),
    "chat, stop string": ("/v1/chat/completions", turn("say:one two three", stop=["wo t"])),
    "chat, length": ("/v1/chat/completions", turn("say:one two three", max_tokens=5)),
    "chat, thoughts": ("/v1/chat/completions", turn("say:<think>hm hm</think>so it is")),
    "chat, call": ("/v1/chat/completions", turn("call", tools=[{"type": "function", "function": TOOL}])),
    "completions": ("/v1/completions", {"model": "scripted", "prompt": ["say:abc def", "say:ghi"], "stream": True}),
    "completions, logprobs": ("/v1/completions", {"prompt": "say:abc def", "logprobs": 1, "stream": True}),
    "responses": ("/v1/responses", {"model": "scripted", "input": TEXT, "stream": True}),
    "responses, call": (
        "/v1/responses",
        {"model": "scripted", "input": "call", "tools": [{"type": "function", **TOOL}], "stream": True},
    ),
    "messages": (
        "/v1/messages",
        {"model": "scripted", "max_tokens": 40, "messages": turn(TEXT)["messages"], "stream": True},
    ),
    "generate": ("/generate", {"prompt": "say:abc def", "stream": True}),
    "sglang": ("/generate", {"text": "say:abc def", "stream": True, "sampling_params": {"max_new_tokens": 30}}),
}


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[Frontend]:
    config = msgspec.structs.replace(CONFIG, resumable=True, tool_call_parser="hermes", reasoning_parser="qwen3")
    with frontend(front_end=front_end, config=config, max_seq_len=2048, replies={"call": CALL}) as running:
        running.engine.pace_s = 0.001  # else a whole text comes at once
        yield running
        running.wait_until(lambda: running.num_live == 0)


def asked(
    http: httpx.Client, path: str, body: dict[str, Any], said: Said | None = None
) -> tuple[list[bytes], list[Mark]]:
    """What stood before each mark, and at last what came after them; and the marks."""
    head = b"" if said is None else msgspec.json.encode(said)
    headers = {MARKS.decode(): str(len(head)), "content-type": "application/json"}
    answer = http.post(path, content=head + json.dumps(body).encode(), headers=headers)
    assert answer.status_code == 200, answer.text
    pieces, marks = [b""], list[Mark]()
    for line in answer.content.splitlines(keepends=True):
        if line.startswith(LINE):
            marks.append(msgspec.json.decode(line[len(LINE) :], type=Mark))
            pieces.append(b"")
        else:
            pieces[-1] += line
    return pieces, marks


def folded(stream: bytes) -> dict[int, list[Any]]:
    """Its events by choice, with texts of the same kind that follow each other joined: tokens come together as they
    happen to."""
    found: dict[int, list[Any]] = {}
    for line in stream.decode().splitlines():
        data = line.removeprefix("data: ")
        if not data.startswith("{"):
            continue
        event = json.loads(data)
        choice = (event.get("choices") or [{"index": -1}])[0]
        # these two come with the last text, or alone
        end, stop = (choice.pop(name, None) if "text" in choice else None for name in ("finish_reason", "matched_stop"))
        events = found.setdefault(choice["index"], [])
        shape, texts = split(event)
        if events and texts and events[-1][0] == shape:
            events[-1][1] = [before + text for before, text in zip(events[-1][1], texts, strict=True)]
        else:
            events.append([shape, texts])
        if end is not None:
            events.append([[end, stop], []])
    return found


JOINED = {"content", "reasoning_content", "reasoning", "arguments", "text", "text_delta", "partial_json", "thinking"}
LISTS = {"tokens", "token_logprobs", "top_logprobs", "text_offset", "output_ids", "token_ids"}
PASSING = {"sequence_number", "e2e_latency", "completed_at", "usage"}  # usage is said of each chunk


def split(event: Any, name: str = "") -> tuple[Any, list[Any]]:
    """What it says, and the texts and lists that grow."""
    if isinstance(event, dict):
        if event.get("type", "").endswith(".delta") and isinstance(event.get("delta"), str):
            shape, texts = split({key: value for key, value in event.items() if key != "delta"})
            return shape, [*texts, event["delta"]]
        found = {key: split(value, key) for key, value in event.items() if key not in PASSING}
        return {key: shape for key, (shape, _) in found.items()}, [one for _, texts in found.values() for one in texts]
    if (name in JOINED and isinstance(event, str)) or (name in LISTS and isinstance(event, list)):
        return "...", [event]
    if name == "content" and isinstance(event, list) and event and "token" in event[0]:  # log probabilities of chat
        return "...", [event]
    if isinstance(event, list):
        parts = [split(one, name) for one in event]
        return [shape for shape, _ in parts], [one for _, texts in parts for one in texts]
    return event, []


def numbers(stream: bytes) -> list[int]:
    found = [json.loads(line[6:]) for line in stream.decode().splitlines() if line.startswith("data: {")]
    return [event["sequence_number"] for event in found if "sequence_number" in event]


@pytest.mark.parametrize("name", BODIES)
def test_stream_cut_anywhere_continues_identically(server: Frontend, http: httpx.Client, name: str) -> None:
    path, body = BODIES[name]
    pieces, marks = asked(http, path, body)
    whole = b"".join(pieces)
    origin = marks[0].origin
    assert origin is not None
    assert marks
    for num_kept in range(len(marks) + 1):
        said = Said(origin, [mark.tokens for mark in marks[:num_kept]])
        more, new_marks = asked(http, path, body, said)
        joined = b"".join(pieces[:num_kept] + more)
        if path != "/generate":  # SGLang's events have all of the text so far
            assert folded(joined) == folded(whole), num_kept
        assert joined.endswith(pieces[-1][-20:])
        assert numbers(joined) == list(range(len(numbers(joined))))
        assert not new_marks or new_marks[0].origin is None or num_kept == 0


@pytest.mark.parametrize("name", ["generate", "sglang"])
def test_sglang_stream_continues_with_the_whole_text(http: httpx.Client, name: str) -> None:
    path, body = BODIES[name]
    pieces, marks = asked(http, path, body)
    origin = marks[0].origin
    assert origin is not None
    for num_kept in range(len(marks) + 1):
        more, _ = asked(http, path, body, Said(origin, [mark.tokens for mark in marks[:num_kept]]))
        assert last_text(pieces[:num_kept] + more) == "abc def", num_kept


def last_text(pieces: Sequence[bytes]) -> str:
    events = [json.loads(line.removeprefix("data: ")) for line in b"".join(pieces).decode().splitlines() if "{" in line]
    deltas = [event["text_delta"] for event in events if "text_delta" in event]
    return "".join(deltas) if deltas else str([event["text"] for event in events if "text" in event][-1])


def test_usage_is_that_of_the_whole(http: httpx.Client) -> None:
    path, body = BODIES["chat"]
    pieces, marks = asked(http, path, body)
    origin = marks[0].origin
    assert origin is not None
    usage = [json.loads(line[6:])["usage"] for line in pieces[-1].decode().splitlines() if '"usage":{' in line]
    more, _ = asked(http, path, body, Said(origin, [mark.tokens for mark in marks[:3]]))
    assert [json.loads(line[6:])["usage"] for line in more[-1].decode().splitlines() if '"usage":{' in line] == usage
    assert usage[0]["completion_tokens"] == len(TEXT.removeprefix("say:").encode()) + 1


def test_the_engine_computes_only_what_is_missing(server: Frontend, http: httpx.Client) -> None:
    path, body = BODIES["chat"]
    marker = "say:" + "only what is missing, " * 20  # more than a client takes at once
    body = turn(marker)
    _, marks = asked(http, path, body)
    origin = marks[0].origin
    assert origin is not None
    asked(http, path, body, Said(origin, [mark.tokens for mark in marks[:1]]))
    first, second = server.engine.requests(marker)
    assert second.num_generated == sum(len(one.tokens) for mark in marks[:1] for one in mark.tokens) > 0
    assert len(second.tokens) == len(first.tokens) + 4 * second.num_generated
    assert second.sampling == first.sampling  # the seed, too


def test_an_engine_that_dies_ends_the_stream_with_a_mark(front_end: str) -> None:
    config = msgspec.structs.replace(CONFIG, resumable=True)
    with frontend(front_end=front_end, config=config) as server, server.http() as http:
        body = json.dumps(chat_body("hang:abc", stream=True))
        headers = {MARKS.decode(): "0", "content-type": "application/json"}
        with http.stream("POST", "/v1/chat/completions", content=body, headers=headers) as answer:
            lines = answer.iter_lines()
            found = [next(line for line in lines if "abc"[i] in line) for i in range(1)]
            server.on_loop(lambda: server.client.fail("it fell"))
            found += list(lines)
        mark = msgspec.json.decode(found[-1].encode()[len(LINE) :], type=Mark)
        assert mark.lost == "it fell"
        assert "[DONE]" not in "".join(found)


@pytest.mark.parametrize(
    ("given", "status", "reason"),
    [
        ("x", 400, "must be a number of bytes"),
        ("99999999999", 400, "must be a number of bytes"),
        ("5", 400, "is not valid"),
    ],
)
def test_a_bad_header_is_refused(http: httpx.Client, given: str, status: int, reason: str) -> None:
    headers = {MARKS.decode(): given, "content-type": "application/json"}
    answer = http.post("/v1/chat/completions", content=json.dumps(turn("say:a")), headers=headers)
    check_error(answer, status)
    assert reason in answer.json()["error"]["message"]


def _changed(said: Said, name: str, value: Any) -> bytes:
    """Its JSON with another value in its origin, or in the first choice of its first turn."""
    data = json.loads(msgspec.json.encode(said))
    where = data["origin"] if name in data["origin"] else data["turns"][0][0]
    where[name if name in data["origin"] else ("index", "tokens", "reason", "ended").index(name)] = value
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("lengths", [-5], "`int` >= 1"),
        ("lengths", [0], "`int` >= 1"),
        ("lengths", [10**9], "the prompts leave"),
        ("lengths", [], "the prompts leave"),
        ("seed", 2**64, "is not valid"),
        ("cached", [-1], "is not valid"),
        ("index", -1, "is not valid"),
        ("index", 1, "choice 1: the request has 1"),
        ("tokens", [2_000_000], "token ids must be below"),
        ("tokens", [2**31], "token ids must be below"),
        ("tokens", [-1], "is not valid"),
        ("tokens", [97] * 3000, "3000 tokens, its limit is"),
        ("reason", 99, "is not valid"),
        ("reason", 1, "tokens follow its end"),
        ("ended", True, "a choice has ended without a reason"),
    ],
)
def test_bad_resume_state_is_400(server: Frontend, http: httpx.Client, name: str, value: Any, reason: str) -> None:
    path, body = BODIES["chat"]
    _, marks = asked(http, path, body)
    assert marks[0].origin is not None and marks[0].tokens
    head = _changed(Said(marks[0].origin, [marks[0].tokens]), name, value)
    headers = {MARKS.decode(): str(len(head)), "content-type": "application/json"}
    answer = http.post(path, content=head + json.dumps(body).encode(), headers=headers)
    assert reason in check_error(answer, 400)["message"]


def test_a_stream_of_another_model_is_refused(http: httpx.Client) -> None:
    path, body = BODIES["chat"]
    _, marks = asked(http, path, body)
    origin = marks[0].origin
    assert origin is not None
    head = msgspec.json.encode(Said(msgspec.structs.replace(origin, model="other"), [marks[0].tokens]))
    headers = {MARKS.decode(): str(len(head)), "content-type": "application/json"}
    answer = http.post(path, content=head + json.dumps(body).encode(), headers=headers)
    check_error(answer, 409)
    assert answer.json()["error"]["code"] == "other_model"


def test_stream_without_header_has_no_marks(http: httpx.Client) -> None:
    path, body = BODIES["chat"]
    assert LINE not in http.post(path, json=body).content


def test_resumable_excludes_the_gateway() -> None:
    with pytest.raises(ConfigError, match="--resumable: cannot be used with --frontend rust"):
        msgspec.structs.replace(CONFIG, resumable=True, frontend="rust").check()


def test_without_the_flag_the_header_means_nothing(front_end: str) -> None:
    with frontend(front_end=front_end) as server, server.http() as http:
        answer = http.post("/v1/chat/completions", json=turn("say:abc"), headers={MARKS.decode(): "0"})
        assert answer.status_code == 200
        assert LINE not in answer.content
