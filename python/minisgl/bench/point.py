"""A measurement of one point of `minisgl bench serve` on a running server, as one flat dict of figures.

Used by comparisons of servers: `minisgl bench ab` and the programs in `benchmark/`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.bench import serve
from minisgl.bench.load import Server, send, stats_of
from minisgl.bench.serve_metrics import figures
from minisgl.bench.serve_run import load_of, renderer_for, warm_up
from minisgl.bench.serve_settings import Serve, points_of
from minisgl.bench.server_process import ServerProcess
from minisgl.bench.workloads import make_workload
from minisgl.config import ConfigError

SCHEDULER = ("schedule", "commit")
LOOP = (*SCHEDULER, "receive", "launch", "wait", "send")
OF_LATENCIES = ("p50", "p95", "p99")
LATENCIES = {"ttft": OF_LATENCIES, "itl": OF_LATENCIES, "tpot": ("p50",), "e2e": OF_LATENCIES}
NOT_FOR_A_LOAD = ("base_url", "out", "flags", "served_model")


@dataclass(frozen=True, slots=True)
class PointLoad:
    """A point of `bench serve`, with the flags that it was built from."""

    settings: Serve
    flags: tuple[str, ...]

    def describe(self) -> str:
        return f"minisgl bench serve {shlex.join(self.flags)}"


def point_from(flags: Sequence[str]) -> PointLoad:
    """Parse flags of `minisgl bench serve` that describe one point. Raises `ConfigError`."""
    commands = argparse.ArgumentParser(prog="--load", allow_abbrev=False).add_subparsers()
    args = serve.add_parser(commands).parse_args(list(flags))
    if given := [name for name in NOT_FOR_A_LOAD if getattr(args, name)]:
        raise ConfigError(f"--load: {given[0]}: must be left out: the variants name the servers")
    if not args.concurrency and not args.rate and not args.trace_arrivals and not args.trace:
        args.concurrency = [64]
    settings = serve.settings_of(args)
    settings.check()
    make_workload(settings.workload, settings.workload_settings)  # raises errors before a server is started
    if len(points_of(settings)) != 1 or settings.repeat != 1:
        raise ConfigError("--load: must be one point: one --concurrency or one --rate, without --repeat: use --pairs")
    return PointLoad(settings, tuple(flags))


def measure_point(
    server: ServerProcess, load: PointLoad, meanwhile: contextlib.AbstractContextManager[object] | None = None
) -> dict[str, float]:
    """Send the load and return throughput, latencies in ms, CPU by process, and time of the loop's parts. `meanwhile`
    is entered when the load begins and left when it ends. Raises `ConfigError` if a request failed."""
    settings = load.settings
    target = Server(server.url, server.model, settings.api_key, server)
    (point,) = points_of(settings)
    renderer = renderer_for(settings, target)
    warm_up(settings, target, renderer, point, 0)
    before = stats_of(target).get("engine") or {}
    asked = load_of(settings, renderer, point, 0)
    with meanwhile or contextlib.nullcontext():
        measured = send(target, asked, point.label)
    result = figures(measured, settings.slo)
    if result["failed"]:
        raise ConfigError(f"{result['failed']} of {result['requests']} requests failed: {result['failures']}")
    flat = {**_flat(result), **_steps(before, stats_of(target).get("engine") or {})}
    return {name: value for name, value in flat.items() if value is not None and math.isfinite(value)}


def _flat(result: Mapping[str, Any]) -> dict[str, float | None]:
    latencies = {
        f"{name}_{which}_ms": result[f"{name}_ms"][which] for name, which_of in LATENCIES.items() for which in which_of
    }
    goodput, server = result["goodput"], result["server"] or {}
    return {
        "output_tok_s": result["output_tok_s"],
        "goodput_requests_s": None if goodput is None else goodput["requests_s"],
        **latencies,
        "cached_share": result["cached_tokens"] / max(1, result["input_tokens"]),
        "longest_pause_ms": result["longest_pause_ms"],
        **{f"{role}_cpu_us_per_token": value for role, value in (server.get("cpu_us_per_token") or {}).items()},
        "client_us_per_token": result["client"]["cpu_us_per_token"],
        **{f"{role}_rss_mib": value for role, value in (server.get("rss_mib") or {}).items()},
    }


def _steps(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return microseconds per step of the loop's parts. An idle engine's last message includes all of its steps."""
    steps = after.get("num_steps_total", 0) - before.get("num_steps_total", 0)
    if steps <= 0 or "meters" not in after:
        return {}

    def us(part: str) -> float:
        return float(1e6 * (after["meters"][part]["total_s"] - before["meters"][part]["total_s"]) / steps)

    rows = after["num_rows_total"] - before["num_rows_total"]
    return {
        "scheduler_us_per_step": sum(us(part) for part in SCHEDULER),
        **{f"{part}_us_per_step": us(part) for part in LOOP if part in after["meters"]},
        "rows_per_step": rows / steps,
        "steps": float(steps),
    }
