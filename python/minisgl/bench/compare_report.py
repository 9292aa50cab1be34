"""The result of `minisgl bench compare`: figures over the rounds with their intervals, the agreement of texts, tables.

A figure is the geometric mean of its rounds with the interval of their logarithms (Student's t, 95 %): infinite, and
not shown, for one round. Agreement is with the first variant, in characters, since other variants' tokens are unknown.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.bench.compare_variants import Answer, Setup, Times, Variant
from minisgl.bench.process_usage import Usage
from minisgl.bench.report import Report, number, table
from minisgl.bench.stats import geometric_interval, paired_difference

TITLE = "minisgl beside others"
MIB = 2**20
BY_COUNT = ("tok_s", "ttft_ms", "itl_ms", "itl_p99_ms", "cpu_s_per_1000")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """Settings of a comparison. Lengths are in tokens, roughly: a word of a prompt is a token or slightly more."""

    variants: tuple[str, ...]
    setup: Setup
    concurrency: tuple[int, ...]
    input_len: int
    output_len: int
    prefill_len: int
    repeats: int
    agreement_prompts: int
    seed: int


@dataclass(slots=True)
class Running:
    """A variant that serves until `own` is closed, with its measurements: one value per round, by figure and prompts at
    once."""

    variant: Variant
    own: contextlib.ExitStack
    start_s: float
    rounds: dict[str, dict[int, list[float]]] = field(default_factory=lambda: {name: {} for name in BY_COUNT})
    prefill_tok_s: list[float] = field(default_factory=list)
    rss_bytes: int | None = None
    answers: list[Answer] = field(default_factory=list)

    def take(self, count: int, times: Times, used: Usage) -> None:
        figures = {"tok_s": times.num_out / times.total_s}
        if times.first_s is not None:
            figures["ttft_ms"] = 1e3 * statistics.median(times.first_s)
        if times.gaps_s:
            figures["itl_ms"], figures["itl_p99_ms"] = 1e3 * np.percentile(times.gaps_s, (50, 99))
        if used.cpu_s is not None:
            figures["cpu_s_per_1000"] = 1e3 * used.cpu_s / times.num_out
        for name, value in figures.items():
            self.rounds[name].setdefault(count, []).append(float(value))
        if used.rss_bytes is not None:
            self.rss_bytes = max(used.rss_bytes, self.rss_bytes or 0)

    def keep(self, repeats: int) -> None:
        """Drop the measurements after the first `repeats` rounds."""
        self.rounds = {
            name: {count: values[:repeats] for count, values in of_one.items()} for name, of_one in self.rounds.items()
        }
        del self.prefill_tok_s[repeats:]

    def take_prefill(self, times: Times) -> None:
        """Record the prefill rate of a request for one token, timed to its first text, or to its end."""
        self.prefill_tok_s.append(times.num_in / (times.first_s[0] if times.first_s else times.total_s))


def result_of(settings: Compare, running: Mapping[str, Running], missing: Mapping[str, str]) -> dict[str, Any]:
    return {
        "bench": "compare",
        "model": Path(settings.setup.model).name,
        "threads": settings.setup.threads,
        "concurrency": list(settings.concurrency),
        "input_len": settings.input_len,
        "output_len": settings.output_len,
        "prefill_len": settings.prefill_len,
        "repeats": settings.repeats,
        "load_at_end": round(os.getloadavg()[0], 2),
        "variants": {name: _figures(one) for name, one in running.items()},
        "against": _against(running),
        "agreement": agreement({name: one.answers for name, one in running.items()}),
        "missing": dict(missing),
    }


def _figures(one: Running) -> dict[str, Any]:
    by_count = {
        name: {count: _interval(values) for count, values in of_count.items()} for name, of_count in one.rounds.items()
    }
    return {
        "version": one.variant.version,
        "start_s": one.start_s,
        "rss_mib": None if one.rss_bytes is None else one.rss_bytes / MIB,
        **by_count,
        "prefill_tok_s": _interval(one.prefill_tok_s),
        "rounds": {**one.rounds, "prefill_tok_s": one.prefill_tok_s},
    }


def _interval(values: Sequence[float]) -> list[float]:
    """Return the estimate and the lower and upper bound."""
    if min(values) <= 0:  # below the resolution of CPU time
        return [statistics.fmean(values), -math.inf, math.inf]
    interval = geometric_interval(values)
    return [interval.estimate, interval.low, interval.high]


def _against(running: Mapping[str, Running]) -> dict[str, Any] | None:
    """Return the first variant's tok/s over each other's, paired by round so that drift cancels; None for one."""
    if len(running) < 2:
        return None
    first, *others = running
    ratios: dict[str, dict[int, list[float]]] = {}
    for name in others:
        ratios[name] = {}
        for count, theirs in running[name].rounds["tok_s"].items():
            ratio = paired_difference(theirs, running[first].rounds["tok_s"][count]).ratio
            if ratio is not None:
                ratios[name][count] = [1 + ratio.estimate, 1 + ratio.low, 1 + ratio.high]
    return {"first": first, "ratio": ratios}


def agreement(answers: Mapping[str, Sequence[Answer]]) -> dict[str, Any] | None:
    """Compare each variant's answers with the first one's: the number of equal texts, the fraction of characters before
    the first difference, and whether both counted the same prompt tokens. None if there are no answers."""
    if not any(answers.values()):
        return None
    first, *others = answers
    ours = answers[first]
    return {
        "first": first,
        "prompts": len(ours),
        "variants": {
            name: {
                "same": sum(a.text == b.text for a, b in zip(ours, answers[name], strict=True)),
                "until_difference": [_shared(a.text, b.text) for a, b in zip(ours, answers[name], strict=True)],
                "same_num_in": all(a.num_in == b.num_in for a, b in zip(ours, answers[name], strict=True)),
            }
            for name in others
        },
        "texts": {name: [one.text for one in of_one] for name, of_one in answers.items()},
    }


def _shared(a: str, b: str) -> float:
    longest, shortest = max(len(a), len(b)), min(len(a), len(b))
    same = next((i for i in range(shortest) if a[i] != b[i]), shortest)
    return same / longest if longest else 1.0


# ------------------------------------------------------------------------------------------------------------- showing


def shown(result: Mapping[str, Any]) -> list[str]:
    """Return the Markdown tables of a result that have rows."""
    tables = (speeds(result), latencies(result), costs(result), agreements(result), _missing(result))
    return [text for text in tables if text]


def write(report: Report, result: Mapping[str, Any]) -> None:
    report.section("Tokens per second", _about(result), speeds(result))
    report.section("Latency", latencies(result))
    report.section("What it takes", costs(result))
    if text := agreements(result):
        report.section("Do the answers agree?", _about_agreement(result), text)
    if text := _missing(result):
        report.section("Not measured", text)
    report.write({"result": result})


def cell(interval: Sequence[float | None] | None) -> str | None:
    """Return a figure with its interval as text. Infinite bounds are null, and not shown."""
    if interval is None:
        return None
    estimate, low, high = interval
    assert estimate is not None
    if low is None or high is None:
        return number(estimate)
    return f"{number(estimate)} [{number(low)}, {number(high)}]"


def speeds(result: Mapping[str, Any]) -> str:
    counts = [str(count) for count in result["concurrency"]]
    head = ("tok/s", *(f"{n} at once" for n in counts), "prefill")
    rows = [
        (name, *(cell(one["tok_s"].get(n)) for n in counts), cell(one["prefill_tok_s"]))
        for name, one in result["variants"].items()
    ]
    return "\n\n".join(text for text in (table(head, rows) if rows else "", _ratios(result, counts)) if text)


def _ratios(result: Mapping[str, Any], counts: Sequence[str]) -> str:
    if result["against"] is None:
        return ""
    first, ratios = result["against"]["first"], result["against"]["ratio"]
    head = (f"{first} is so many times as fast as", *(f"{n} at once" for n in counts))
    return table(head, [(name, *(cell(of_one.get(n)) for n in counts)) for name, of_one in ratios.items()])


def latencies(result: Mapping[str, Any]) -> str:
    rows = [
        (name, count, *(cell(one[key].get(str(count))) for key in ("ttft_ms", "itl_ms", "itl_p99_ms")))
        for count in result["concurrency"]
        for name, one in result["variants"].items()
        if str(count) in one["ttft_ms"]
    ]
    return table(("variant", "at once", "TTFT ms", "ITL p50 ms", "ITL p99 ms"), rows) if rows else ""


def costs(result: Mapping[str, Any]) -> str:
    counts = [str(count) for count in result["concurrency"]]
    head = ("variant", *(f"CPU s per 1,000 tokens, {n}" for n in counts), "memory MiB", "start s", "version")
    rows = [
        (name, *(cell(one["cpu_s_per_1000"].get(n)) for n in counts), one["rss_mib"], one["start_s"], one["version"])
        for name, one in result["variants"].items()
    ]
    return table(head, rows) if rows else ""


def agreements(result: Mapping[str, Any]) -> str:
    texts = result["agreement"]
    if texts is None or not texts["variants"]:
        return ""
    head = (f"against {texts['first']}", "same text", "alike until, %", "least, %", "prompt's tokens")
    rows = [
        (
            name,
            f"{one['same']} of {texts['prompts']}",
            100 * statistics.fmean(one["until_difference"]),
            100 * min(one["until_difference"]),
            "as many" if one["same_num_in"] else "**others**",
        )
        for name, one in texts["variants"].items()
    ]
    return table(head, rows)


def _missing(result: Mapping[str, Any]) -> str:
    return table(("not measured", "why"), result["missing"].items()) if result["missing"] else ""


def _about(result: Mapping[str, Any]) -> str:
    return (
        "{repeats} rounds, all variants alive, one asked at a time, there and back; geometric means with "
        "their 95 % interval over the rounds. Tokens out of N answers of {output_len} tokens to prompts of about "
        "{input_len}, over the time from the first request to the last token, prefill and all; prefill: one prompt of "
        "about {prefill_len} tokens over the time to its first token. Ratios are paired by round. Empty: it cannot "
        "tell (`generate` has no text before its end, its streamer one sequence). Load average at the end: "
        "{load_at_end}."
    ).format_map(result)


def _about_agreement(result: Mapping[str, Any]) -> str:
    return (
        f"{result['agreement']['prompts']} prompts like those measured, one at a time, greedy, up to "
        f"{result['output_len']} tokens: the share of the characters before the first difference. Other arithmetic "
        "(a file's blocks multiplied as integers, another order of sums) turns a near tie of two tokens, and all that "
        "follows is another text."
    )
