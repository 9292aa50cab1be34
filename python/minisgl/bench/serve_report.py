"""The result of `minisgl bench serve`: one row per point, and a report.

With repeats, a figure of a point is the median of its repeats; the raw JSON has all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from minisgl.bench.balance import HEAD as BALANCE_HEAD
from minisgl.bench.balance import balance_rows
from minisgl.bench.load import Server
from minisgl.bench.report import Report, table
from minisgl.bench.serve_metrics import tokens_of
from minisgl.bench.serve_settings import Measurement, Serve
from minisgl.bench.stats import SUMMARY

COLUMNS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "load": lambda point: point["load"],
    "ok": lambda point: point["succeeded"],
    "failed": lambda point: point["failed"],
    "most in flight": lambda point: point["max_in_flight"],
    "most queued": lambda point: point["max_queued"],
    "output tok/s": lambda point: point["output_tok_s"],
    "TTFT p50 ms": lambda point: point["ttft_ms"]["p50"],
    "TTFT p99 ms": lambda point: point["ttft_ms"]["p99"],
    "TPOT p50 ms": lambda point: point["tpot_ms"]["p50"],
    "ITL p99 ms": lambda point: point["itl_ms"]["p99"],
    "longest pause ms": lambda point: point["longest_pause_ms"],
    "E2E p99 ms": lambda point: point["e2e_ms"]["p99"],
    "server CPU us/token": lambda point: _of_server(point, "cpu_us_per_token", "all"),
    "HTTP CPU us/token": lambda point: _of_server(point, "cpu_us_per_token", "http"),
    "RSS MiB": lambda point: _of_server(point, "rss_mib", "all"),
    "client CPU us/token": lambda point: point["client"]["cpu_us_per_token"],
}
LATENCIES_HEAD = ("load", "latency", *SUMMARY)
LATENCIES = (("TTFT ms", "ttft_ms"), ("TPOT ms", "tpot_ms"), ("ITL ms", "itl_ms"), ("E2E ms", "e2e_ms"))
LENGTHS_HEAD = (
    "load",
    *(f"{side} {key}" for side in ("in", "out") for key in SUMMARY),
    "in, all",
    "of these cached",
)
PROCESSES_HEAD = ("load", "process", "CPU s", "CPU us/token", "RSS MiB")
GOODPUT_HEAD = ("load", "limits, ms", "good", "% of all", "good/s")
SAMPLES: tuple[tuple[str, Literal["sent", "first", "last"]], ...] = (
    ("sent_ms", "sent"),
    ("first_ms", "first"),
    ("last_ms", "last"),
)
OF_ITSELF = "Since its start, with warm-ups: requests at once, and microseconds of a step."
LEFT_OUT_HEAD = ("load", "what", "number")
FAILURES_HEAD = ("load", "reason", "requests")


def result_of(
    settings: Serve, server: Server, runs: Sequence[Measurement], extras: Mapping[str, Any]
) -> dict[str, Any]:
    points = []
    for label in dict.fromkeys(one.point.label for one in runs):
        repeats = [one for one in runs if one.point.label == label]
        point = repeats[0].point
        merged = median_of([one.figures for one in repeats])
        points.append(
            {"load": label, "mode": point.mode, "value": point.value or None, "repeats": len(repeats), **merged}
        )
    return {
        "bench": "serve",
        "server": "own" if server.own is not None else "given",
        "model": server.model.rsplit("/", 1)[-1],
        "workload": Path(settings.workload).name,
        "seed": settings.workload_settings.seed,
        "endpoint": settings.endpoint,
        "points": points,
        **extras,
    }


def median_of(repeats: Sequence[Any]) -> Any:
    """Merge repeats field by field: medians of numbers, sums of failure counts, the largest of maxima; the rest is the
    first repeat's."""
    first = repeats[0]
    if len(repeats) == 1:
        return first
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for one in repeats if isinstance(one, Mapping) for key in one)
        return {key: _merged(key, [one.get(key) for one in repeats if isinstance(one, Mapping)]) for key in keys}
    if all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in repeats):
        return statistics.median(repeats)
    return first


def _merged(key: str, values: Sequence[Any]) -> Any:
    if key in ("failed", "without_text"):
        return sum(values)
    if key in ("max_in_flight", "max_queued"):
        return max(values)
    if key in ("failures", "errors", "left_out"):
        reasons = dict.fromkeys(reason for one in values for reason in one)
        return {reason: sum(one.get(reason, 0) for one in values) for reason in reasons}
    return median_of(values)


def summary_table(result: Mapping[str, Any]) -> str:
    return table(list(COLUMNS), [[of(point) for of in COLUMNS.values()] for point in result["points"]])


def latency_table(result: Mapping[str, Any]) -> str:
    """Return the table of all latencies of all points, with their percentiles."""
    rows = [
        (point["load"], name, *(point[key][which] for which in SUMMARY))
        for point in result["points"]
        for name, key in LATENCIES
    ]
    return table(LATENCIES_HEAD, rows)


def _of_server(point: Mapping[str, Any], what: str, role: str) -> float | None:
    return ((point["server"] or {}).get(what) or {}).get(role)


def write_report(report: Report, result: Mapping[str, Any], measurements: Sequence[Measurement]) -> None:
    profile = result.get("simulated")
    note = f"Simulated engine, profile {profile}: no model runs, step times are made up." if profile else ""
    report.section("Load by load", note, summary_table(result))
    report.section("Lengths", "Tokens as the server counted them.", table(LENGTHS_HEAD, _lengths(result)))
    if any(point["server"] for point in result["points"]):
        report.section("The server's processes", table(PROCESSES_HEAD, _processes(result)))
    if result.get("of_itself"):
        report.section("What the server says of itself", OF_ITSELF, _of_itself(result["of_itself"]))
    if any(point["goodput"] for point in result["points"]):
        report.section("Goodput", table(GOODPUT_HEAD, _goodput(result)))
    if any(point["left_out"] for point in result["points"]):
        report.section("Not sent, or not whole", table(LEFT_OUT_HEAD, _left_out(result)))
    if any(point["failed"] for point in result["points"]):
        report.section("Failures", table(FAILURES_HEAD, _failures(result)))
    if spread := balance_rows(result):
        report.section("Engines and cache", table(BALANCE_HEAD, spread))
    report.section("Latencies", latency_table(result))
    runs = [{"load": one.point.label, **one.figures, "samples": _samples(one)} for one in measurements]
    report.write({"result": result, "runs": runs})


def _samples(one: Measurement) -> dict[str, Any]:
    """Return each request's times, in sending order: ms since it was due; NaN for what did not happen."""
    result = one.measured.result
    times = {name: 1e3 * (result[key] - result["scheduled"]) for name, key in SAMPLES}
    return {
        "due_s": np.round(result["scheduled"], 4),
        **{name: np.round(values, 2) for name, values in times.items()},
        "output_tokens": tokens_of(result),
        "failure": [result["failures"][code] or None for code in result["failure"]],
    }


def _lengths(result: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    rows = []
    for point in result["points"]:
        of_point = point["lengths"]
        ends = [of_point[side][key] for side in ("input", "output") for key in SUMMARY]
        rows.append((point["load"], *ends, point["input_tokens"], point["cached_tokens"]))
    return rows


def _processes(result: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (point["load"], role, used, (server["cpu_us_per_token"] or {}).get(role), server["rss_mib"].get(role))
        for point in result["points"]
        if (server := point["server"])
        for role, used in server["cpu_s"].items()
    ]


def _goodput(result: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    rows = []
    for point in result["points"]:
        limits = ", ".join(f"{name} {ms:g}" for name, ms in point["goodput"]["slo_ms"].items() if ms is not None)
        share = 100 * point["goodput"]["share"]
        rows.append((point["load"], limits, point["goodput"]["good"], share, point["goodput"]["requests_s"]))
    return rows


def _of_itself(said: Mapping[str, Any]) -> str:
    most = [(name.replace("_", " "), said[f"{name}_most"]) for name in ("requests_in_flight", "requests_queued")]
    parts = [(name, *(said[f"{name}_us"].get(which) for which in SUMMARY)) for name in ("schedule", "metadata")]
    return f"{table(('most', 'number'), most)}\n\n{table(('part of a step, us', *SUMMARY), parts)}"


def _left_out(result: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [(point["load"], what, count) for point in result["points"] for what, count in point["left_out"].items()]


def _failures(result: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    rows = []
    for point in result["points"]:
        rows += [(point["load"], reason, count) for reason, count in point["failures"].items()]
        rows += [(point["load"], f"says: {text}", count) for text, count in point["errors"].items()]
    return rows
