"""A server without the compiled extension: the torch engine, the Python scheduler and the Python front end answer, and
what needs the extension is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from minisgl import envs
from minisgl.extension import HOW_TO_BUILD, NEEDS
from minisgl.weights.sources import resolve_model
from tests.helpers.e2e import ServerProcess, refused
from tests.helpers.meaning import CAPITALS, FRANCE, MAX_TOKENS

pytestmark = pytest.mark.any_cpu
HIDDEN = {envs.NO_EXTENSION: "1", envs.CPU_BACKEND: "", envs.FRONTEND: ""}
ASK = {"messages": [{"role": "user", "content": FRANCE}], "temperature": 0, "max_tokens": MAX_TOKENS}
TOOL = {"type": "function", "function": {"name": "capital", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder() -> Path:
    """The embedded model as safetensors, which the extension has made of its GGUF file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(envs.NO_EXTENSION, raising=False)
        return resolve_model("smollm2", lambda *report: None)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    flags = ("--model", str(folder), "--served-model-name", "smollm2", "--num-pages", "64")
    with ServerProcess(flags, HIDDEN, forked=False) as server:
        yield server
        assert server.stop() == 0, "\n".join(server.lines)


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={**ASK, **fields})


def streamed(http: httpx.Client, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The text of a stream, and its last choice."""
    lines = chat(http, stream=True, **fields).raise_for_status().text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    return "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]


def test_a_stream_equals_the_response_without_the_extension(http: httpx.Client) -> None:
    choice = chat(http).raise_for_status().json()["choices"][0]
    assert CAPITALS["France"] in choice["message"]["content"] and choice["finish_reason"] == "stop"
    assert streamed(http)[0] == choice["message"]["content"]


def test_a_stop_string_ends_the_text_before_it(http: httpx.Client) -> None:
    whole = chat(http).json()["choices"][0]["message"]["content"]
    before, stop = whole.split("aris")[0], "aris"
    choice = chat(http, stop=stop).json()["choices"][0]
    assert (choice["message"]["content"], choice["matched_stop"]) == (before, stop)
    text, last = streamed(http, stop=stop)
    assert (text, last["matched_stop"]) == (before, stop)


def test_health_metrics_and_the_first_line_say_what_serves(server: ServerProcess, http: httpx.Client) -> None:
    health = http.get("/health").raise_for_status().json()
    serves = {name: health[name] for name in ("frontend", "engine", "cpu_backend", "device")}
    assert serves == {"frontend": "python", "engine": "torch", "cpu_backend": "python", "device": "cpu"}
    assert HOW_TO_BUILD in health["extension_missing"]
    assert "minisgl:extension_loaded 0.0" in http.get("/metrics").text
    assert "warning: the extension minisgl._rust is missing: " in server.lines[0] and HOW_TO_BUILD in server.lines[0]
    assert "the torch engine, the Python scheduler and the Python front end serve" in server.lines[0]


def test_no_process_of_it_has_loaded_the_extension(server: ServerProcess) -> None:
    for process in (psutil.Process(server.process.pid), *server.children()):
        assert not [one.path for one in process.memory_maps() if Path(one.path).name.startswith("_rust.")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [TOOL]),
        ("response_format", SCHEMA),
        ("reasoning_effort", "high"),
        ("enable_thinking", True),
        ("thinking_budget", 8),
    ],
)
def test_a_request_that_needs_it_is_refused_by_name(http: httpx.Client, field: str, value: object) -> None:
    answer = chat(http, **{field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_value")
    assert error["param"].startswith(field) and NEEDS in error["message"] and HOW_TO_BUILD in error["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat"])
def test_the_other_apis_answer(http: httpx.Client, path: str) -> None:
    asks = [{"role": "user", "content": FRANCE}]
    body: dict[str, Any] = {"model": "smollm2", "stream": False}
    body |= {"input": asks} if path == "/v1/responses" else {"messages": asks}
    body |= {"options": {"temperature": 0}} if path == "/api/chat" else {"temperature": 0}
    body |= {"max_tokens": MAX_TOKENS} if path == "/v1/messages" else {}
    answer = http.post(path, json=body)
    assert answer.status_code == 200 and CAPITALS["France"] in answer.text


@pytest.mark.parametrize(
    "flags",
    [
        "--engine cpu",
        "--kv-dtype q8",
        "--frontend rust",
        "--tool-call-parser hermes",
        "--reasoning-parser qwen3",
        "--dp 2",
        "--model smollm2",
        "--tokenizer smollm2",
        "--speculative model:smollm2:3",
    ],
)
def test_a_flag_that_needs_it_is_refused_by_name(flags: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HIDDEN.items():
        monkeypatch.setenv(name, value)
    name, value = flags.split()
    model = () if name == "--model" else ("--model", str(folder))
    line = refused(*model, name, value)
    assert NEEDS in line and HOW_TO_BUILD in line
    assert name in line and (value in line or name == "--dp"), line


def test_a_simulated_engine_with_a_model_of_ggufs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.NO_EXTENSION, "1")
    assert refused("--engine", "sim", "--sim-profile", "null", "--model", "smollm2").endswith(HOW_TO_BUILD)
