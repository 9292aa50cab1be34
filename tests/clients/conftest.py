"""A server with the small model for each file of tests; one of scripted answers for those that name every byte; and a
table of what clients were tried with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from minisgl.metrics.gateway import OTHER
from tests.helpers.clients import CHECKS
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.meaning import embedded_model
from tests.helpers.server import CONFIG, Frontend, frontend
from tests.helpers.thinking import thinking_tokenizer

GATEWAY: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
"""Requests to scripted answers that came to the gateway, by route and by what became of them."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    embedded_model()
    with serving("--model", "smollm2", "--max-seq-len", "4096", env={"OMP_NUM_THREADS": "1"}) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: ServerProcess) -> str:
    return server.url


@pytest.fixture(scope="module")
def replies() -> dict[str, str]:
    """What the model says to whom, for files that have such a thing."""
    return {}


@pytest.fixture(scope="module")
def scripted(front_end: str, replies: dict[str, str]) -> Iterator[Frontend]:
    """What the model says stands in the prompt, after `say:`; its calls are Hermes', its thoughts Qwen's."""
    config, tokenizer = msgspec.structs.replace(CONFIG, tool_call_parser="hermes"), thinking_tokenizer(has_tokens=False)
    with frontend(
        front_end=front_end, config=config, max_seq_len=1 << 16, replies=replies, tokenizer=tokenizer, engine="cpu"
    ) as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)
        if running.gateway is not None:
            for route, reason, count in running.gateway.readings()["requests"]:
                GATEWAY[route][reason or "answered"] += count


@pytest.fixture(scope="module")
def client(scripted: Frontend) -> Iterator[openai.OpenAI]:
    """Of the scripted answers, unless a file has another."""
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Checks by client: a test is one, or says in its properties how many it made."""
    table: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(("passed", "failed", "refused"), 0))
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            if report.when != "call" or "clients/test_" not in report.nodeid:
                continue
            made = dict(report.user_properties).get(CHECKS)
            client = report.nodeid.split("clients/test_")[1].split(".py")[0] if made is None else made["client"]
            kind = "refused" if "refused" in report.keywords and outcome == "passed" else outcome
            for name, count in ({kind: 1} if made is None else made["counts"]).items():
                table[client][name] += count
    if table:
        terminalreporter.section("clients: checks")
        for client, counts in sorted(table.items()):
            terminalreporter.write_line(f"{client:32}" + "".join(f"{n:6} {what}" for what, n in counts.items()))
    if own := {route: counts for route, counts in GATEWAY.items() if route != OTHER}:
        terminalreporter.section("clients: what the gateway did")
        for route, counts in sorted(own.items()):
            terminalreporter.write_line(f"{route:32}" + "".join(f"{n:6} {what}" for what, n in sorted(counts.items())))
        answered = sum(one["answered"] for one in own.values())
        good = sum(sum(one.values()) - one["error"] for one in own.values())
        terminalreporter.write_line(f"answered by the gateway: {answered} of {good} in order, {answered / good:.1%}")
