"""The figures of one server under one load, for comparisons: what `bench ab` calls for each run.

Keeps true: warm-up is outside the figures; a failed request, or an answer of another length, makes the run no result.
Doesn't know: arms, pairs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from minisgl import _rust
from minisgl.bench.server_process import ServerProcess
from minisgl.bench.stats import summary
from minisgl.config import ConfigError

if TYPE_CHECKING:
    from minisgl._rust import LoadResult

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
WARM_UP_LEN = 16
SCHEDULER = ("schedule", "commit")
LOOP = (*SCHEDULER, "receive", "launch", "wait", "send")


@dataclass(frozen=True, slots=True)
class Load:
    """Chat completions, streamed: by `concurrency` clients in a closed loop, or with `rate` (requests per second) as a
    Poisson process. `input_len` counts words, `output_len` tokens;
    each answer's length lies between `output_len` and `max_output_len` (0: all alike), and so for prompts. The first
    `shared_len` words are common to all prompts."""

    concurrency: int = 16
    num_requests: int = 64
    input_len: int = 200
    max_input_len: int = 0
    output_len: int = 128
    max_output_len: int = 0
    shared_len: int = 0
    rate: float = 0.0
    seed: int = 0

    def describe(self) -> str:
        def span(low: int, high: int) -> str:
            return f"{low} to {high}" if high > low else f"{low}"

        return (
            f"{self.num_requests} requests of {span(self.input_len, self.max_input_len)} words ({self.shared_len} of "
            f"them shared), {span(self.output_len, self.max_output_len)} tokens out, "
            + (f"{self.rate:g} a second (Poisson)" if self.rate else f"{self.concurrency} at once")
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def times_s(self) -> list[float]:
        """When each request of an open loop is due."""
        rng, at = random.Random(self.seed + 1), 0.0
        return [at := at + rng.expovariate(self.rate) for _ in range(self.num_requests)]

    def bodies(self, model: str) -> list[dict[str, Any]]:
        rng = random.Random(self.seed)
        shared = rng.choices(WORDS, k=self.shared_len)

        def one() -> dict[str, Any]:
            words = rng.randint(self.input_len, max(self.input_len, self.max_input_len))
            text = " ".join([*shared, *rng.choices(WORDS, k=max(words - self.shared_len, 1))])
            return {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": rng.randint(self.output_len, max(self.output_len, self.max_output_len)),
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }

        return [one() for _ in range(self.num_requests)]


def load_from(flags: Sequence[str]) -> Load:
    parser = argparse.ArgumentParser(prog="minisgl bench ab --load", allow_abbrev=False)
    for name, default in Load().as_dict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    load = Load(**vars(parser.parse_args(list(flags))))
    for name in ("concurrency", "num_requests", "input_len", "output_len"):
        if getattr(load, name) < 1:
            raise ConfigError(f"--load: --{name.replace('_', '-')} {getattr(load, name)}: must be at least 1")
    return load


def measure(server: ServerProcess, load: Load) -> dict[str, float]:
    """Throughput, latencies, CPU by process, time of the scheduler. Raises `ConfigError` when a request failed."""
    warm_up = replace(
        load, num_requests=2 * load.concurrency, output_len=WARM_UP_LEN, max_output_len=0, rate=0.0, seed=load.seed + 1
    )
    _ask(server, warm_up)
    before, stats_before = server.cpu_seconds(), _stats(server)
    answers = _ask(server, load)
    after, stats_after = server.cpu_seconds(), _stats(server)
    num_tokens = int(answers["completion_tokens"].sum())
    found = {
        "output_tok_s": num_tokens / answers["duration_s"],
        **_latencies(answers),
        **{f"{role}_cpu_us_per_token": 1e6 * (after[role] - before[role]) / num_tokens for role in after},
        "client_us_per_token": 1e6 * answers["cpu_s"] / num_tokens,
        **_steps(stats_before, stats_after),
        **{f"{role}_rss_mib": size / 2**20 for role, size in server.rss_bytes().items()},
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}  # answers in one piece have no ITL


def _ask(server: ServerProcess, load: Load) -> LoadResult:
    """By the generator of `bench serve`. Raises `ConfigError` unless every answer came whole."""
    bodies = load.bodies(server.model)
    plan: dict[str, Any] = {"arrivals": load.times_s()} if load.rate else {"concurrency": load.concurrency}
    answers = _rust.run_load(
        f"{server.url}/v1/chat/completions",
        [json.dumps(body).encode() for body in bodies],
        chains=[1] * len(bodies),
        headers=[("content-type", "application/json")],
        **plan,
    )
    failed = np.flatnonzero(answers["failure"])
    if len(failed):
        name = answers["failures"][int(answers["failure"][failed[0]])]
        said = answers["errors"][0] if answers["errors"] else ""
        raise ConfigError(f"{len(failed)} of {len(bodies)} requests failed: {name}: {said}")
    asked = np.array([body["max_tokens"] for body in bodies])
    if not np.array_equal(answers["completion_tokens"], asked[answers["index"]]):
        raise ConfigError(f"{answers['completion_tokens'].sum()} tokens came instead of {asked.sum()}")
    return answers


def _latencies(answers: LoadResult) -> dict[str, float]:
    """From the time that a request was due: a late client counts against the server."""
    due = answers["scheduled"]
    ttft, itl, e2e = (1e3 * values for values in (answers["first"] - due, answers["gaps"], answers["end"] - due))
    found = {"ttft": summary(ttft), "itl": summary(itl), "e2e": summary(e2e)}
    longest = float(itl.max()) if len(itl) else math.nan
    return {
        "ttft_p50_ms": found["ttft"]["p50"],
        "ttft_p99_ms": found["ttft"]["p99"],
        "itl_p50_ms": found["itl"]["p50"],
        "itl_p99_ms": found["itl"]["p99"],
        "longest_gap_ms": longest,
        "e2e_p99_ms": found["e2e"]["p99"],
    }


def _stats(server: ServerProcess) -> dict[str, Any]:
    """The server's own counts; empty for one that has none (an older revision)."""
    answer = httpx.get(f"{server.url}/stats")
    found: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
    return found.get("engine") or {}


def _steps(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """us per step of the loop's parts. The last message of an idle engine carries all of them."""
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
