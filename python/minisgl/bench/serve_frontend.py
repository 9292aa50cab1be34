"""The scenario `frontend`: what the HTTP path costs, measured with an engine that returns at once.

64 and 256 clients, chat streaming, 200 tokens in, 128 out, the Qwen3 tokenizer from MINISGL_DATA, `--engine sim
--sim-profile null`, `rust_hotpath`; then 256 cold connections at once, and an idle server.

Doesn't know: how a load is measured.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from minisgl import envs
from minisgl.bench.load import Server, cold_connects, idle_cpu
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
    args.num_requests = args.num_requests or REQUESTS
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
