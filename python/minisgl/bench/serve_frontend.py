"""The scenario `frontend`: what the HTTP path costs, measured with an engine that returns at once.

64 and 256 clients, chat streaming, 200 tokens in, 128 out, the Qwen3 tokenizer from MINISGL_DATA, `--engine sim
--sim-profile null`, `rust_hotpath`; then 256 cold connections at once, and an idle server.

A figure that this run has not measured is left out, not guessed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from minisgl import envs
from minisgl.bench.load import Server, cold_connects, idle_cpu
from minisgl.bench.report import table
from minisgl.config import ConfigError

CLIENTS = [64, 256]
TOKENS_IN, TOKENS_OUT = 200, 128
REQUESTS = 4096
COLD = 256
COLD_REPEATS = 5
IDLE_S = 10.0
POOL_PAGES = 16384  # of 16 tokens: far more than 256 requests need


def frontend_settings(args: argparse.Namespace) -> None:
    """Set what the command line has left open. Raises `ConfigError` without the tokenizer."""
    args.concurrency = args.concurrency or ([] if args.rate else CLIENTS)
    args.num_requests = REQUESTS if args.num_requests is None else args.num_requests
    args.input_len = args.input_len or [TOKENS_IN, TOKENS_IN]
    args.output_len = args.output_len or [TOKENS_OUT, TOKENS_OUT]
    if args.base_url is None:
        args.flags = [*_flags(), *args.flags]  # later ones win


def _flags() -> list[str]:
    folder = envs.data_dir()
    if folder is None:
        raise ConfigError(f"--scenario frontend: {envs.DATA} is not set: the folder with tokenizers/qwen3")
    return [
        *("--engine", "sim", "--sim-profile", "null", "--model", str(folder / "tokenizers" / "qwen3")),
        *("--cpu-backend", "rust_hotpath", "--max-running-requests", str(max(CLIENTS))),
        *("--num-pages", str(POOL_PAGES)),
    ]


def frontend_extras(server: Server) -> dict[str, Any]:
    """Cold connections and the idle server, once the loads are over."""
    connected, answered, failed = [], [], 0
    for _ in range(COLD_REPEATS):
        result = cold_connects(server, COLD)
        failed += int((result["failure"] > 0).sum())
        connected.append(1e3 * float(np.nanmax(result["connected"])))
        answered.append(1e3 * float(np.nanmax(result["headers"])))
    return {
        "cold": {
            "connections": COLD,
            "failed": failed,
            "last_connected_ms": float(np.median(connected)),
            "last_answered_ms": float(np.median(answered)),
            "runs_last_answered_ms": answered,
        },
        "idle_cpu_percent": {role: 100 * share for role, share in idle_cpu(server, IDLE_S).items()},
    }


def frontend_table(result: Mapping[str, Any]) -> str:
    """What was measured beside the targets, the stretch target last."""
    head = ("figure", "measured", "target", "stretch", "verdict")
    rows = []
    for name, value, at_least, target, stretch in _rows(result):
        reached = [value >= limit if at_least else value <= limit for limit in (target, stretch)]
        verdict = "stretch" if reached[1] else "reached" if reached[0] else "missed"
        sign = ">=" if at_least else "<="
        rows.append((name, value, f"{sign} {target:,}", f"{sign} {stretch:,}", verdict))
    return table(head, rows)


def _rows(result: Mapping[str, Any]) -> Iterator[tuple[str, float, bool, float, float]]:
    """Name, value, whether more is better, target, stretch target."""
    points = {point["value"]: point for point in result["points"] if point["mode"] == "closed"}
    for clients, target, stretch in ((64, 50_000, 80_000), (256, 60_000, 100_000)):
        if clients in points:
            yield f"output tok/s, {clients} clients", points[clients]["output_tok_s"], True, target, stretch
    if (point := points.get(256)) is not None:
        if point["server"] is not None:
            cpu, rss = point["server"]["cpu_us_per_token"], point["server"]["rss_mib"]
            yield "CPU us/token, HTTP process, 256 clients", cpu["http"], False, 15, 10
            yield "CPU us/token, all server processes, 256 clients", cpu["all"], False, 20, 13
            yield "RSS of the HTTP process, MB", rss["http"] * 2**20 / 1e6, False, 180, 120
        yield "TTFT p99 ms, 256 clients", point["ttft_ms"]["p99"], False, 200, 130
        yield "ITL p99 ms, 256 clients", point["itl_ms"]["p99"], False, 25, 10
        seconds = f"{point['duration_s']:.0f} s"
        yield f"longest pause ms, 256 clients, {seconds}", point["longest_pause_ms"], False, 50, 20
    if "cold" in result:
        yield "last of 256 cold connections answered, ms", result["cold"]["last_answered_ms"], False, 300, 100
    if result.get("idle_cpu_percent"):
        yield "idle CPU, % of a core", sum(result["idle_cpu_percent"].values()), False, 1, 0.2
