"""Benchmark the schedulers: operations of the prefix cache, building blocks, and whole production traces.

    python -m benchmark.scheduler tree [--gate] [--out FILE]
    python -m benchmark.scheduler parts [--out FILE]
    MINISGL_DATA=FOLDER python -m benchmark.scheduler traces [--trace NAME ...] [--requests N] [--backend NAME]
        [--out DIR]

`tree` times an eviction, a match and an insertion of the Rust cache on trees of 100,000 nodes, in Rust
(`rust/minisgl-core/benches/prefix_cache.rs`, built by cargo).

`parts` times each building block in Python, in Rust through PyO3 and inside Rust, then whole steps with each part in
Rust, in one run: the tables of benchmark/runs/2026-11-29-hot-path.

`traces` checks that no decision differs: requests at the times of the trace (a step stands for `--step-ms` of it),
steps overlapping by one as in the server, a pool that evicts; every plan, array, output and count is compared. A
decision that differs ends the run with the calls that led to it. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import itertools
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
from minisgl.bench.scheduler_cases import CASES, in_rounds
from minisgl.bench.traces import NAMES, TraceRequest, prompt_tokens, read_trace
from minisgl.config import ConfigError
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.parts import Parts, PrefixTree
from minisgl.scheduler.policies import PART_NAMES, RUST_PARTS
from minisgl.scheduler.reference import PYTHON
from minisgl.scheduler.rust_parts import make_parts
from minisgl.step import Arrival, StepPlan
from tests.helpers.parity import Pair

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 100_000
CALLS_SHOWN = 8


REPEATS = {"evict_one": 20_000, "match_1024": 5000, "insert_1024": 1000}
BARS = {"evict_one": 0.6, "match_1024": 1.5, "insert_1024": 1.5}
"""Limits of a release, in us."""
CARGO = ("cargo", "bench", "--quiet", "--locked", "-p", "minisgl-core", "--bench", "prefix_cache", "--")


def times(name: str, repeats: int) -> list[float]:
    """Return the time of each operation in Rust, in us. Raises `ConfigError` if cargo is missing or fails."""
    try:
        done = subprocess.run((*CARGO, name, str(repeats)), cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError("cargo is not installed; it builds the Rust benchmark") from error
    if done.returncode:
        raise ConfigError(f"cargo bench failed: {done.stderr.strip()[-1000:]}")
    return [float(line) for line in done.stdout.split()]


def run_tree(args: argparse.Namespace) -> int:
    found = in_rounds([partial(times, name, REPEATS[name]) for name in BARS])
    figures = dict(zip(BARS, found, strict=True))
    missed = sum(not show(name, "rust_hotpath", figures[name], bar) for name, bar in BARS.items())
    if args.out is not None:
        write_json(args.out, {"build": "release", "us": figures})
    print_result({name: found["median"] for name, found in figures.items()})
    return 1 if args.gate and missed else 0


STEPS = ("decode_1", "decode_256", "churn_256", "prefill_16x512")
LENGTH = 1024


def cached(tree: PrefixTree) -> list[int]:
    """Fill a prefix tree with a path of `LENGTH` pages among 10,000 leaves of one page; return the path's tokens."""
    tokens = list(range(1, LENGTH + 1))
    for own in [tokens, *([-leaf] for leaf in range(2, 10_000))]:
        handle, _ = tree.insert(tree.root, own, tree.take(len(own)), 0)
        tree.release(handle)
    return tokens


def operations(parts: Parts) -> dict[str, Callable[[], object]]:
    """Return a benchmark call for each building block."""
    tree = parts.tree(16_384, 1, "lru", None)
    tokens = cached(tree)
    fresh = itertools.count(100_000, LENGTH)

    def insert() -> None:
        first = next(fresh)
        handle, _ = tree.insert(tree.root, list(range(first, first + LENGTH)), tree.take(LENGTH), 0)
        tree.release(handle)

    room = {"available": 4096, "page_size": 1, "max_page_changes": 65_536, "reserve_ratio": 716, "needed": 1000}
    row = (LENGTH, 0, 100, 0, 100, 0, False, 128)
    rows = [700] * 256, [1] * 256, [9] * 256
    return {
        "match_1024": lambda: tree.match(tree.root, tokens, 0, LENGTH),
        "insert_1024": insert,
        "plan_chunk": lambda: parts.plan_chunks([row], budget=512, **room),
        "metadata_256": lambda: parts.make_metadata(*rows, 1),
    }


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the time of each of `repeats` calls, in us."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - began))
    return times


def run_parts(args: argparse.Namespace) -> int:
    ways = {"Python": operations(PYTHON), "Rust by PyO3": operations(make_parts(PART_NAMES))}
    wanted = [(name, way) for name in ways["Python"] for way in ways]
    runs = [partial(timed, ways[way][name], 300) for name, way in wanted]
    inside = [partial(times, name, 2000 if name != "insert_1024" else 300) for name in ways["Python"]]
    found = in_rounds([*runs, *inside])
    keys = [*wanted, *((name, "inside Rust") for name in ways["Python"])]
    for (name, way), figures in zip(keys, found, strict=True):
        show(name, way, figures, None)
    backends = ["python", *(f"{RUST_PARTS}:{name}" for name in PART_NAMES), RUST_PARTS, "rust_hotpath"]
    cases = [(name, backend) for name in STEPS for backend in backends]
    makes = {of: partial(make_control_plane, of) for of in backends}
    steps = in_rounds([partial(CASES[name].case, makes[of], CASES[name].repeats_of(of)) for name, of in cases])
    for (name, backend), figures in zip(cases, steps, strict=True):
        show(name, backend, figures, None)
    figures = {f"{name}, {way}": one["median"] for (name, way), one in zip(keys + cases, found + steps, strict=True)}
    if args.out is not None:
        write_json(args.out, {"environment": environment(), "us": figures})
    print_result(figures)
    return 0


def parity(
    name: str,
    requests: list[TraceRequest],
    config: ControlPlaneConfig,
    step_ms: int,
    backend: str = "rust_hotpath",
) -> dict[str, Any]:
    """Run a trace on both schedulers and return the counts. Raises `Divergence` if they decide differently."""
    pair = Pair(config, keep=CALLS_SHOWN, backend=backend)
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
        "control_plane_seconds": {"python": pair.seconds[0], backend: pair.seconds[1]},
        "wall_seconds": time.perf_counter() - began,
    }


def due(requests: list[TraceRequest], step_ms: int) -> Iterator[list[tuple[int, TraceRequest]]]:
    """Yield, for each step, the requests that have arrived, with their indices; ends after the last request."""
    at = step = 0
    while at < len(requests):
        arrived = []
        while at < len(requests) and 1000 * requests[at].arrival_s <= step * step_ms:
            arrived.append((at, requests[at]))
            at += 1
        yield arrived
        step += 1


def run_traces(args: argparse.Namespace) -> int:
    config = ControlPlaneConfig(args.num_pages, 16, args.max_running_requests, 8192, 131_072)
    report: dict[str, Any] = {}
    for name in args.trace:
        report[name] = parity(name, read_trace(name)[: args.requests], config, args.step_ms, args.backend)
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
    tree.add_argument("--gate", action="store_true", help="exit with 1 if an operation exceeds its limit")
    tree.add_argument("--out", type=Path, metavar="FILE", help="write all figures as JSON")
    of_parts = commands.add_parser("parts", help="building blocks, and steps with each of them in Rust")
    of_parts.set_defaults(run=run_parts)
    of_parts.add_argument("--out", type=Path, metavar="FILE", help="write all figures as JSON")
    traces = commands.add_parser("traces", help="compare both schedulers over whole production traces")
    traces.set_defaults(run=run_traces)
    traces.add_argument("--trace", nargs="+", choices=tuple(NAMES), default=["mooncake-conversation"])
    traces.add_argument("--requests", type=int, help="number of requests from the start of a trace (default: all)")
    traces.add_argument("--backend", default="rust_hotpath", help="scheduler to compare with the reference")
    traces.add_argument("--step-ms", type=int, default=30, help="milliseconds of the trace for each step (default: 30)")
    traces.add_argument("--num-pages", type=int, default=16_384, help="pages of 16 tokens (default: 16384)")
    traces.add_argument("--max-running-requests", type=int, default=64)
    traces.add_argument("--out", type=Path, metavar="DIR", help="write results as JSON into DIR")
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except ConfigError as error:
        print(f"benchmark.scheduler: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
