"""Clients whose pins fight, each in an environment of its own (`make client-test`): what their users do first."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest

from tests.helpers.clients import langchain_standard, node_command, python_command, report
from tests.helpers.seconds import WAIT_S

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "size": {"enum": ["small", "large"]},
        "rank": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "rank"],
}
RANKED = {  # as in programs/rerankers.py
    "query": "What is the capital of France?",
    "documents": ["Bread is made of flour.", "Paris is the capital of France.", "The train to Lyon is late."],
    "top_n": 2,
}
WITLESS = (
    *("test_invoke", "test_ainvoke", "test_stream[", "test_astream[", "test_batch", "test_conversation"),
    *("test_double_messages", "test_usage", "test_stop_sequence", "test_tool_choice", "test_tool_message", "few_shot"),
)
NUM_WITLESS = 17
CLIENT_S = 420  # a failure, not a measurement


def is_city(value: object) -> None:
    jsonschema.validate(value, CITY)


@pytest.mark.timeout(CLIENT_S)
def test_langchain(url: str) -> None:
    """Of its standard tests those that ask nothing of a model's wit: test_exact.py has all of them."""
    passed, failed, text = langchain_standard(url, "-k", " or ".join(WITLESS))
    assert (passed, failed) == (NUM_WITLESS, 0), text


@pytest.mark.timeout(CLIENT_S)
def test_pydantic_ai(url: str) -> None:
    found = report([*python_command("pydantic-ai"), "programs/pydantic_ai_agent.py"], url)
    assert found["text"] == found["streamed"] and found["text"] and found["responses"]
    for name in ("tool", "native", "streamed_native", "responses_tool", "responses_native"):
        is_city(found[name])
    assert found["native"] == found["streamed_native"]


@pytest.mark.timeout(CLIENT_S)
def test_instructor(url: str) -> None:
    found = report([*python_command("instructor"), "programs/instructor_models.py"], url)
    for mode in ("TOOLS", "JSON_SCHEMA"):
        is_city(found[mode])
        is_city(found[f"{mode}_partial"])


@pytest.mark.timeout(CLIENT_S)
def test_litellm(url: str) -> None:
    found = report([*python_command("litellm"), "programs/litellm_calls.py"], url)
    assert found["text"] == found["streamed"] == found["anthropic"] and found["text"] and found["responses"]
    is_city(found["form"])
    assert found["call"]["name"] == "rate" and found["finish_reason"] == "tool_calls"
    for arguments in (found["call"]["arguments"], found["streamed_call"], found["anthropic_call"]):
        assert 0 <= arguments["rank"] <= 99
    assert found["too_long"]


@pytest.mark.timeout(CLIENT_S)
def test_ollama(url: str) -> None:
    found = report([*python_command("ollama"), "programs/ollama_calls.py"], url)
    assert found["text"] == found["streamed"] == found["generated"] and "Paris" in found["text"]
    assert set(found["form"]) == {"name", "rank"} and 0 <= found["form"]["rank"] <= 99
    assert found["vectors"] == [found["vectors"][0]] * 2 and found["again"]
    assert found["models"] == ["smollm2"] and found["family"] == "llama" and found["size"] > 1 << 20
    assert {"completion", "embedding"} <= set(found["capabilities"])


@pytest.mark.timeout(CLIENT_S)
def test_vercel(url: str) -> None:
    for name, one in report(node_command("vercel.mjs"), url).items():
        is_city(one["object"])
        assert one["streamedObject"] == one["object"] and one["partials"] > 1 and one["text"], name
        assert one["calls"], name
        assert all(call["name"] == "rate" and 0 <= call["input"]["rank"] <= 99 for call in one["calls"]), name
        assert len(one["rated"]) >= 2 and one["steps"] == 2, name
        assert {"tool-call", "tool-result", "text-delta", "finish"} <= set(one["kinds"]), name


@pytest.mark.timeout(CLIENT_S)
def test_openai_node(url: str) -> None:
    found = report(node_command("openai.mjs"), url)
    for name in ("parsed", "streamed", "responses"):
        is_city(found[name])
    assert found["parsed"] == found["streamed"] and found["deltas"] > 1
    assert len(found["rated"]) == 1 and found["roles"][:3] == ["user", "assistant", "tool"]
    assert {"response.created", "response.output_text.delta", "response.completed"} <= set(found["kinds"])
    assert found["text"]


@pytest.mark.timeout(CLIENT_S)
def test_cohere(url: str) -> None:
    found = report([*python_command("cohere"), "programs/cohere_rerank.py"], url)
    best, second = found["ClientV2"]
    assert best[0] == 1 and best[1] > second[1]  # Paris
    assert found["Client"] == found["ClientV2"]


@pytest.mark.timeout(CLIENT_S)
@pytest.mark.parametrize(
    ("client", "kind"),
    [
        ("langchain-cohere", "langchain_cohere"),
        ("llama-index-rerank", "llama_index_cohere"),
        ("llama-index-rerank", "llama_index_jina"),
        ("litellm", "litellm_cohere"),
        ("litellm", "litellm_jina"),
        ("litellm", "litellm_vllm"),
        ("haystack", "haystack_cohere"),
        ("haystack", "haystack_jina"),
    ],
)
def test_rerankers_of_frameworks(client: str, kind: str, url: str) -> None:
    best, second = report([*python_command(client), "programs/rerankers.py", kind], url)
    wanted = httpx.post(f"{url}/v1/rerank", json=RANKED, timeout=WAIT_S).json()["results"]
    assert [best, second] == [[one["index"], pytest.approx(one["relevance_score"], abs=1e-6)] for one in wanted]
    assert best[0] == 1  # Paris
