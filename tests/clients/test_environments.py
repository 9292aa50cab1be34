"""Clients that rank, each in an environment of its own (`make client-test`), before the small model."""

from __future__ import annotations

import httpx
import pytest

from tests.helpers.clients import python_command, report
from tests.helpers.seconds import WAIT_S

RANKED = {  # as in programs/rerankers.py
    "query": "What is the capital of France?",
    "documents": ["Bread is made of flour.", "Paris is the capital of France.", "The train to Lyon is late."],
    "top_n": 2,
}
CLIENT_S = 420  # a failure, not a measurement


@pytest.mark.timeout(CLIENT_S)
@pytest.mark.parametrize(
    ("client", "kind"),
    [
        ("cohere", "cohere_old"),
        ("cohere", "cohere_new"),
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
def test_reranker_clients_get_the_servers_order_and_scores(client: str, kind: str, url: str) -> None:
    best, second = report([*python_command(client), "programs/rerankers.py", kind], url)
    wanted = httpx.post(f"{url}/v1/rerank", json=RANKED, timeout=WAIT_S).json()["results"]
    assert [best, second] == [[one["index"], pytest.approx(one["relevance_score"], abs=1e-6)] for one in wanted]
    assert best[0] == 1  # Paris
