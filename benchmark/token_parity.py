"""The same requests through two servers that differ only in their scheduler: are the token ids the same?

    python -m benchmark.token_parity [--engine echo|torch] [--requests 200] [--out FILE]

Short, long and shared-prefix prompts, as text and as token ids, greedy and with fixed seeds, many at once. The echo
engine has one right answer to each. The embedded model runs in float32; sums depend on the batch, so a difference is
allowed where the two likeliest tokens lie within 1e-3 (they are listed). Exit code 1 for any other. The last line of
stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.e2e import serving

NEAR = 1e-3
BACKENDS = ("python", "rust_hotpath")
MODEL = ("--model", "smollm2", "--num-pages", "256", "--max-running-requests", "16")
ARGS = {
    "echo": ("--engine", "echo", "--num-pages", "512", "--page-size", "4", "--max-running-requests", "16"),
    "cpu": ("--engine", "cpu", *MODEL),
    "torch": ("--engine", "torch", "--dtype", "float32", *MODEL),
}


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    shared = ["", "You are a helpful assistant. ", "Once upon a time in a village by the sea there lived a cat. " * 4]
    found = []
    for index in range(count):
        text = rng.choice(shared) + f"Question {rng.randrange(40)}: " + "why is that so? " * rng.choice((1, 1, 4, 12))
        body: dict[str, Any] = {"prompt": text} if index % 3 else {"prompt": [ord(char) for char in text[:200]]}
        body |= {"max_tokens": rng.randint(1, 48), "ignore_eos": rng.random() < 0.3, "logprobs": 2}
        body |= {"temperature": 0 if index % 2 else 0.9, "seed": rng.randrange(5)}
        found.append(body)
    return found


def answers(backend: str, engine: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choice of each request, from a server of its own."""
    with (
        serving(*ARGS[engine], "--no-access-log", env={"MINISGL_CPU_BACKEND": backend}) as server,
        httpx.Client(base_url=server.url, timeout=600) as http,
        ThreadPoolExecutor(24) as pool,
    ):
        served = http.get("/health").json()["cpu_backend"]
        if served != backend:
            raise SystemExit(f"{backend} was asked for, {served} serves")

        def ask(body: dict[str, Any]) -> dict[str, Any]:
            answer = http.post("/v1/completions", json=body)
            answer.raise_for_status()
            choice: dict[str, Any] = answer.json()["choices"][0]
            return choice

        return list(pool.map(ask, bodies))


def first_difference(one: dict[str, Any], two: dict[str, Any]) -> int | None:
    ours, theirs = one["logprobs"]["tokens"], two["logprobs"]["tokens"]
    if ours == theirs and one["finish_reason"] == two["finish_reason"]:
        return None
    same = [a == b for a, b in zip(ours, theirs, strict=False)]
    return same.index(False) if False in same else len(same)


def is_near_tie(choice: dict[str, Any], at: int) -> bool:
    top = choice["logprobs"]["top_logprobs"]
    if at >= len(top) or len(top[at]) < 2:
        return False
    first, second = sorted(top[at].values(), reverse=True)[:2]
    return bool(first - second <= NEAR)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(ARGS), default="echo")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bodies = requests(args.requests, args.seed)
    ours, theirs = (answers(backend, args.engine, bodies) for backend in BACKENDS)
    differing, ties = [], []
    for index, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        if (at := first_difference(one, two)) is not None:
            sampled = bodies[index]["temperature"] > 0
            allowed = args.engine == "torch" and (is_near_tie(one, at) or sampled)
            (ties if allowed else differing).append({"request": index, "token": at, "sampled": sampled})
    tokens = sum(len(one["logprobs"]["tokens"]) for one in ours)
    report = {
        "engine": args.engine,
        "seed": args.seed,
        "requests": args.requests,
        "tokens": tokens,
        "differing": differing,
        "near_ties": ties,
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
