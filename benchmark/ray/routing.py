"""What routing by prefix is worth behind Ray Serve: the same load on N replicas by `routing=prefix` and by Serve's own
power of two choices, on simulated engines whose prefill takes time and whose pools are small.

Both deployments are alive at once in one application, one is asked at a time, in turns. Texts of a round are the same
for both and new to each.

Invariants: a failed request makes the run no result; what does not fit into memory is not begun, and is said with
figures.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmark.ray.processes import below, memory_by_part, per_replica, why_not
from benchmark.ray.ratios import there_and_back
from minisgl.bench.load import Load, Server, calibrate, send
from minisgl.bench.render import Renderer
from minisgl.bench.serve_metrics import Slo, figures
from minisgl.bench.traces import TraceRequest, read_trace
from minisgl.bench.workloads import (
    LoadRequest,
    MadeUp,
    Message,
    Workload,
    WorkloadSettings,
    make_workload,
    poisson_arrivals,
)
from minisgl.config import ConfigError

POLICIES = ("prefix", "default")
SIZES = (2, 4, 8)
RATE = 1.2  # requests a second for each replica: its prefills alone fill half of the time if nothing is cached
POOL = 12_288  # tokens; what a replica's share of the prefixes takes, and half as much again
PREFIXES_PER_REPLICA, PREFIX = 8, 1024
TRACE = "mooncake-conversation"
SCALE = 16  # of the trace's lengths
PROFILE = {
    "name": "slow prefill",
    "context_len": POOL,
    "num_kv_tokens": POOL,
    "table": {
        "rows": [1, 64],
        "prefill_tokens": [0, 8192],
        "kv_len": [0],
        "ms": [[[10.0], [10.0 + 0.4 * 8192]], [[16.0], [16.0 + 0.4 * 8192]]],
    },
}


def scaled(trace: Sequence[TraceRequest], by: int) -> list[TraceRequest]:
    """With lengths and blocks so many times shorter: what was shared stays shared."""
    return [
        TraceRequest(
            one.arrival_s,
            max(1, one.input_len // by),
            max(1, one.output_len // by),
            one.blocks[: -(-max(1, one.input_len // by) // (one.block_len // by))],
            one.block_len // by,
        )
        for one in trace
    ]


def trace_workload(trace: Sequence[TraceRequest], rate: float, run: int) -> Workload:
    """At `rate` requests a second in the mean, the trace's own pattern."""
    took = trace[-1].arrival_s
    stretch = (len(trace) - 1) / rate / took if took else 0.0
    requests = []
    for i, one in enumerate(trace):
        left, parts = one.input_len, list[MadeUp]()
        for block in one.blocks:
            parts.append(MadeUp(("ray", run, "block", block), min(left, one.block_len)))
            left -= parts[-1].num_tokens
        given = tuple(parts) or (MadeUp(("ray", run, i), left),)
        requests.append(LoadRequest((Message("user", given),), one.output_len))
    arrivals = tuple(one.arrival_s * stretch for one in trace)
    return Workload(TRACE, tuple(requests), (1,) * len(requests), arrivals)


def shared_workload(num_replicas: int, num_requests: int, rate: float, run: int) -> Workload:
    """More prefixes than one replica can keep, and as many as all together can."""
    settings = WorkloadSettings(
        num_requests=num_requests,
        input_len=(16, 48),
        output_len=(8, 32),
        num_prefixes=PREFIXES_PER_REPLICA * num_replicas,
        prefix_len=PREFIX,
        run=run,
    )
    made = make_workload("shared-prefix", settings)
    return replace(made, arrivals=poisson_arrivals(num_requests, rate, run))


def workloads(num_replicas: int, requests: int, run: int) -> dict[str, Workload]:
    """`requests`: of the shared prefixes for each replica; of the trace, whatever the number of replicas, ten times as
    many: what it shares is seldom near."""
    rate = RATE * num_replicas
    piece = [one for one in scaled(read_trace(TRACE), SCALE) if one.input_len + one.output_len < POOL // 2]
    return {
        "shared-prefix": shared_workload(num_replicas, requests * num_replicas, rate, run),
        TRACE: trace_workload(piece[: 10 * requests], rate, run),
    }


def measure(rounds: int, sizes: Sequence[int], requests: int, say: Callable[[str], None]) -> dict[str, Any]:
    """`samples`: a record for each size, workload, routing and round; `left_out`: sizes and why; `memory`: bytes."""
    from tests.helpers.ray_cluster import ray_cluster

    samples, left_out, memory = list[dict[str, Any]](), dict[int, str](), dict[int, dict[str, int]]()
    with tempfile.TemporaryDirectory() as folder, ray_cluster() as cluster:
        profile = Path(folder) / "slow-prefill.yaml"
        profile.write_text(yaml.safe_dump(PROFILE), encoding="utf-8")
        known: tuple[float, float] | None = None
        for size in sorted(sizes):
            if known and (reason := why_not(2 * size, *known, float(psutil.virtual_memory().available))):
                left_out[size] = reason
                say(f"{size} replicas: left out: {reason}")
                continue
            common = {"flags": ["--engine", "sim", "--sim-profile", str(profile)], "replicas": size, "cpus": 0}
            cluster.deploy(models={policy: {**common, "routing": policy} for policy in POLICIES})
            memory[size] = memory_by_part(below(os.getpid()))
            known = per_replica(memory[size], 2 * size)
            for sample in _of_size(cluster.url, size, rounds, requests):
                samples.append(sample)
                say(
                    f"{size} replicas, {sample['workload']}, round {sample['round'] + 1}: {sample['routing']}: "
                    f"hit {sample['hit_rate']:.3f}, TTFT p50 {sample['ttft_p50_ms']:.0f} ms"
                )
            cluster.delete()
    return {"samples": samples, "left_out": left_out, "memory": memory}


def _of_size(url: str, size: int, rounds: int, requests: int) -> Iterator[dict[str, Any]]:
    extra = {"ignore_eos": True}
    servers = {policy: Server(url, policy) for policy in POLICIES}
    renderers = {
        name: Renderer(name, "chat", calibrate(server, "chat", extra), extra) for name, server in servers.items()
    }
    for turn in range(rounds):
        for name, workload in workloads(size, requests, 100 * size + turn).items():
            for policy in there_and_back(POLICIES, turn):
                bodies = [renderers[policy].body(one) for one in workload.requests]
                load = Load(bodies=bodies, chains=workload.chains, arrivals=workload.arrivals)
                before = os.getloadavg()[0]
                found = figures(send(servers[policy], load, f"{name}, {policy}"), Slo())
                if found["failed"]:
                    raise ConfigError(f"{name}, {policy}, {size} replicas: {found['failures']} {found['errors']}")
                yield {"replicas": size, "workload": name, "routing": policy, "round": turn, "load": before} | {
                    "requests": found["requests"],
                    "hit_rate": found["cached_tokens"] / found["input_tokens"],
                    "ttft_p50_ms": found["ttft_ms"]["p50"],
                    "ttft_p99_ms": found["ttft_ms"]["p99"],
                    "e2e_p50_ms": found["e2e_ms"]["p50"],
                    "output_tok_s": found["output_tok_s"],
                    "duration_s": found["duration_s"],
                }
