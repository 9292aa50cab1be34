"""The figures of one server under one load, for comparisons: what `bench ab` and gates call.

Keeps true: a failed request makes the run no result.
Doesn't know: arms, pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import httpx

from minisgl.bench.server_process import ServerProcess
from minisgl.bench.stats import summary
from minisgl.config import ConfigError

WORDS = ["time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"]


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of `concurrency` clients, chat completions streamed. Lengths in words and tokens."""

    concurrency: int = 16
    num_requests: int = 64
    input_len: int = 200
    output_len: int = 128
    seed: int = 0

    def describe(self) -> str:
        return (
            f"{self.num_requests} requests of {self.input_len} words, {self.output_len} tokens out, "
            f"{self.concurrency} at once"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def load_from(flags: Sequence[str]) -> Load:
    parser = argparse.ArgumentParser(prog="minisgl bench ab --load", allow_abbrev=False)
    for name, default in Load().as_dict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return Load(**vars(parser.parse_args(list(flags))))


def measure(server: ServerProcess, load: Load) -> dict[str, float]:
    """Raises `ConfigError` when a request failed."""
    asyncio.run(_run(server, Load(load.concurrency, 2 * load.concurrency, load.input_len, 8, load.seed + 1)))
    before, began = server.cpu_seconds(), time.perf_counter()
    answers = asyncio.run(_run(server, load))
    wall_s, after = time.perf_counter() - began, server.cpu_seconds()
    num_tokens = load.num_requests * load.output_len
    ttft = summary([1e3 * (times[1] - times[0]) for times in answers])
    itl = summary([1e3 * (b - a) for times in answers for a, b in pairwise(times[1:])])
    cpu = {f"{role}_cpu_us_per_token": 1e6 * (after[role] - before[role]) / num_tokens for role in after}
    rss = {f"{role}_rss_mib": size / 2**20 for role, size in server.rss_bytes().items()}
    return {
        "output_tok_s": num_tokens / wall_s,
        "ttft_p50_ms": ttft["p50"],
        "ttft_p99_ms": ttft["p99"],
        "itl_p99_ms": itl["p99"],
        **cpu,
        **rss,
    }


async def _run(server: ServerProcess, load: Load) -> list[list[float]]:
    """Of each request: when it was sent, and when each piece of text came."""
    rng = random.Random(load.seed)
    prompts = [" ".join(rng.choices(WORDS, k=load.input_len)) for _ in range(load.num_requests)]
    found: list[list[float]] = []
    limits = httpx.Limits(max_connections=load.concurrency)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:

        async def client() -> None:
            while prompts:
                found.append(await _ask(http, server.model, prompts.pop(), load.output_len))

        await asyncio.gather(*(client() for _ in range(load.concurrency)))
    return found


async def _ask(http: httpx.AsyncClient, model: str, prompt: str, output_len: int) -> list[float]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": output_len,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times, count = [time.perf_counter()], 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise ConfigError(f"a request failed: {answer.status_code}: {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                count = chunk["usage"]["completion_tokens"]
            if chunk["choices"]:
                times.append(time.perf_counter())
    if count != output_len:
        raise ConfigError(f"a request failed: {count} tokens instead of {output_len}")
    return times
