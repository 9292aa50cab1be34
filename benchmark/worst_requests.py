"""Measure the effect of the worst legal requests on the time to first token of small chats, by kind of request.

    MINISGL_DATA=... python -m benchmark.worst_requests NAME=FOLDER:FRONTEND ... [--duration S] [--turns N]

A variant has the form of `benchmark.front_ends`. `--clients` clients send small chats one after the other; meanwhile
one client sends the same worst request again and again: bodies of 8 MB with one long text, one with nearly the maximum
of values or objects, a conversation with very many messages, 128 strict tools. Kinds take turns. Times are
milliseconds, percentiles over all turns; "added" is the difference to the same variant alone.

Invariants: a run with a failed small chat is discarded; a worst request may be refused, and its status is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from benchmark.front_ends import Variant, flags_of, servers, variant_of
from minisgl.bench.report import table

ALONE = "alone"
PATH = "/v1/chat/completions"
Percentiles = dict[str, float]


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}


def worst() -> dict[str, bytes]:
    """Return the request bodies by the kind of excess."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10)}}
    functions = [{"name": f"f{i}", "strict": True, "parameters": {**schema, "required": ["p0"]}} for i in range(128)]
    turns = [{"role": role, "content": "a word"} for _ in range(2000) for role in ("user", "assistant")]
    bodies = {
        "8 MB, too long": chat("word " * (8 * 2**20 // 5 - 100)),
        "8 MB, unread": chat("a", metadata={"a": "word " * (8 * 2**20 // 5 - 100)}),
        "500,000 values": chat("a", metadata={"a": [0] * 500_000}),
        "60,000 objects": chat("a", metadata={"a": [{}] * 60_000}),
        "4,000 messages": {"messages": turns, "max_tokens": 4},
        "128 strict tools": chat("a", tools=[{"type": "function", "function": one} for one in functions]),
    }
    return {name: json.dumps(body).encode() for name, body in bodies.items()}


async def small_chats(http: httpx.AsyncClient, until: float, times: list[float]) -> None:
    number = 0
    while time.perf_counter() < until:
        number += 1
        began = time.perf_counter()
        async with http.stream("POST", PATH, json=chat(f"say {number}", stream=True)) as answer:
            answer.raise_for_status()
            is_first = True
            async for _ in answer.aiter_raw():
                if is_first:
                    times.append(time.perf_counter() - began)
                is_first = False


async def again_and_again(http: httpx.AsyncClient, body: bytes, until: float, statuses: list[int]) -> None:
    while time.perf_counter() < until:
        answer = await http.post(PATH, content=body, headers={"content-type": "application/json"})
        statuses.append(answer.status_code)


async def measure(url: str, body: bytes | None, duration_s: float, clients: int) -> tuple[list[float], list[int]]:
    """Return the times to first token of the small chats, in seconds, and the statuses of the worst requests."""
    times, statuses = list[float](), list[int]()
    until = time.perf_counter() + duration_s
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as http, asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(small_chats(http, until, times))
        if body is not None:
            tasks.create_task(again_and_again(http, body, until, statuses))
    return times, statuses


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.worst_requests", description=__doc__.partition("\n")[0])
    parser.add_argument("variants", nargs="+", metavar="NAME=FOLDER:FRONTEND")
    parser.add_argument("--duration", type=float, default=6.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--clients", type=int, default=1)
    asked = parser.parse_args(argv)
    variants: list[Variant] = [variant_of(text) for text in asked.variants]
    kinds: dict[str, bytes | None] = {ALONE: None, **worst()}
    times: dict[tuple[str, str], list[float]] = {}
    statuses: dict[tuple[str, str], list[int]] = {}
    with servers(variants, flags_of(("--max-seq-len", "40960"))) as running:
        for _ in range(asked.turns):
            for kind, body in kinds.items():
                for name, server in running.items():
                    found, said = asyncio.run(measure(server.url, body, asked.duration, asked.clients))
                    times.setdefault((name, kind), []).extend(found)
                    statuses.setdefault((name, kind), []).extend(said)
    rows = []
    for kind in kinds:
        for variant in variants:
            key, base = (variant.name, kind), (variant.name, ALONE)
            p50, p99, most = np.percentile(times[key], [50, 99, 100]) * 1e3
            added = p99 - float(np.percentile(times[base], 99)) * 1e3
            counts = ", ".join(f"{one}: {statuses[key].count(one)}" for one in sorted(set(statuses[key])))
            rows.append(
                [
                    kind,
                    variant.name,
                    len(times[key]),
                    f"{p50:.1f}",
                    f"{p99:.1f}",
                    f"{most:.1f}",
                    f"{added:+.1f}",
                    counts,
                ]
            )
    names = [
        "beside",
        "variant",
        "small chats",
        "TTFT p50",
        "TTFT p99",
        "most",
        "added at p99",
        "worst requests by status",
    ]
    print(table(names, rows))


if __name__ == "__main__":
    main()
