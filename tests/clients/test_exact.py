"""Clients whose pins fight, each in an environment of its own (`make client-test`), before a model that is scripted: a
check for each call of their documentation, with exact texts, calls and reasons."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.helpers.clients import CHECKS, langchain_standard, node_command, python_command, report
from tests.helpers.server import Frontend

NUM_STANDARD = 39  # of LangChain's standard tests; eleven more are left out by it: pictures, sound, PDF, another model
CLIENT_S = 300  # a failure, not a measurement
# client, its checks, what runs it
PROGRAMS: list[tuple[str, int, Callable[[], list[str]]]] = [
    ("instructor", 7, lambda: [*python_command("instructor"), "programs/exact_instructor.py"]),
    ("langchain", 15, lambda: [*python_command("langchain"), "programs/exact_langchain.py"]),
    ("litellm", 18, lambda: [*python_command("litellm"), "programs/exact_litellm.py"]),
    ("ollama", 15, lambda: [*python_command("ollama"), "programs/exact_ollama.py"]),
    ("langchain-ollama", 10, lambda: [*python_command("ollama"), "programs/exact_langchain_ollama.py"]),
    ("ollama-js", 11, lambda: node_command("exact_ollama.mjs")),
    ("pydantic-ai", 9, lambda: [*python_command("pydantic-ai"), "programs/exact_pydantic_ai.py"]),
    ("openai-node", 23, lambda: node_command("exact_openai.mjs")),
    ("vercel", 64, lambda: node_command("exact_vercel.mjs")),
]


def called(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


@pytest.fixture(scope="module")
def replies() -> dict[str, str]:
    """What LangChain's standard tests ask."""
    joke = {"setup": "What do cats read?", "punchline": "Mewspapers."}
    return {
        "Hello!": called("magic_function", input=1),
        r"magic_function\(3\)": called("magic_function", input=3),
        r"magic_function_no_args\(\)": called("magic_function_no_args"),
        "Pirate greeting": called("greeting_generator", answer_style="Pirate"),
        "It's sunny": "It is sunny.",
        "weather in San Francisco": called("get_weather", location="San Francisco"),
        "你好啊集团": called("unicode_customer", customer_name="你好啊集团", description="x"),
        "こんにちは株式会社": called("unicode_customer", customer_name="こんにちは株式会社", description="x"),
        '"name": "Joke".*joke about cats': called("Joke", **joke),
        "joke about cats": json.dumps(joke),
    }


@pytest.mark.timeout(CLIENT_S)
def test_langchain_s_standard_tests(scripted: Frontend, record_property: Callable[[str, object], None]) -> None:
    passed, failed, text = langchain_standard(scripted.url)
    record_property(CHECKS, {"client": "langchain-standard", "counts": {"passed": passed, "failed": failed}})
    assert (passed, failed) == (NUM_STANDARD, 0), text


@pytest.mark.timeout(CLIENT_S)
@pytest.mark.parametrize(("client_name", "count", "command"), PROGRAMS, ids=[name for name, _, _ in PROGRAMS])
def test_each_documented_call_of_a_client_succeeds(
    scripted: Frontend,
    client_name: str,
    count: int,
    command: Callable[[], list[str]],
    record_property: Callable[[str, object], None],
) -> None:
    found = report(command(), scripted.url)
    failed = {name: error for name, error in found.items() if error is not None}
    counts = {"passed": len(found) - len(failed), "failed": len(failed)}
    record_property(CHECKS, {"client": client_name, "counts": counts})
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
    assert len(found) == count
