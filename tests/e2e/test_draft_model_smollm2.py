"""A real server whose model drafts for itself: the texts are those without drafts, and nearly every draft is right."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.meaning import embedded_model
from tests.helpers.seconds import WAIT_S

embedded_model()

ARGS = ("--model", "smollm2", "--num-pages", "128", "--max-seq-len", "512", "--max-running-requests", "20")
TOPICS = ("a cat", "the sea", "a train")
ANSWER_S = 4 * WAIT_S


def body(number: int) -> dict[str, Any]:
    """Greedy and seeded ones."""
    sampled = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
    prompt = f"Write one sentence about {TOPICS[number % len(TOPICS)]}, number {number}:"
    return {"prompt": prompt, "max_tokens": 24, "logprobs": 1, **sampled}


def ask(server: ServerProcess, number: int) -> dict[str, Any]:
    answer = httpx.post(server.url + "/v1/completions", json=body(number), timeout=ANSWER_S)
    answer.raise_for_status()
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def counts(server: ServerProcess) -> dict[str, int]:
    [engine] = httpx.get(server.url + "/stats").json()["engines"]
    return dict(engine["stats"])


def test_a_model_drafting_for_itself_keeps_its_outputs() -> None:
    with serving(*ARGS) as server:
        plain = [ask(server, number) for number in range(4)]
        until(lambda: counts(server)["num_running"] == 0, "requests are left")
        steps = counts(server)["num_steps_total"]
    with serving(*ARGS, "--speculative", "model:smollm2:4") as server, ThreadPoolExecutor(2) as pool:
        alone = [ask(server, number) for number in range(4)]
        until(lambda: counts(server)["num_running"] == 0, "requests are left")
        stats = counts(server)
        assert alone == plain, "texts and log probabilities"
        assert list(pool.map(lambda number: ask(server, number), range(4))) == plain, "two at once"
    assert stats["num_accepted_total"] > 20 and stats["num_steps_total"] < steps
    assert stats["num_free_pages"] + stats["num_evictable_pages"] == 128


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"--speculative model:\./nowhere\.gguf: .*nowhere"):
        ServerProcess((*ARGS, "--speculative", "model:./nowhere.gguf"))
