"""What routing finds in whole traces, without engines: the router alone, whose trees stand for the engines' caches.

    python -m benchmark.routing.placements --out benchmark/runs/DATE-routing

A request stays for `STAY_S`; requests come N times as fast to N engines. "one cache": one tree with N times the pages.
What real schedulers make of the same placements is in `benchmark.routing.study`, on shorter pieces of the traces.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.bench.environment import environment
from minisgl.bench.traces import TraceRequest, prompt_tokens, read_trace
from minisgl.routing.api import Policy, RouterConfig
from minisgl.routing.backend import make_router
from minisgl.step import Int32Array

STAY_S = 5.0  # what an answer takes in `study`, about
PAGES = 46_900  # of 16 tokens, as many as the profile of `study` has
TRACES = {"mooncake-conversation": 0.4, "mooncake-synthetic": 0.4, "azure-conversation": 2.0, "azure-code": 2.0}
CONTEXT = 40_960


def run(
    trace: Sequence[TraceRequest],
    prompts: Sequence[Int32Array],
    policy: Policy,
    num_engines: int,
    pages: int,
    rate: float,
) -> dict[str, Any]:
    router = make_router(RouterConfig(policy, num_engines, tree_pages=pages))
    for engine in range(num_engines):
        router.engine_up(engine)
    ends: list[tuple[float, int]] = []
    matched, total, computed = 0, 0, [0] * num_engines
    for i, (one, tokens) in enumerate(zip(trace, prompts, strict=True)):
        now = one.arrival_s / rate
        while ends and ends[0][0] <= now:
            router.remove(heapq.heappop(ends)[1], 300)
        router.add(i, tokens)
        (placed,) = router.place()
        matched += placed.matched_len
        total += len(tokens)
        computed[placed.engine] += len(tokens) - placed.matched_len
        heapq.heappush(ends, (now + STAY_S, i))
    balance = max(computed) * num_engines / sum(computed)
    return {"engines": num_engines, "policy": policy, "matched": matched / total, "balance": balance}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for placements.json")
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 4, 8, 64], help="numbers of engines")
    args = parser.parse_args()
    found = []
    for name, rate in TRACES.items():
        trace = [one for one in read_trace(name) if one.input_len < CONTEXT]
        prompts = [prompt_tokens(one, i, 50_000) for i, one in enumerate(trace)]
        for size in args.sizes:
            best = run(trace, prompts, "cache_aware", 1, PAGES * size, rate)
            one = run(trace, prompts, "cache_aware", size, PAGES, rate * size)
            found.append({"trace": name, "requests": len(trace), **one, "one_cache": best["matched"]})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    raw = {"environment": environment(), "pages": PAGES, "stay_s": STAY_S, "cases": found}
    (args.out / "placements.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
