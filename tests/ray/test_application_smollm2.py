"""The embedded model, twice: what it says makes sense, and goes on as it would have."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from tests.helpers.meaning import embedded_model
from tests.helpers.seconds import WAIT_S

if TYPE_CHECKING:
    from tests.helpers.ray_cluster import RayCluster

embedded_model()

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
QUESTION = {"role": "user", "content": "Name the capital of France."}
STORY = [{"role": "user", "content": "Tell a long story about a lighthouse keeper and a storm."}]


@pytest.fixture(scope="module")
def smollm2(cluster: RayCluster) -> RayCluster:
    cluster.delete()
    cluster.deploy(model="smollm2", flags="--no-access-log", replicas=2)
    return cluster


def test_answer_of_application_makes_sense(smollm2: RayCluster) -> None:
    body = {"model": "smollm2", "messages": [QUESTION], "temperature": 0, "max_tokens": 30}
    answer = httpx.post(f"{smollm2.url}/v1/chat/completions", json=body, timeout=WAIT_S).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]


async def told(http: httpx.AsyncClient, body: dict[str, Any], began: asyncio.Event) -> tuple[str, set[str]]:
    """The text, and the ids of its events."""
    text, ids = "", set()
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                ids.add(event["id"])
                text += event["choices"][0]["delta"].get("content") or ""
                if len(text) > 40:
                    began.set()
    return text, ids


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
def test_a_story_goes_on_elsewhere(smollm2: RayCluster, sampling: dict[str, Any]) -> None:
    smollm2.until_running("smollm2", 2)
    body = {"model": "smollm2", "messages": STORY, "max_tokens": 160, "stream": True, **sampling}

    async def run() -> tuple[str, str, set[str]]:
        async with httpx.AsyncClient(base_url=smollm2.url, timeout=WAIT_S) as http:
            undisturbed, _ = await told(http, body, asyncio.Event())
            began, busy = asyncio.Event(), smollm2.engines()
            before = [sum(one.cpu_times()[:2]) for one in busy]
            task = asyncio.create_task(told(http, body, began))
            await began.wait()
            spent = [sum(one.cpu_times()[:2]) - earlier for one, earlier in zip(busy, before, strict=True)]
            victim = busy[spent.index(max(spent))]  # who tells it
            victim.kill()
            psutil.wait_procs([victim], timeout=WAIT_S)
            return (undisturbed, *await task)

    undisturbed, disturbed, ids = asyncio.run(run())
    assert len(ids) == 1
    assert disturbed == undisturbed
