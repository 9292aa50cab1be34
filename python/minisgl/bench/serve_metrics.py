"""Figures from the load generator's arrays: latencies, throughput, goodput, cost of a token.

Definitions, per request, from the moment it was due (open loop) or its client was free (closed loop). TTFT: to the
first event with text. E2E: to the last one. TPOT: (last - first) / (tokens - 1). ITL: between a stream's events with
text; a server may put several tokens into one event, see `tokens_per_event`. In flight: sent and not finished. Queued:
sent and without text.
A failed request is counted with its reason and excluded from latency, throughput and goodput.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minisgl.bench.load import Measured
from minisgl.bench.stats import summary

if TYPE_CHECKING:
    from minisgl._rust import LoadResult

STEADY = (0.25, 0.75)  # fractions of a run between which it is steady
ERRORS_SHOWN = 5
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of a good answer in ms; None is no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.e2e_ms))


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies in ms of the successful requests; NaN if a request had no text, or only one event."""

    ttft: Floats
    tpot: Floats
    e2e: Floats
    itl: Floats


def latencies(result: LoadResult) -> Latencies:
    ok = result["failure"] == 0
    tokens = tokens_of(result)[ok]
    first, last, due = result["first"][ok], result["last"][ok], result["scheduled"][ok]
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(tokens > 1, (last - first) / (tokens - 1), np.nan)
    gaps = result["gaps"][np.repeat(ok, result["num_gaps"])]
    return Latencies(1e3 * (first - due), 1e3 * tpot, 1e3 * (last - due), 1e3 * gaps.astype(float))


def tokens_of(result: LoadResult) -> NDArray[np.int64]:
    """Return the output tokens of each request: the server's count, else the number of events with text."""
    counted = result["completion_tokens"]
    return np.where(counted >= 0, counted, result["text_events"])


def figures(measured: Measured, slo: Slo) -> dict[str, Any]:
    result = measured.result
    ok = result["failure"] == 0
    latency, took = latencies(result), result["duration_s"]
    out, given = int(tokens_of(result)[ok].sum()), int(np.maximum(result["prompt_tokens"][ok], 0).sum())
    events = int(result["text_events"][ok].sum())
    return {
        "requests": len(ok),
        "succeeded": int(ok.sum()),
        "failed": int((~ok).sum()),
        "failures": _failures(result),
        "errors": _errors(result),
        "without_text": int((result["text_events"][ok] == 0).sum()),
        "tokens_from": "usage" if bool((result["completion_tokens"][ok] >= 0).all()) else "events",
        "duration_s": took,
        "requests_s": int(ok.sum()) / took,
        "input_tokens": given,
        "cached_tokens": int(np.maximum(result["cached_tokens"][ok], 0).sum()),
        "output_tokens": out,
        "output_tok_s": out / took,
        "total_tok_s": (out + given) / took,
        "steady_output_tok_s": _steady(measured, out / events if events else 0.0),
        "tokens_per_event": out / events if events else None,
        "ttft_ms": summary(_known(latency.ttft)),
        "tpot_ms": summary(_known(latency.tpot)),
        "itl_ms": summary(_known(latency.itl)),
        "e2e_ms": summary(_known(latency.e2e)),
        "max_in_flight": _most_at_once(result["sent"], result["end"]),
        "max_queued": _most_at_once(result["sent"], np.fmin(result["first"], result["end"])),
        "longest_pause_ms": float(latency.itl.max()) if len(latency.itl) else None,
        "goodput": _goodput(latency, slo, len(ok), took) if slo else None,
        "server": _server(measured, out),
        "client": _client(result, out, events),
        "lengths": {
            "input": summary(result["prompt_tokens"][ok & (result["prompt_tokens"] >= 0)].tolist()),
            "output": summary(tokens_of(result)[ok].tolist()),
        },
    }


def _most_at_once(begins: Floats, ends: Floats) -> int:
    """Return the maximum number of requests that had begun and not ended at the same time. NaN begins are skipped."""
    sent = ~np.isnan(begins)
    times = np.concatenate((begins[sent], ends[sent]))
    changes = np.repeat((1, -1), int(sent.sum()))
    order = np.lexsort((changes, times))  # at equal times, ends come before beginnings
    return int(np.cumsum(changes[order]).max(initial=0))


def _known(values: Floats) -> list[float]:
    finite: list[float] = values[~np.isnan(values)].tolist()
    return finite


def _failures(result: LoadResult) -> dict[str, int]:
    """Return the number of failures by reason, such as `status 429`."""
    names = result["failures"]
    rows = zip(result["failure"].tolist(), result["status"].tolist(), strict=True)
    reasons = [f"status {status}" if names[code] == "status" else names[code] for code, status in rows if code]
    return dict(collections.Counter(reasons).most_common())


def _errors(result: LoadResult) -> dict[str, int]:
    return dict(collections.Counter(text for text in result["errors"] if text).most_common(ERRORS_SHOWN))


def _steady(measured: Measured, tokens_per_event: float) -> float | None:
    """Return tokens per second in the middle half of the run, by samples. None if the run is too short."""
    took = measured.result["duration_s"]
    middle = [s for s in measured.samples if STEADY[0] * took <= s.at <= STEADY[1] * took]
    if len(middle) < 5:
        return None
    first, last = middle[0], middle[-1]
    return tokens_per_event * (last.tokens - first.tokens) / (last.at - first.at)


def _goodput(latency: Latencies, slo: Slo, requests: int, took: float) -> dict[str, Any]:
    """Count the requests that succeeded within every limit. Without a TPOT (one event), any limit of it is met."""
    good = ~np.isnan(latency.ttft)
    for values, limit in ((latency.ttft, slo.ttft_ms), (latency.tpot, slo.tpot_ms), (latency.e2e, slo.e2e_ms)):
        if limit is not None:
            good &= np.isnan(values) | (values <= limit)
    count = int(good.sum())
    return {
        "slo_ms": {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms, "e2e": slo.e2e_ms},
        "good": count,
        "share": count / requests if requests else None,
        "requests_s": count / took,
    }


def _server(measured: Measured, tokens: int) -> dict[str, Any] | None:
    """Return the server's CPU and memory by process, with the sum as `all`. None if they were not measured."""
    if not measured.cpu_s:
        return None
    cpu = {**measured.cpu_s, "all": sum(measured.cpu_s.values())}
    rss = {**measured.rss_bytes, "all": sum(measured.rss_bytes.values())}
    return {
        "cpu_s": cpu,
        "cpu_us_per_token": {role: 1e6 * used / tokens for role, used in cpu.items()} if tokens else None,
        "cpu_s_per_1000_tokens": 1e3 * cpu["all"] / tokens if tokens else None,
        "cores": cpu["all"] / measured.result["duration_s"],
        "rss_mib": {role: size / 2**20 for role, size in rss.items()},
    }


def _client(result: LoadResult, tokens: int, events: int) -> dict[str, Any]:
    """Return the generator's own CPU use and lag: how late a request was passed to its connection."""
    lag = 1e3 * (result["sent"] - result["scheduled"])
    return {
        "cpu_s": result["cpu_s"],
        "cpu_us_per_token": 1e6 * result["cpu_s"] / tokens if tokens else None,
        "cpu_us_per_event": 1e6 * result["cpu_s"] / events if events else None,
        "lag_ms": summary(_known(lag)),
    }
