"""Tables and plots of what `benchmark.ray` measured, from its raw data alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.ray.overhead import BARE, GATEWAY, SERVE, SIDES, per_request_and_token
from benchmark.ray.processes import PARTS
from benchmark.ray.ratios import Rounds, difference, median, ratio, shown
from benchmark.ray.routing import POLICIES
from minisgl.bench.plots import Series, grouped_bars, line_plot
from minisgl.bench.report import Report, number, table

FIGURES = {
    "requests/s": "requests_s",
    "tok/s": "output_tok_s",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "ITL p50 ms": "itl_p50_ms",
    "ITL p99 ms": "itl_p99_ms",
    "TPOT p50 ms": "tpot_p50_ms",
    "CPU ms per request": "cpu_ms_per_request",
    "CPU s per 1,000 tokens": "cpu_s_per_1000_tokens",
    "tokens per event": "tokens_per_event",
    "events per write": "events_per_write",
    "tokens per write": "tokens_per_write",
}
OF_ONE_TOKEN = ("requests/s", "TTFT p50 ms", "TTFT p99 ms", "CPU ms per request")
OF_TOKENS = tuple(name for name in FIGURES if name not in ("requests/s", "CPU ms per request"))
Samples = Sequence[Mapping[str, Any]]


def by_round(samples: Samples, figure: str, names: Sequence[str], key: str, **where: object) -> Rounds:
    """`names`: values of `key`, each with the figure of every round in order."""
    chosen = [one for one in samples if all(one[name] == value for name, value in where.items())]
    ordered = sorted(chosen, key=lambda one: int(one["round"]))
    return {name: [one.get(figure) for one in ordered if one[key] == name] for name in names}


def overhead_report(report: Report, raw: Mapping[str, Any]) -> None:
    samples, rounds = raw["samples"], 1 + max(one["round"] for one in raw["samples"])
    loads = [one["load"] for one in samples]
    said = f"{rounds} rounds; load average {min(loads):.2f} to {max(loads):.2f} (the measurement's own included). "
    said += "Medians, and geometric means of the ratios of each round with a 95 % interval."
    tokens = max(one["tokens"] for one in samples)
    report.section("Requests of one token", said, _compared(samples, 1, OF_ONE_TOKEN))
    report.section(f"Answers of {tokens} tokens", _compared(samples, tokens, OF_TOKENS))
    report.section("CPU by process", _cpu_table(samples, tokens), _idle_table(raw["idle"]))
    streams = sorted({one["streams"] for one in samples})
    names = ("tok/s", "TTFT p50 ms", "CPU s per 1,000 tokens")
    of_plot = {
        name: [
            ratio(by_round(samples, FIGURES[name], SIDES, "side", streams=n, tokens=tokens), SERVE, BARE)
            for n in streams
        ]
        for name in names
    }
    groups = [f"{n} streams" for n in streams]
    plot = grouped_bars(
        report.folder / "overhead.svg", groups, of_plot, title="Ray Serve over the bare server", y_label="ratio"
    )
    report.section("Beside the bare server", plot)


def _compared(samples: Samples, tokens: int, names: Sequence[str]) -> str:
    rows = []
    for streams in sorted({one["streams"] for one in samples}):
        for name in names:
            found = by_round(samples, FIGURES[name], SIDES, "side", streams=streams, tokens=tokens)
            medians = [median(found[side]) for side in SIDES]
            rows.append(
                (streams, name, *medians, shown(ratio(found, SERVE, BARE)), shown(ratio(found, SERVE, GATEWAY)))
            )
    return table(("streams", "figure", *SIDES, "Serve / bare", "Serve / gateway"), rows)


def costs(samples: Samples, tokens: int, streams: int, side: str) -> dict[str, tuple[float | None, float | None]]:
    """By part: medians over the rounds of the CPU us of a request of one token and of each token more."""
    pairs: dict[int, dict[int, Mapping[str, Any]]] = {}
    for one in samples:
        if one["side"] == side and one["streams"] == streams:
            pairs.setdefault(one["round"], {})[one["tokens"]] = one
    found = [per_request_and_token(pair[1], pair[tokens], tokens) for pair in pairs.values()]
    return {
        part: (median([one[part]["request_us"] for one in found]), median([one[part]["token_us"] for one in found]))
        for part in PARTS
        if all(part in one for one in found)
    }


def _cpu_table(samples: Samples, tokens: int) -> str:
    rows = [
        (streams, side, part, request_us, token_us)
        for streams in sorted({one["streams"] for one in samples})
        for side in SIDES
        for part, (request_us, token_us) in costs(samples, tokens, streams, side).items()
    ]
    return table(("streams", "side", "process", "us per request", "us per further token"), rows)


def _idle_table(idle: Mapping[str, Mapping[str, float]]) -> str:
    rows = [(side, sum(parts.values()), _parts(parts)) for side, parts in idle.items()]
    return table(("nothing is asked", "cores", "of which"), rows)


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {number(used)}" for part, used in parts.items() if used)


def routing_report(report: Report, raw: Mapping[str, Any]) -> None:
    samples = raw["samples"]
    loads = [one["load"] for one in samples]
    said = f"Load average {min(loads):.2f} to {max(loads):.2f}; medians over rounds, 95 % intervals over them."
    report.section("Prefix beside default", said, _routing_table(samples))
    rows = [(size, *(memory.get(part, 0) / 2**20 for part in PARTS)) for size, memory in raw["memory"].items()]
    left_out = [f"{size} replicas were left out: {reason}." for size, reason in raw["left_out"].items()]
    head = ("replicas of each", *(f"{part} MiB" for part in PARTS))
    report.section("Memory of both deployments", table(head, rows), *left_out)
    plots = [_routing_plot(report.folder, samples, name) for name in dict.fromkeys(one["workload"] for one in samples)]
    report.section("Hit rates", *plots)


def _routing_table(samples: Samples) -> str:
    rows = []
    for workload in dict.fromkeys(one["workload"] for one in samples):
        for size in sorted({one["replicas"] for one in samples}):
            where = {"workload": workload, "replicas": size}
            hits = by_round(samples, "hit_rate", POLICIES, "routing", **where)
            times = {
                which: by_round(samples, f"ttft_{which}_ms", POLICIES, "routing", **where) for which in ("p50", "p99")
            }
            rows.append(
                (
                    *(workload, size, len(hits["prefix"])),
                    *(100 * (median(hits[policy]) or 0.0) for policy in POLICIES),
                    shown(difference(hits, *POLICIES), 100),
                    *(median(times["p50"][policy]) for policy in POLICIES),
                    shown(ratio(times["p50"], *POLICIES)),
                    *(median(times["p99"][policy]) for policy in POLICIES),
                    shown(ratio(times["p99"], *POLICIES)),
                )
            )
    head = ("load", "replicas", "rounds", "hit % prefix", "default", "difference", "TTFT p50 ms prefix", "default")
    return table((*head, "prefix / default", "TTFT p99 ms prefix", "default", "prefix / default"), rows)


def _routing_plot(folder: Path, samples: Samples, workload: str) -> str:
    sizes = sorted({one["replicas"] for one in samples})
    lines = []
    for policy in POLICIES:
        found = [by_round(samples, "hit_rate", (policy,), "routing", workload=workload, replicas=n) for n in sizes]
        lines.append(Series(policy, [float(n) for n in sizes], [100 * (median(one[policy]) or 0.0) for one in found]))
    title = f"{workload}: prompt tokens found in a cache"
    return line_plot(folder / f"hits-{workload}.svg", lines, title=title, x_label="replicas", y_label="%")
