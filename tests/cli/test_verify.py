"""`minisgl verify`: what a server says of its answers is true, and what somebody changes is found."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from minisgl import LLM, cli, receipt
from minisgl.cli.verify_answer import Answer, differences
from minisgl.llm import Encoded
from minisgl.receipt import Receipt
from tests.helpers.data_parallel import engine_processes, until_all_ready
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.meaning import embedded_model
from tests.helpers.seconds import WAIT_S

KEY = Ed25519PrivateKey.generate()
SIGNER = base64.b64encode(KEY.public_key().public_bytes_raw()).decode()
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the sea?"}], "max_tokens": 30, "seed": 7}


@pytest.fixture(scope="module")
def server(front_end: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("key") / "key.pem"
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    file.write_bytes(KEY.private_bytes(pem, form, serialization.NoEncryption()))
    flags = ("--engine", "echo", "--max-seq-len", "1024", "--receipt-key", str(file), "--frontend", front_end)
    with serving(*flags) as running:
        yield running


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json={**body, "receipt": True}, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def verify(folder: Path, found: Any, prompt: Any, *flags: str) -> int:
    (folder / "receipt.json").write_text(json.dumps(found))
    (folder / "prompt").write_text(prompt if isinstance(prompt, str) else json.dumps(prompt))
    files = (str(folder / "receipt.json"), "--prompt", str(folder / "prompt"))
    return cli.main(["verify", *files, "--model", "smollm2", *flags])


TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
TALK = [
    {"role": "user", "content": [{"type": "text", "text": "What is the sea?"}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Water"}]},
    {"role": "user", "content": "Where?"},
]
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Add."}]},
    {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "5"},
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "n": 2, "temperature": 0.3, "stop": ["e"]}),
        ("/v1/completions", {"prompt": "The sea", "max_tokens": 9}),
        ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 9, "logit_bias": {"70": 3}, "ignore_eos": True}),
        ("/v1/messages", CHAT),
        ("/v1/messages", {"system": "Be short.", "messages": TALK, "max_tokens": 9, "stop_sequences": ["e"]}),
        ("/v1/messages", {"messages": TALK[:2], "max_tokens": 9, "thinking": {"type": "disabled"}}),
        ("/v1/responses", {"input": "What is the sea?", "max_output_tokens": 9, "store": False}),
        ("/v1/responses", {"instructions": "Add.", "input": ITEMS, "tools": [{"type": "function", **TOOL}], "seed": 5}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 9, "seed": 3}}),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function", "function": TOOL}]},
        ),
        ("/api/generate", {"prompt": "Hi", "system": "Be short.", "logprobs": True}),
        ("/api/generate", {"prompt": "Hi", "raw": True, "format": "json"}),
    ],
)
def test_an_answer_is_what_its_receipt_says(
    server: ServerProcess, tmp_path: Path, path: str, body: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    if path.startswith("/api/"):
        body = {**body, "stream": False}
    found = post(server, path, body)
    for index in range(body.get("n", 1)):
        assert verify(tmp_path, found, body, "--index", str(index), "--signer", SIGNER) == 0, capsys.readouterr()
    assert "bit for bit, signed" in capsys.readouterr().out


def receipts_in(value: Any) -> list[Any]:
    """Wherever an answer, or an event of a stream, has them."""
    if isinstance(value, list):
        return [found for one in value for found in receipts_in(one)]
    if not isinstance(value, dict):
        return []
    own = [value["receipt"]] if "receipt" in value else []
    return own + [found for name, one in value.items() if name != "receipt" for found in receipts_in(one)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"input": "What is the sea?", "max_output_tokens": 30, "seed": 7}),
        ("/api/chat", {"messages": CHAT["messages"], "options": {"num_predict": 30, "seed": 7}}),
        ("/api/generate", {"prompt": "What is the sea?", "options": {"num_predict": 30, "seed": 7}}),
    ],
)
def test_a_stream_ends_with_the_same_receipt(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    """Who asks for none gets none, and nobody gets log probabilities that only the receipt needs."""
    (whole,) = receipts_in(post(server, path, {**body, "stream": False}))
    asked = {**body, "receipt": True, "stream": True}
    with httpx.stream("POST", server.url + path, json=asked, timeout=WAIT_S) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert [found for event in events for found in receipts_in(event)] == [whole] == receipts_in(events[-2:])
    assert '"logprob"' not in json.dumps(events)
    assert '"receipt"' not in httpx.post(server.url + path, json={**body, "stream": False}, timeout=WAIT_S).text


def test_an_answer_that_is_kept_keeps_its_receipt(server: ServerProcess, tmp_path: Path) -> None:
    body = {"input": "What is the sea?", "max_output_tokens": 9}
    found = post(server, "/v1/responses", body)
    kept = httpx.get(f"{server.url}/v1/responses/{found['id']}", timeout=WAIT_S).json()
    assert kept["receipt"] == found["receipt"]
    goes_on = {"previous_response_id": found["id"], "input": "And?"}
    again = post(server, "/v1/responses", goes_on)
    assert verify(tmp_path, again, goes_on) == 2, "nobody but the server has what was said before"


def test_an_answer_of_no_tokens_has_none(server: ServerProcess) -> None:
    body = {"prompt": "a", "max_tokens": 0, "receipt": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "receipt"


def changed(found: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """With another value, by somebody who knows how digests are made, and has no key."""
    copy = json.loads(json.dumps(found))
    at = copy
    *names, last = path.split(".")
    for name in names:
        at = at[name]
    assert at.get(last) != value
    at[last] = value
    copy["signer"] = copy["signature"] = None
    copy["sha256"] = msgspec.convert(copy, Receipt).digest().hex()
    return copy


CHANGES: list[tuple[str, Any, str]] = [
    ("model.weights", "0" * 64, "another model"),
    ("model.adapter", "0" * 64, "another adapter"),
    ("model.tokenizer", "0" * 64, "another tokenizer"),
    ("model.template", "0" * 64, "another template"),
    ("numerics.number", 0, "other arithmetic: number is"),
    ("numerics.instructions", "amx", "other arithmetic: instructions is"),
    ("sampling.seed", 8, "another answer"),
    ("sampling.max_tokens", 29, "another answer"),
    ("prompt.sha256", "0" * 64, "another prompt"),
    ("answer.sha256", "0" * 64, "another answer"),
    ("answer.count", 29, "another answer"),
    ("finish_reason", "stop", "it ends otherwise"),
    ("logprobs", "0" * 64, "other probabilities"),
]


@pytest.mark.parametrize(("path", "value", "why"), CHANGES)
def test_changed_answers_are_detected(
    server: ServerProcess, tmp_path: Path, path: str, value: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = post(server, "/v1/chat/completions", CHAT)["choices"][0]["receipt"]
    other = changed(found, path, value)
    assert verify(tmp_path, other, CHAT) == 1 and why in capsys.readouterr().out
    assert verify(tmp_path, other, CHAT, "--signer", SIGNER) == 2
    for kept in ({"sha256": found["sha256"]}, {name: found[name] for name in ("signer", "signature")}):
        assert verify(tmp_path, {**other, **kept}, CHAT) == 2, "whoever signed did not sign this"


def test_where_an_answer_first_differs(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {**CHAT, "return_token_ids": True}
    choice = post(server, "/v1/chat/completions", body)["choices"][0]
    text, ids = choice["message"]["content"], choice["token_ids"]
    file = tmp_path / "answer"
    for answer, expected in (
        (text, 0),
        (json.dumps(ids), 0),
        (text[:4] + "#" + text[5:], 1),
        (json.dumps([*ids[:5], 1, *ids[6:]]), 1),
        (text[:-1], 1),
    ):
        file.write_text(answer)
        assert verify(tmp_path, choice["receipt"], body, "--answer", str(file)) == expected
    said = capsys.readouterr().out
    assert "from character 4 on" in said and "from token 5 on" in said
    choice["token_ids"][3] ^= 1  # of the whole answer, which says it by itself
    assert verify(tmp_path, {"choices": [choice]}, body) == 1
    assert "from token 3 on" in capsys.readouterr().out
    choice["token_ids"][3] ^= 1
    assert verify(tmp_path, choice["receipt"], {**CHAT, "messages": [{"role": "user", "content": "?"}]}) == 1


@pytest.mark.parametrize(
    ("found", "prompt", "why"),
    [
        ({}, "a", "has no receipt"),
        ({"receipt": 1}, "a", "missing required field"),
        ({"choices": []}, "a", "has no receipt"),
    ],
)
def test_invalid_receipt_is_rejected(
    found: Any, prompt: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(tmp_path, found, prompt) == 2 and why in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.any_cpu
def test_a_models_answers_to_each_api(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SmolLM2's: the model's files, its template and its arithmetic."""
    embedded_model()
    with serving("--model", "smollm2", "--engine", "cpu", "--max-seq-len", "512") as server:
        answers = [
            (body, post(server, path, {**body, "stream": False}))
            for path, body in (
                ("/v1/chat/completions", CHAT),
                ("/v1/messages", {"system": "Be short.", "messages": TALK, "max_tokens": 20, "temperature": 1}),
                ("/v1/responses", {"instructions": "Add.", "input": "2 and 3", "max_output_tokens": 20}),
                ("/api/chat", {"messages": CHAT["messages"], "options": {"num_predict": 20}}),
                ("/api/generate", {"prompt": "The sea", "raw": True, "options": {"num_predict": 20}}),
            )
        ]
    for body, found in answers:
        assert verify(tmp_path, found, body) == 0, capsys.readouterr()
        assert "tokens, bit for bit" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.any_cpu
@pytest.mark.usefixtures("no_amx")  # AVX2 verifies, and what is moved is computed again
def test_answers_served_among_others_are_what_they_are_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """SmolLM2 on two engines that guess, three die: hits, retractions; another instruction set verifies them."""
    embedded_model()
    draw = random.Random(5)
    begins = ["The tides follow the moon. " * 12, "List the planets. ", "def add(a, b):\n    return a + b\n" * 6]
    bodies = [
        {
            "prompt": draw.choice(begins) + draw.choice(["And", "So", "The next", "Then one day"]) + f" {i % 7}",
            "max_tokens": draw.randrange(1, 40),
            "temperature": draw.choice((0, 0.7, 1.3)),
            "top_p": draw.choice((1, 0.9)),
            "frequency_penalty": draw.choice((0, 0, 0.5)),
            "stop": draw.choice(([], [], ["."])),
            "return_token_ids": True,
        }
        for i in range(60 * times)
    ]
    flags = ("--model", "smollm2", "--engine", "cpu", "--dp", "2", "--num-pages", "48", "--max-seq-len", "512")
    flags += ("--speculative", "ngram:3")
    with serving(*flags) as server, ThreadPoolExecutor(32) as pool:
        until_all_ready(server, 2)
        answers = [pool.submit(post, server, "/v1/completions", body) for body in bodies]
        for kill in range(3):
            answers[len(answers) * (kill + 1) // 4].result()
            until_all_ready(server, 2)
            engine_processes(server)[kill % 2].kill()
        found = [one.result()["choices"][0] for one in answers]
        until_all_ready(server, 2)
    monkeypatch.setenv("MINISGL_CPU_ISA", "avx2")
    with LLM("smollm2", engine="cpu", max_prefill_length=48, num_pages=64, log_level="error") as llm:
        for choice in found:
            one = receipt.parse(json.dumps(choice["receipt"]).encode())
            prompt = Encoded(np.array(choice["prompt_token_ids"], np.int32), [])
            assert differences(llm, one, prompt, said=Answer(choice["token_ids"])) == []
