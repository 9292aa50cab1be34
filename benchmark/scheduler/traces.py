"""Production traces through both schedulers, with an engine that returns at once.

    MINISGL_DATA=FOLDER python -m benchmark.scheduler.traces [--trace NAME ...] [--requests N] [--out DIR]

Two questions. Does any decision differ: requests at the times of the trace (a step stands for `--step-ms` of it), steps
overlapping by one as the server's do, a pool that evicts; every plan, array, output and count compared. And what does
the prefix cache find (Mooncake, whose prefixes are known): with room for everything the rate of the trace itself, and
with small pools a rate to hold beside a plain LRU's. The last line of stdout is JSON; a decision that differs ends the
run with the calls that led to it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.scheduler import hit_rates
from benchmark.scheduler.hit_rates import VOCABULARY
from minisgl.bench.environment import environment
from minisgl.bench.plots import Series, line_plot
from minisgl.bench.traces import NAMES, TraceRequest, prompt_tokens, read_trace
from minisgl.config import ConfigError
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.step import Arrival, StepPlan
from tests.helpers.parity import Pair

POOLS = (512, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)  # blocks of 512 tokens
CALLS_SHOWN = 8


def parity(name: str, requests: list[TraceRequest], config: ControlPlaneConfig, step_ms: int) -> dict[str, Any]:
    """Raises `Divergence`."""
    pair = Pair(config, keep=CALLS_SHOWN)
    coming = due(requests, step_ms)
    rng = np.random.default_rng(0)
    in_flight: deque[StepPlan] = deque()
    step = ended = rows = 0
    began = time.perf_counter()
    while ended < len(requests):
        arrivals = [
            Arrival(place, prompt_tokens(one, place, VOCABULARY), one.input_len, one.output_len)
            for place, one in next(coming, [])
        ]
        in_flight.append(pair.schedule(step, list(arrivals)))
        rows += in_flight[-1].num_rows
        live = pair.theirs.stats().num_live
        while len(in_flight) > (1 if live else 0):
            plan = in_flight.popleft()
            tokens = rng.integers(0, VOCABULARY, plan.num_rows, dtype=np.int32)
            ended += len(pair.commit(plan.step, tokens))
        step += 1
        if step % 10_000 == 0:
            pair.check_pages()
            print(f"{name}: step {step}, {ended} ended, {time.perf_counter() - began:.0f} s", flush=True)
    pair.check_pages()
    stats = pair.theirs.stats()
    return {
        "requests": len(requests),
        "steps": step,
        "rows": rows,
        "divergences": 0,  # the first ends the run
        "retracted": stats.num_retracted_total,
        "prompt_tokens": stats.num_prompt_tokens_total,
        "found_in_cache": stats.num_cached_tokens_total / stats.num_prompt_tokens_total,
        "control_plane_seconds": {"python": pair.seconds[0], "rust_hotpath": pair.seconds[1]},
        "wall_seconds": time.perf_counter() - began,
    }


def due(requests: list[TraceRequest], step_ms: int) -> Iterator[list[tuple[int, TraceRequest]]]:
    """By step, the requests that have come, with their places; ends after the last one."""
    at = step = 0
    while at < len(requests):
        found = []
        while at < len(requests) and 1000 * requests[at].arrival_s <= step * step_ms:
            found.append((at, requests[at]))
            at += 1
        yield found
        step += 1


def hit_rate(name: str, requests: list[TraceRequest], out: Path | None) -> dict[str, Any]:
    report: dict[str, Any] = {"unlimited": hit_rates.unlimited(requests)}
    report["by_pool_size"] = records = hit_rates.by_pool_size(requests, list(POOLS))
    if out is not None:
        keys = {"radix_lru": "radix, LRU", "radix_lfu": "radix, LFU", "plain_lru": "plain LRU of blocks"}
        series = [
            Series(text, [one["pool_blocks"] for one in records], [100 * one[key] for one in records])
            for key, text in keys.items()
        ]
        line_plot(
            out / f"hit_rate_{file_name(name)}.png",
            series,
            title=f"{name}: prompt tokens found, one request at a time",
            x_label="pool, blocks of 512 tokens",
            y_label="% of prompt tokens",
            log_x=True,
        )
    return report


def file_name(name: str) -> str:
    return name.replace("-", "_")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs="+", choices=tuple(NAMES), default=["mooncake-conversation"])
    parser.add_argument("--requests", type=int, help="the first N (default: all)")
    parser.add_argument("--only", choices=("hit-rate", "parity"))
    parser.add_argument("--step-ms", type=int, default=30, help="of the trace, per step")
    parser.add_argument("--num-pages", type=int, default=16_384, help="of 16 tokens, for the parity run")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write JSON and plots")
    args = parser.parse_args()
    config = ControlPlaneConfig(args.num_pages, 16, args.max_running_requests, 8192, 131_072)
    report: dict[str, Any] = {}
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    for name in args.trace:
        requests = read_trace(name)[: args.requests]
        found: dict[str, Any] = {}
        if args.only != "parity" and requests[0].blocks:
            found["hit_rate"] = hit_rate(name, requests, args.out)
        if args.only != "hit-rate":
            found["parity"] = parity(name, requests, config, args.step_ms)
        report[name] = found
        if args.out is not None:
            kind = {"hit-rate": "_hit_rate", "parity": f"_parity_{args.num_pages}_pages"}.get(args.only, "")
            record = {"environment": environment(), "arguments": vars(args) | {"out": None}, **found}
            (args.out / f"{file_name(name)}{kind}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ConfigError as error:
        raise SystemExit(f"benchmark.scheduler.traces: {error}") from error
