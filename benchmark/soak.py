"""Soak test with many streaming clients: exact responses, no leak, flat memory.

    python -m benchmark.soak [--engine echo|torch] [--seconds 600] [--clients 64] [--out FILE]

Starts its own server with a pool small enough to evict and retract. Each client sends prompts with shared prefixes,
mixed lengths and stop strings, and sometimes disconnects midway. On the echo engine every finished response is compared
with the one that the prompt gives alone. Meanwhile one client sends requests that are refused for their size, in the
forms of `REFUSED`. Exit code 1 if anything differs, fails or leaks, if the server's counters do not add up, or if a
process grows by more than `MAX_GROWTH_MB` in the second half. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from minisgl.engine.echo import EchoModel
from minisgl.tokenizer import Tokenizer
from tests.helpers.e2e import ServerProcess, serving

PREFIXES = ("", "You are a helpful assistant. ", "You are a helpful pirate. Speak like one, always. " * 3)
MODEL = ("--model", "smollm2", "--num-pages", "256", "--max-running-requests", "32", "--max-seq-len", "1024")
ARGS = {
    "echo": ("--engine", "echo", "--num-pages", "256", "--page-size", "4", "--max-running-requests", "32"),
    "cpu": ("--engine", "cpu", *MODEL),
    "torch": ("--engine", "torch", *MODEL),
}
ECHO_LIMIT = 256 * 4 + 1
MAX_GROWTH_MB = 16.0
REFUSED_BYTES = 2_000_000  # more than any context here
REFUSED_EVERY_S = 0.5
# Route of each kind of refused request, and a function from a size in bytes to its body.
REFUSED: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "spaces": ("/v1/chat/completions", lambda size: {"messages": [{"role": "user", "content": " " * size}]}),
    "no-spaces": ("/v1/completions", lambda size: {"prompt": "a" * size}),
    "many-prompts": ("/v1/completions", lambda size: {"prompt": ["hello, world " * (size // 13 // 256)] * 256}),
    "token-ids": ("/v1/completions", lambda size: {"prompt": [7] * (size // 2)}),
    "many-messages": (
        "/v1/chat/completions",
        lambda size: {"messages": [{"role": "user", "content": "hi"}] * (size // 32)},
    ),
    "tokenize": ("/tokenize", lambda size: {"prompt": "hello, world " * (size // 13)}),
}
Report = tuple["Tally", list[dict[str, float]]]


@dataclass(slots=True)
class Tally:
    finished: int = 0
    left: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def expected(prompt: str, seed: int, max_tokens: int, stop: list[str]) -> str:
    ids = Tokenizer.echo().encode(prompt).tolist()
    out = EchoModel(seed=seed).generate(ids, min(max_tokens, ECHO_LIMIT - len(ids)))
    text = bytes(token for token in out if token < 256).decode()
    cuts = [text.index(one) for one in stop if one in text]
    return text[: min(cuts)] if cuts else text


async def client(http: httpx.AsyncClient, seed: int, until: float, tally: Tally, exact: bool) -> None:
    generator = random.Random(seed)
    while time.monotonic() < until:
        prompt = generator.choice(PREFIXES) + f"Question {generator.randrange(50)}: why?"
        request_seed, max_tokens = generator.randrange(5), generator.randrange(1, 150)
        stop = ["ta", "zz"] if generator.random() < 0.3 else []
        body = {"prompt": prompt, "seed": request_seed, "max_tokens": max_tokens, "stop": stop, "stream": True}
        leave_after = generator.randrange(30) if generator.random() < 0.2 else -1
        text, reason, chunks = "", None, 0
        try:
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    choice = json.loads(line[6:])["choices"][0]
                    text, reason, chunks = text + choice["text"], choice["finish_reason"], chunks + 1
                    if chunks == leave_after:
                        break
        except (httpx.HTTPError, KeyError, ValueError) as error:
            tally.failed.append(repr(error))
            continue
        if reason is None:
            tally.left += 1
            continue
        tally.finished += 1
        if exact and text != expected(prompt, request_seed, max_tokens, stop):
            tally.wrong.append(json.dumps({"body": body, "got": text}))


async def too_large(http: httpx.AsyncClient, until: float, tally: Tally) -> None:
    """Send oversized requests, one at a time with pauses, until `until`: the other clients are what is measured."""
    for kind, (path, body) in itertools.cycle(REFUSED.items()):
        if time.monotonic() >= until:
            return
        try:
            answer = await http.post(path, json=body(REFUSED_BYTES))
            outcome = f"{answer.status_code} {answer.text[:200]}"
        except httpx.HTTPError as error:
            outcome = repr(error)
        if outcome.startswith("400 "):
            tally.refused += 1
        else:
            tally.failed.append(f"{kind}: {outcome}")
        await asyncio.sleep(REFUSED_EVERY_S)


def rss_mb(server: ServerProcess) -> dict[str, float]:
    processes = {"http": psutil.Process(server.process.pid), "engine": server.children()[0]}
    return {name: round(process.memory_info().rss / 1e6, 1) for name, process in processes.items()}


async def load(server: ServerProcess, clients: int, seconds: float, exact: bool) -> Report:
    tally, samples = Tally(), list[dict[str, float]]()
    until = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=clients + 1)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
        tasks = [asyncio.create_task(client(http, seed, until, tally, exact)) for seed in range(clients)]
        tasks.append(asyncio.create_task(too_large(http, until, tally)))
        while time.monotonic() < until:
            samples.append(rss_mb(server))
            await asyncio.sleep(seconds / 20)
        await asyncio.gather(*tasks)
    samples.append(rss_mb(server))
    return tally, samples


def final_stats(server: ServerProcess) -> dict[str, Any]:
    """Return the server's own counts once it is idle."""
    for _ in range(200):
        stats: dict[str, Any] = httpx.get(server.url + "/health").json()["stats"]
        if stats["num_running"] + stats["num_waiting"] == 0:
            break
        time.sleep(0.05)
    return stats


def counters(server: ServerProcess) -> dict[str, float]:
    """Return the server's request counters by name and reason."""
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    pairs = [line.rpartition(" ") for line in lines if line.startswith("minisgl:requests_") and "_total" in line]
    return {name: float(value) for name, _, value in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(ARGS), default="echo")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with serving(*ARGS[args.engine]) as server:
        tally, samples = asyncio.run(load(server, args.clients, args.seconds, args.engine == "echo"))
        stats, counted = final_stats(server), counters(server)
        lines = [line for line in server.lines if "Traceback" in line or "ERROR" in line]
    # the caches of both processes fill in the beginning, and a step's own tensors come and go: growth is the highest of
    # the last quarter above the highest of the one before
    half, quarter = len(samples) // 2, len(samples) * 3 // 4
    growth = {
        name: round(max(s[name] for s in samples[quarter:]) - max(s[name] for s in samples[half:quarter]), 1)
        for name in samples[0]
    }
    leaked = stats["num_pages"] - stats["num_free_pages"] - stats["num_evictable_pages"]
    accepted = counted.pop("minisgl:requests_accepted_total")
    errors = counted.get('minisgl:requests_finished_total{reason="error"}', 0)
    adds_up = accepted == sum(counted.values()) and not errors

    grows = max(growth.values()) > MAX_GROWTH_MB
    ok = (
        tally.finished > 0
        and tally.refused > 0
        and adds_up
        and not (tally.wrong or tally.failed or lines or leaked or grows)
    )
    report = {
        "ok": ok,
        "engine": args.engine,
        "seconds": args.seconds,
        "clients": args.clients,
        "finished": tally.finished,
        "left": tally.left,
        "refused": tally.refused,
        "failed": tally.failed[:5],
        "wrong": tally.wrong[:5],
        "pages_leaked": leaked,
        "accepted": accepted,
        "ended": counted,
        "rss_mb_growth_second_half": growth,
        "rss_mb": samples,
        "stats": stats,
        "server_errors": lines[:5],
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
