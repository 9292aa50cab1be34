"""minisgl's server beside llama.cpp's on the same GGUF file, the same clients, in one run.

    pip install xllamacpp
    python -m benchmark.online.llama_cpp [--clients 1 8 32] [--out FILE]

Each of C clients streams one completion of 64 tokens after a prompt of about 128; the figure is tokens per second of
all clients together, from the first token of the last client to the end, median of the repeats, the servers in turns.
llama.cpp computes on the quantised weights (Q4_1), minisgl on bfloat16. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from minisgl.weights.sources import find_smollm2
from tests.helpers_e2e import serving

NUM_OUT = 64
LLAMA_CPP = """
import os, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel, params.warmup = 32 * 512, 32, True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
params.cache_prompt = False
server = xllamacpp.Server(params)
print("READY", server.listening_address, flush=True)
sys.stdin.read()
os._exit(0)
"""


def prompt(index: int) -> str:
    return f"Story number {index}. " + "Once there was a small house by a quiet river in the old green valley. " * 7


async def one(http: httpx.AsyncClient, url: str, index: int, times: list[list[float]]) -> None:
    body = {
        "model": "smollm2",
        "prompt": prompt(index),
        "max_tokens": NUM_OUT,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with http.stream("POST", url + "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                times[index % len(times)].append(time.perf_counter())


async def measure(url: str, clients: int, first: int) -> float:
    times: list[list[float]] = [[] for _ in range(clients)]
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=clients)) as http:
        await asyncio.gather(*(one(http, url, first * clients + i, times) for i in range(clients)))
    began = max(stamps[0] for stamps in times)
    counted = sum(stamp > began for stamps in times for stamp in stamps)
    return counted / (max(stamps[-1] for stamps in times) - began)


def run(urls: dict[str, str], clients: list[int], repeats: int) -> list[dict[str, Any]]:
    results = []
    for count in clients:
        speeds: dict[str, list[float]] = {name: [] for name in urls}
        for repeat in range(-1, repeats):
            for name, url in urls.items():
                speed = asyncio.run(measure(url, count, repeat + 2 + 100 * count))
                if repeat >= 0:
                    speeds[name].append(speed)
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        print(count, "clients:", {name: round(value, 1) for name, value in medians.items()}, flush=True)
        results.append({"clients": count, "tok_s": speeds, "median_tok_s": medians})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    command = [sys.executable, "-c", LLAMA_CPP, str(find_smollm2()), str(args.threads)]
    theirs = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert theirs.stdout is not None
        address = next(line.split()[1] for line in theirs.stdout if line.startswith("READY"))
        with serving("--model", "smollm2", "--num-threads", str(args.threads), "--cache", "naive") as ours:
            results = run({"minisgl": ours.url, "llama.cpp": address}, args.clients, args.repeats)
    finally:
        theirs.kill()
        theirs.wait()
    report = {"num_out": NUM_OUT, "threads": args.threads, "results": results}
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
