"""The balance of a load over a server's engines, and its prefix cache hit rate, from the server's counters (/stats)
before and after.

Invariants: with a server that has no such counters, only these figures are missing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.bench.load import Server, stats_of

HEAD = ("load", "engines", "hit rate %", "requests, most/mean", "rows, most/mean", "requests by engine", "moved")
IDLE_S = 2.0  # seconds until idle engines have sent their last snapshot
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Counters since the server's start, by engine and in total. `rows`: of all steps, a token or prompt chunk each."""

    requests: Sequence[int]
    rows: Sequence[int]
    prompt_tokens: int
    cached_tokens: int
    moved: int


def read_counters(server: Server) -> EngineCounters | None:
    """Read the counters once all engines are idle, or after `IDLE_S`. None if the server has no such counters."""
    deadline = time.monotonic() + IDLE_S
    while True:
        try:
            stats = stats_of(server)
            engines = [one["stats"] for one in stats["engines"] if one["stats"] is not None]
            if not engines:
                return None
            if any(one["num_running"] or one["num_waiting"] for one in engines) and time.monotonic() < deadline:
                time.sleep(POLL_S)
                continue
            return EngineCounters(
                [one["num_hits_total"] + one["num_misses_total"] for one in engines],
                [one["num_rows_total"] for one in engines],
                sum(one["num_prompt_tokens_total"] for one in engines),
                sum(one["num_cached_tokens_total"] for one in engines),
                (stats["pool"] or {}).get("num_moved_total", 0),
            )
        except (KeyError, TypeError):
            return None


def difference(before: EngineCounters | None, after: EngineCounters | None) -> dict[str, Any] | None:
    """Return the figures of a load from the counters around it; None if unknown, or if an engine came or went."""
    if before is None or after is None or len(before.rows) != len(after.rows):
        return None
    requests = [b - a for a, b in zip(before.requests, after.requests, strict=True)]
    rows = [b - a for a, b in zip(before.rows, after.rows, strict=True)]
    prompt = after.prompt_tokens - before.prompt_tokens
    return {
        "number": len(rows),
        "requests": requests,
        "rows": rows,
        "requests_most_to_mean": _most_to_mean(requests),
        "rows_most_to_mean": _most_to_mean(rows),
        "hit_rate": (after.cached_tokens - before.cached_tokens) / prompt if prompt else None,
        "moved": after.moved - before.moved,
    }


def _most_to_mean(values: Sequence[int]) -> float | None:
    """Return the maximum over the mean: 1 if all are equal, the number of engines if one did everything."""
    return max(values) * len(values) / sum(values) if sum(values) else None


def balance_rows(result: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return the rows of the balance table, whose header is `HEAD`."""
    rows = []
    for point in result["points"]:
        if (engines := point["engines"]) is not None:
            hit_rate = None if engines["hit_rate"] is None else 100 * engines["hit_rate"]
            shares = ", ".join(map(str, engines["requests"]))
            most = (engines["requests_most_to_mean"], engines["rows_most_to_mean"])
            rows.append((point["load"], engines["number"], hit_rate, *most, shares, engines["moved"]))
    return rows
