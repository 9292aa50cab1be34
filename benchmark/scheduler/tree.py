"""Single operations of the prefix cache: an eviction, a match, an insertion; both implementations.

    python -m benchmark.scheduler.tree [--backend rust_hotpath python] [--gate] [--out FILE]

Rust is timed in Rust (`rust/minisgl-core/benches/prefix_cache.rs`, built by cargo), the reference from Python.

Both work on the same trees, of `NUM_NODES` nodes at each timed operation; what prepares one is off the
clock.

A match counts as a use, so it includes a lock and its release on the way down.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from minisgl.bench.report import print_result, write_json
from minisgl.bench.scheduler import show
from minisgl.bench.scheduler_cases import measured
from minisgl.config import ConfigError
from minisgl.scheduler.backend import BACKENDS
from minisgl.scheduler.reference.page_pool import PagePool
from minisgl.scheduler.reference.radix import RadixTree

ROOT = Path(__file__).resolve().parents[2]
NUM_NODES = 100_000
LENGTH = 1024
NUM_PROMPTS = 64
NUM_EDGES = 8  # of a prompt that is matched


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark.scheduler.tree", description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=list(reversed(BACKENDS)))
    parser.add_argument("--gate", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures as JSON")
    args = parser.parse_args(arguments)
    figures: dict[str, dict[str, dict[str, float]]] = {backend: {} for backend in args.backend}
    missed = 0
    try:
        for name in REFERENCE:
            for backend in args.backend:
                run = partial(times, backend, name, REPEATS[name][backend])
                found = figures[backend][name] = measured(run)
                missed += not show(name, backend, found, BARS[name] if backend == "rust_hotpath" else None)
    except ConfigError as error:
        print(f"benchmark.scheduler.tree: {error}", file=sys.stderr)
        return 2
    if args.out is not None:
        write_json(args.out, {"build": "release", "us": figures})
    print_result({b: {name: found["median"] for name, found in cases.items()} for b, cases in figures.items()})
    return 1 if args.gate and missed else 0


if __name__ == "__main__":
    sys.exit(main())
