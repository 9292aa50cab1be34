"""What routing is worth: traces on 1 to 64 simulated engines by each policy, beside one engine with the cache of all.

    python -m benchmark.routing.study --out benchmark/runs/DATE-routing

Requests come N times as fast to N engines, at a rate that one engine keeps up with. "one cache" is the most that any
routing could reach: one engine with N times the pages and slots, with requests at the rate of one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.bench.environment import environment
from minisgl.bench.simulate import Simulation, simulate
from minisgl.config import EngineConfig
from minisgl.engine.sim.build import build_sim
from minisgl.routing.api import POLICIES

SIZES = (1, 2, 4, 8, 64)
ONE_CACHE = "one cache"
PROFILE, SLOTS = "qwen3-8b-h200", 256


@dataclass(frozen=True, slots=True)
class Workload:
    """`rate`: of the trace's own, for one engine. `num_requests`: the first so many."""

    trace: str
    num_requests: int
    rate: float


WORKLOADS = (
    Workload("mooncake-conversation", 700, 0.4),
    Workload("mooncake-synthetic", 600, 0.4),
    Workload("azure-conversation", 600, 2.0),
)


@dataclass(frozen=True, slots=True)
class Case:
    workload: Workload
    num_engines: int
    routing: str


def cases(workloads: tuple[Workload, ...], sizes: tuple[int, ...]) -> Iterator[Case]:
    for workload in workloads:
        for size in sizes:
            for routing in (*POLICIES, ONE_CACHE) if size > 1 else (ONE_CACHE,):
                yield Case(workload, size, routing)


def run_case(case: Case, num_pages: int) -> dict[str, Any]:
    began = time.perf_counter()
    alone = case.routing == ONE_CACHE
    size = case.num_engines if alone else 1
    engine = EngineConfig(
        engine="sim",
        sim_profile=PROFILE,
        num_pages=num_pages * size,
        max_running_requests=SLOTS * size,
        max_prefill_length=8192,
    )
    settings = Simulation(
        engine=engine,
        trace=case.workload.trace,
        max_requests=case.workload.num_requests,
        time_scales=(case.workload.rate * (1 if alone else case.num_engines),),
        num_engines=1 if alone else case.num_engines,
        routing="cache_aware" if alone else case.routing,  # type: ignore[arg-type]
    )
    (figures,) = simulate(settings)["runs"]
    return {
        "trace": case.workload.trace,
        "engines": case.num_engines,
        "routing": case.routing,
        "took_s": time.perf_counter() - began,
        **figures,
    }


def pages_of_one() -> int:
    """Of one engine's pool, as its profile says."""
    config = EngineConfig(engine="sim", sim_profile=PROFILE)
    return build_sim(config, lambda *report: None).info.num_pages


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for engines.json")
    parser.add_argument("--traces", nargs="+", choices=[one.trace for one in WORKLOADS], help="only these")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="numbers of engines")
    parser.add_argument("--requests", type=int, help="at most so many of each trace")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    args = parser.parse_args(argv)
    chosen = tuple(
        Workload(one.trace, min(one.num_requests, args.requests or one.num_requests), one.rate)
        for one in WORKLOADS
        if not args.traces or one.trace in args.traces
    )
    todo, num_pages = list(cases(chosen, tuple(args.sizes))), pages_of_one()
    raw = {
        "environment": environment(),
        "profile": PROFILE,
        "pages_of_one": num_pages,
        "workloads": [dataclasses.asdict(one) for one in chosen],
        "cases": (found := list[dict[str, Any]]()),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.jobs) as pool:
        for one in pool.map(run_case, todo, [num_pages] * len(todo)):
            found.append(one)
            print(
                f"{one['trace']:22} {one['engines']:3} {one['routing']:12} hit {one['hit_rate']:.4f} "
                f"p99 TTFT {one['ttft_s']['p99']:.2f} s balance {one['balance']:.3f} busy {one['device_busy']:.2f} "
                f"({one['took_s']:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
            (args.out / "engines.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
