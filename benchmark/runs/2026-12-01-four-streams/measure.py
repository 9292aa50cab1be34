"""Measure what four streams feel of a prompt of 8,000 tokens, and what the prompt pays: `measure.py MODEL`.

A server is started for each kind of activations. In turns, `ROUNDS` times: the prompt alone, then one of that length
beside four streams that began before it. Prompts are random token ids, so that no prefix is cached. Prints JSON: TTFT
and the inter-token latencies of the streams from the prompt's arrival to its first token, in seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import time

import httpx

LENGTH, STREAMS, ROUNDS, URL = 8000, 4, 2, "http://127.0.0.1:19191"
IDS = random.Random(59)


def prompt(length: int) -> list[int]:
    return [IDS.randrange(1000, 100_000) for _ in range(length)]


async def tokens(http: httpx.AsyncClient, length: int, most: int, times: list[float]) -> None:
    """Append the time of each token's arrival."""
    body = {"prompt": prompt(length), "max_tokens": most, "stream": True, "ignore_eos": True, "temperature": 0}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())


async def ttft(http: httpx.AsyncClient, length: int) -> float:
    times, begun = list[float](), time.perf_counter()
    await tokens(http, length, 1, times)
    return times[0] - begun


async def beside(http: httpx.AsyncClient) -> tuple[float, list[float]]:
    streams = [list[float]() for _ in range(STREAMS)]
    running = [asyncio.create_task(tokens(http, 64, 4000, times)) for times in streams]
    while min(map(len, streams)) < 8:
        await asyncio.sleep(0.05)
    begun = time.perf_counter()
    waited = await ttft(http, LENGTH)
    ended = time.perf_counter()
    gaps = [b - a for times in streams for a, b in itertools.pairwise(times) if begun < b <= ended]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return waited, gaps


async def measured() -> dict[str, object]:
    async with httpx.AsyncClient(base_url=URL, timeout=600) as http:
        await ttft(http, 512)
        alone, together, gaps = list[float](), list[float](), list[float]()
        for _ in range(ROUNDS):
            alone.append(await ttft(http, LENGTH))
            one, found = await beside(http)
            together.append(one)
            gaps += found
    gaps.sort()
    return {
        "ttft_alone_s": alone,
        "ttft_beside_s": together,
        "ratio": statistics.mean(together) / statistics.mean(alone),
        "itl_p50_s": statistics.median(gaps),
        "itl_p99_s": gaps[int(0.99 * len(gaps))],
        "itl_max_s": gaps[-1],
        "num_itl": len(gaps),
    }


def main() -> None:
    found = {}
    for activations in ("int8", "exact"):
        command = [sys.executable, "-m", "minisgl", "serve", "--model", sys.argv[1], "--port", URL.rpartition(":")[2]]
        command += ["--activations", activations, "--max-seq-len", "9000", "--num-pages", "3000", "--no-access-log"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while True:
                try:
                    if httpx.get(URL + "/readyz", timeout=5).is_success:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.2)
            found[activations] = asyncio.run(measured())
        finally:
            server.terminate()
            server.wait()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
