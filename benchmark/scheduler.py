"""The schedulers beyond `minisgl bench scheduler`: single operations of the prefix cache, and whole production traces.

    python -m benchmark.scheduler tree [--backend rust_hotpath python] [--gate] [--out FILE]
    MINISGL_DATA=FOLDER python -m benchmark.scheduler traces [--trace NAME ...] [--requests N] [--out DIR]

`tree` times an eviction, a match and an insertion on trees of `NUM_NODES` nodes: Rust in Rust
(`rust/minisgl-core/benches/prefix_cache.rs`, built by cargo), the reference from Python. A match counts as a use, so it
includes a lock and its release on the way down; what prepares an operation is off the clock.

`traces` asks whether any decision differs: requests at the times of the trace (a step stands for `--step-ms` of it),
steps overlapping by one as the server's do, a pool that evicts; every plan, array, output and count is compared. A
decision that differs ends the run with the calls that led to it. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.bench.environment import environment
from minisgl.bench.report import print_result, write_json
from minisgl.bench.scheduler import show
from minisgl.bench.scheduler_cases import measured
from minisgl.bench.traces import NAMES, TraceRequest, prompt_tokens, read_trace
from minisgl.config import ConfigError
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import BACKENDS
from minisgl.scheduler.reference.page_pool import PagePool
from minisgl.scheduler.reference.radix import RadixTree
from minisgl.step import Arrival, StepPlan
from tests.helpers.parity import Pair

ROOT = Path(__file__).resolve().parents[1]
NUM_NODES = 100_000
LENGTH = 1024
NUM_PROMPTS = 64
NUM_EDGES = 8  # of a prompt that is matched
VOCABULARY = 100_000
CALLS_SHOWN = 8


class Cache:
    """The reference's tree of page size 1, with tokens and pages that nobody has."""

    def __init__(self, num_pages: int) -> None:
        self.tree = RadixTree(PagePool(num_pages), 1, "lru")
        self.next_token = 0
        self.times_us: list[float] = []

    def insert(self, shared: list[int], length: int) -> list[int]:
        """Insert `shared` and so many new tokens; returns all."""
        tokens = shared + list(range(self.next_token, self.next_token + length))
        self.next_token += length
        pages = [self.tree.pool.pop() for _ in tokens]
        self._insert(tokens, pages)
        return tokens

    def _insert(self, tokens: list[int], pages: list[int]) -> None:
        handle, had = self.tree.insert(self.tree.root, tokens, pages, 0)
        self.tree.pool.push(pages[:had])
        self.tree.release(handle)

    def timed(self, work: Callable[[], None]) -> None:
        start = time.perf_counter_ns()
        work()
        self.times_us.append((time.perf_counter_ns() - start) / 1000)


def evict_one(repeats: int) -> list[float]:
    cache = Cache(NUM_NODES)
    for _ in range(NUM_NODES):
        cache.insert([], 1)
    for _ in range(repeats):
        cache.timed(lambda: cache.tree.evict(1))
        cache.insert([], 1)
    return cache.times_us


def match_1024(repeats: int) -> list[float]:
    cache = Cache(2 * NUM_NODES)
    tree = cache.tree
    prompts = []
    for _ in range(NUM_PROMPTS):
        prompt = cache.insert([], LENGTH)
        for edge in range(1, NUM_EDGES):
            cache.insert(prompt[: edge * LENGTH // NUM_EDGES], 1)
        prompts.append(prompt)
    while tree.num_nodes < NUM_NODES:
        cache.insert([], 1)

    def match(prompt: list[int]) -> None:
        found = tree.match(tree.root, prompt, 0, LENGTH)
        tree.release(tree.descend(tree.root, found))
        assert len(found.pages) == LENGTH

    for at in range(repeats):
        prompt = prompts[at * 37 % NUM_PROMPTS]
        cache.timed(lambda prompt=prompt: match(prompt))  # type: ignore[misc]
    return cache.times_us


def insert_1024(repeats: int) -> list[float]:
    cache = Cache(NUM_NODES + repeats * LENGTH)
    for _ in range(repeats):
        cache.insert([], LENGTH)
    while cache.tree.num_nodes < NUM_NODES:
        cache.insert([], 1)
    for _ in range(repeats):
        cache.tree.evict(LENGTH)
        tokens = list(range(cache.next_token, cache.next_token + LENGTH))
        cache.next_token += LENGTH
        pages = [cache.tree.pool.pop() for _ in tokens]
        cache.timed(lambda tokens=tokens, pages=pages: cache._insert(tokens, pages))  # type: ignore[misc]
    return cache.times_us


REFERENCE = {"evict_one": evict_one, "match_1024": match_1024, "insert_1024": insert_1024}
REPEATS = {
    "evict_one": {"rust_hotpath": 20_000, "python": 2000},
    "match_1024": {"rust_hotpath": 5000, "python": 200},
    "insert_1024": {"rust_hotpath": 1000, "python": 100},
}
BARS = {"evict_one": 0.6, "match_1024": 1.5, "insert_1024": 1.5}
"""Of Rust, in us: what a release must hold."""
CARGO = ("cargo", "bench", "--quiet", "--locked", "-p", "minisgl-core", "--bench", "prefix_cache", "--")


def times(backend: str, name: str, repeats: int) -> list[float]:
    """Of each operation, in us. Raises `ConfigError`."""
    if backend == "python":
        return REFERENCE[name](repeats)
    try:
        done = subprocess.run((*CARGO, name, str(repeats)), cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError("cargo is missing: it builds what times Rust") from error
    if done.returncode:
        raise ConfigError(f"cargo bench failed: {done.stderr.strip()[-1000:]}")
    return [float(line) for line in done.stdout.split()]


def run_tree(args: argparse.Namespace) -> int:
    figures: dict[str, dict[str, dict[str, float]]] = {backend: {} for backend in args.backend}
    missed = 0
    for name in REFERENCE:
        for backend in args.backend:
            found = figures[backend][name] = measured(partial(times, backend, name, REPEATS[name][backend]))
            missed += not show(name, backend, found, BARS[name] if backend == "rust_hotpath" else None)
    if args.out is not None:
        write_json(args.out, {"build": "release", "us": figures})
    print_result({b: {name: found["median"] for name, found in cases.items()} for b, cases in figures.items()})
    return 1 if args.gate and missed else 0


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


def run_traces(args: argparse.Namespace) -> int:
    config = ControlPlaneConfig(args.num_pages, 16, args.max_running_requests, 8192, 131_072)
    report: dict[str, Any] = {}
    for name in args.trace:
        report[name] = parity(name, read_trace(name)[: args.requests], config, args.step_ms)
        if args.out is not None:
            record = {"environment": environment(), "num_pages": args.num_pages, **report[name]}
            write_json(args.out / f"{name}_{args.num_pages}_pages.json", record)
    print_result(report)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark.scheduler", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    tree = commands.add_parser("tree", help="single operations of the prefix cache")
    tree.set_defaults(run=run_tree)
    tree.add_argument("--backend", nargs="+", choices=BACKENDS, default=list(reversed(BACKENDS)))
    tree.add_argument("--gate", action="store_true", help="exit with 1 when a bar is missed")
    tree.add_argument("--out", type=Path, metavar="FILE", help="write all figures as JSON")
    traces = commands.add_parser("traces", help="both schedulers over whole production traces")
    traces.set_defaults(run=run_traces)
    traces.add_argument("--trace", nargs="+", choices=tuple(NAMES), default=["mooncake-conversation"])
    traces.add_argument("--requests", type=int, help="the first N (default: all)")
    traces.add_argument("--step-ms", type=int, default=30, help="of the trace, per step")
    traces.add_argument("--num-pages", type=int, default=16_384, help="of 16 tokens")
    traces.add_argument("--max-running-requests", type=int, default=64)
    traces.add_argument("--out", type=Path, metavar="DIR", help="write JSON")
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except ConfigError as error:
        print(f"benchmark.scheduler: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
