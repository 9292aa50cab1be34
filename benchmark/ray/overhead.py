"""What Ray Serve costs: the same load on one replica behind Serve, on the bare server that a replica is, and on the
default server, all alive at once, asked in turns.

Invariants: a failed request makes the run no result; within a round all sides get the same texts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from benchmark.ray.pieces import look_at_pieces
from benchmark.ray.processes import Cpu, below, whole
from benchmark.ray.ratios import there_and_back
from minisgl.bench.load import Load, Server, calibrate, first_model, send
from minisgl.bench.render import PATHS, Renderer
from minisgl.bench.serve_metrics import Slo, figures
from minisgl.bench.server_process import Launch, ServerProcess
from minisgl.bench.workloads import WARMUP_RUN, WorkloadSettings, make_workload
from minisgl.config import ConfigError

SERVE, BARE, GATEWAY = "Ray Serve", "bare server", "bare, Rust gateway"
SIDES = (SERVE, BARE, GATEWAY)
FLAGS = ("--engine", "echo", "--page-size", "16", "--num-pages", "4096")
STREAMS = (1, 8, 64)
INPUT, OUTPUT = 100, 128
REQUESTS_PER_STREAM = {1: 24, 8: 12, 64: 6}
IDLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Side:
    server: Server
    processes: Callable[[], list[psutil.Process]]


@dataclass(frozen=True, slots=True)
class Point:
    """So many streams at once, of answers of so many tokens."""

    streams: int
    tokens: int

    @property
    def label(self) -> str:
        return f"{self.streams} x {self.tokens}"

    @property
    def num_requests(self) -> int:
        """One token takes little: more of those, or the clock of CPU time would see nothing."""
        count = self.streams * REQUESTS_PER_STREAM.get(self.streams, 6)
        return count if self.tokens > 1 else max(4 * count, 200)


def points(streams: Sequence[int], tokens: int = OUTPUT) -> list[Point]:
    return [Point(count, length) for count in streams for length in (1, tokens)]


@contextlib.contextmanager
def sides() -> Iterator[dict[str, Side]]:
    from tests.helpers.ray_cluster import ray_cluster

    with contextlib.ExitStack() as stack:
        found, bare = dict[str, Side](), list[int]()
        for name, front in ((BARE, ("--frontend", "python")), (GATEWAY, ())):
            own = stack.enter_context(ServerProcess(Launch(flags=(*FLAGS, *front))))
            bare.append(own.pid)
            found[name] = Side(Server(own.url, own.model), _tree(own.pid))
        cluster = stack.enter_context(ray_cluster())
        cluster.deploy(name="echo", flags=list(FLAGS), replicas=1)
        server = Server(cluster.url, first_model(cluster.url, None))
        found[SERVE] = Side(server, lambda: below(os.getpid(), bare))
        yield {name: found[name] for name in SIDES}


def _tree(pid: int) -> Callable[[], list[psutil.Process]]:
    return lambda: whole(pid)


def idle(side: Side, seconds: float = IDLE_S) -> dict[str, float]:
    """Cores that each part uses while nothing is asked."""
    cpu, began = Cpu(side.processes()), time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    return {part: used / took for part, used in cpu.used().items()}


def measure(rounds: int, streams: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
    """`samples`: a record for each point, side and round; `idle`: by side."""
    samples = list[dict[str, Any]]()
    with sides() as alive:
        renderers = {name: _renderer(side) for name, side in alive.items()}
        resting = {name: idle(side) for name, side in alive.items()}
        for turn in range(rounds):
            for i, point in enumerate(points(streams)):
                for name in there_and_back(SIDES, turn):
                    run = turn * len(points(streams)) + i
                    sample = _measure_one(alive[name], renderers[name], point, run, is_first=turn == 0)
                    samples.append({"side": name, "round": turn, "streams": point.streams, "tokens": point.tokens})
                    samples[-1] |= sample
                    say(
                        f"round {turn + 1} of {rounds}: {point.label}: {name}: {sample['output_tok_s']:.0f} tok/s, "
                        f"TTFT p50 {sample['ttft_p50_ms']:.2f} ms"
                    )
    return {"samples": samples, "idle": resting}


def _renderer(side: Side) -> Renderer:
    extra = {"ignore_eos": True}
    return Renderer(side.server.model, "chat", calibrate(side.server, "chat", extra), extra)


def _bodies(renderer: Renderer, point: Point, count: int, run: int) -> list[bytes]:
    settings = WorkloadSettings(
        num_requests=count, input_len=(INPUT, INPUT), output_len=(point.tokens, point.tokens), run=run
    )
    return [renderer.body(one) for one in make_workload("random", settings).requests]


def _measure_one(side: Side, renderer: Renderer, point: Point, run: int, *, is_first: bool) -> dict[str, Any]:
    count = point.num_requests
    load = Load(bodies=_bodies(renderer, point, count, run), chains=[1] * count, concurrency=point.streams)
    if is_first:
        few = 2 * point.streams
        warm = _bodies(renderer, point, few, WARMUP_RUN + run)
        send(side.server, replace(load, bodies=warm, chains=[1] * few), "warm-up")
    cpu, before = Cpu(side.processes()), os.getloadavg()[0]
    measured = send(side.server, load, point.label)
    used = cpu.used()
    found = figures(measured, Slo())
    if found["failed"]:
        raise ConfigError(f"{point.label}: {found['failed']} requests failed: {found['failures']} {found['errors']}")
    if point.tokens == 1:
        return {"load": before, **sample_of(found, used)}
    url = side.server.url + PATHS["chat"]
    pieces = look_at_pieces(url, _bodies(renderer, point, point.streams, 2 * WARMUP_RUN + run))
    per_write = {"tokens_per_write": pieces.tokens_per_chunk, "events_per_write": pieces.events_per_chunk}
    return {"load": before, **sample_of(found, used), **per_write}


def sample_of(found: Mapping[str, Any], used: Mapping[str, float]) -> dict[str, Any]:
    """From `serve_metrics.figures`, and CPU seconds by part."""
    latencies = {
        f"{kind}_{which}_ms": found[f"{kind}_ms"][which] for kind in ("ttft", "itl") for which in ("p50", "p99")
    }
    cpu_s = sum(used.values())
    return {
        "requests": found["requests"],
        "requests_s": found["requests_s"],
        "output_tok_s": found["output_tok_s"],
        **latencies,
        "tpot_p50_ms": found["tpot_ms"]["p50"],
        "tokens_per_event": found["tokens_per_event"],
        "cpu_s": dict(used),
        "cpu_ms_per_request": 1e3 * cpu_s / found["requests"],
        "cpu_s_per_1000_tokens": 1e3 * cpu_s / found["output_tokens"],
    }


def per_request_and_token(
    short: Mapping[str, Any], long: Mapping[str, Any], tokens: int
) -> dict[str, dict[str, float]]:
    """By part, from two samples of the same side and round: CPU us of one token's request, and of each token more."""
    parts = dict.fromkeys((*short["cpu_s"], *long["cpu_s"]))
    found = {}
    for part in parts:
        first = 1e6 * short["cpu_s"].get(part, 0.0) / short["requests"]
        all_of_it = 1e6 * long["cpu_s"].get(part, 0.0) / long["requests"]
        found[part] = {"request_us": first, "token_us": (all_of_it - first) / (tokens - 1)}
    return found
