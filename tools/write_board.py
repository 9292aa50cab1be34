"""Write the Grafana dashboard, deploy/grafana/minisgl.json, from the table below: `python -m tools.write_board`.

Invariants: every query is limited to the servers chosen by the dashboard's variables. A test fails when the file
differs from the output; others check the queries against the metrics of real servers (tests/deploy).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "minisgl.json"
CHOSEN = 'job=~"$job", instance=~"$instance"'
SOURCE = {"type": "prometheus", "uid": "${source}"}
COLUMNS = 24


@dataclass(frozen=True)
class Panel:
    """Panel of the dashboard. `queries`: pairs of legend and PromQL. `most`: the maximum of the scale."""

    title: str
    says: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    most: float | None = None


def of(name: str, *matchers: str) -> str:
    return f"minisgl:{name}{{{', '.join((CHOSEN, *matchers))}}}"


def rate(name: str, *matchers: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({of(name, *matchers)}[$__rate_interval]))"


def total(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({of(name)})"


def longest(name: str, by: str) -> str:
    return f"max by ({by}) ({of(name)})"


def share(part: str, whole: str) -> str:
    return f"{part} / {whole}"


def quantiles(name: str, *shares: float) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"p{one * 100:g}", f"histogram_quantile({one:g}, {rate(f'{name}_bucket', by='le')})") for one in shares
    )


def mean(name: str) -> str:
    return share(rate(f"{name}_sum"), rate(f"{name}_count"))


LATENCIES = (0.5, 0.95, 0.99)
HITS = share(rate("cached_tokens_total"), rate("prompt_tokens_total"))
USED = f"max({of('kv_usage_ratio')})"
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "At a glance",
        (
            Panel("Engines up", "Servers whose engine serves.", "none", (("", total("engine_up")),), "stat", 3),
            Panel("Running", "Requests with a row.", "none", (("", total("requests_running")),), "stat", 3),
            Panel("Waiting", "Accepted, without a row.", "none", (("", total("requests_waiting")),), "stat", 3),
            Panel("Tokens out", "Per second.", "none", (("", rate("generated_tokens_total")),), "stat", 3),
            Panel("TTFT", "Time to first token, p95.", "s", (quantiles("ttft_seconds", 0.95)[0],), "stat", 3),
            Panel("ITL", "Between tokens, p95.", "s", (quantiles("itl_seconds", 0.95)[0],), "stat", 3),
            Panel("Prompts cached", "Share of prompt tokens.", "percentunit", (("", HITS),), "stat", 3, most=1),
            Panel("KV pool in use", "By requests.", "percentunit", (("", USED),), "stat", 3, most=1),
        ),
    ),
    (
        "What clients see",
        (
            Panel("Time to first token", "From arrival.", "s", quantiles("ttft_seconds", *LATENCIES)),
            Panel("Between tokens", "Of one answer.", "s", quantiles("itl_seconds", *LATENCIES)),
            Panel("Whole answers", "From arrival to the last token.", "s", quantiles("e2e_seconds", *LATENCIES)),
            Panel("In the queue", "From the engine's door to a row.", "s", quantiles("queue_seconds", *LATENCIES)),
            Panel(
                "Answers ended",
                "Per second, by why they ended; error is ours, abort the client's.",
                "reqps",
                (("{{reason}}", rate("requests_finished_total", by="reason")),),
                stacked=True,
            ),
            Panel(
                "Lengths",
                "Tokens of ended requests.",
                "none",
                (
                    ("prompt, mean", mean("prompt_length_tokens")),
                    ("prompt, p95", quantiles("prompt_length_tokens", 0.95)[0][1]),
                    ("answer, mean", mean("answer_length_tokens")),
                    ("answer, p95", quantiles("answer_length_tokens", 0.95)[0][1]),
                ),
            ),
        ),
    ),
    (
        "Load",
        (
            Panel(
                "Tokens",
                "Per second.",
                "none",
                (
                    ("prompt", rate("prompt_tokens_total")),
                    ("prompt, from the cache", rate("cached_tokens_total")),
                    ("answer", rate("generated_tokens_total")),
                ),
            ),
            Panel(
                "Requests",
                "Running, waiting, and the most that waited in the last 10 to 20 s.",
                "none",
                (
                    ("running", total("requests_running")),
                    ("waiting", total("requests_waiting")),
                    ("waiting, most", total("requests_queued_most")),
                ),
            ),
            Panel(
                "Who answers",
                "HTTP requests per second: by the gateway itself, or passed on to the Python server (--frontend rust).",
                "reqps",
                (("{{outcome}}", rate("gateway_requests_total", by="outcome")),),
                stacked=True,
            ),
        ),
    ),
    (
        "Engine",
        (
            Panel(
                "Where the step loop's time goes",
                "Share of the clock by phase, of all engines together; wait is the forward, idle is room.",
                "percentunit",
                (
                    (
                        "{{phase}}",
                        f"{rate('step_phase_seconds_total', by='phase')} / scalar({rate('step_phase_seconds_total')})",
                    ),
                ),
                stacked=True,
                most=1,
            ),
            Panel(
                "A step",
                "Rows and tokens of a step, on average.",
                "none",
                (
                    ("rows", share(rate("step_rows_total"), rate("steps_total"))),
                    ("tokens", share(rate("step_tokens_total"), rate("steps_total"))),
                ),
            ),
            Panel("Scheduling", "A step's phase schedule.", "s", quantiles("schedule_seconds", 0.5, 0.99)),
            Panel(
                "KV pages",
                "Of the pool: free, cached for nobody, cached and in use, owned by one request.",
                "none",
                tuple((one, total(f"kv_pages_{one}")) for one in ("held", "protected", "evictable", "free")),
                stacked=True,
            ),
            Panel(
                "Prefix cache",
                "Share of prompt tokens and of requests that it had.",
                "percentunit",
                (
                    ("tokens", HITS),
                    (
                        "requests",
                        share(rate("cache_hits_total"), f"({rate('cache_hits_total')} + {rate('cache_misses_total')})"),
                    ),
                ),
                most=1,
            ),
            Panel(
                "Short of pages",
                "Per second: requests put back, cached pages given up.",
                "none",
                (("retractions", rate("retractions_total")), ("evicted", rate("cache_evicted_pages_total"))),
            ),
        ),
    ),
    (
        "Engines of a pool (--dp)",
        (
            Panel("Ready", "1 while it serves.", "none", (("{{engine}}", total("engine_ready", "engine")),)),
            Panel(
                "Running in each",
                "Requests with a row.",
                "none",
                (("{{engine}}", total("engine_requests_running", "engine")),),
            ),
            Panel(
                "Tokens computed in each",
                "Per second.",
                "none",
                (("{{engine}}", rate("engine_step_tokens_total", by="engine")),),
            ),
            Panel(
                "Prompts cached in each",
                "Share of prompt tokens.",
                "percentunit",
                (
                    (
                        "{{engine}}",
                        share(
                            rate("engine_cached_tokens_total", by="engine"),
                            rate("engine_prompt_tokens_total", by="engine"),
                        ),
                    ),
                ),
                most=1,
            ),
            Panel(
                "KV pools in use",
                "By requests.",
                "percentunit",
                (("{{engine}}", share(total("engine_kv_pages_used", "engine"), total("engine_kv_pages", "engine"))),),
                most=1,
            ),
            Panel(
                "Lost and waiting",
                "In the range shown: engines lost, requests that went on in another. Requests that wait for an engine.",
                "none",
                (
                    ("lost: {{engine}}", f"sum by (engine) (increase({of('engine_losses_total')}[$__range]))"),
                    ("moved", f"sum(increase({of('pool_requests_moved_total')}[$__range]))"),
                    ("waiting", total("pool_requests_waiting")),
                ),
            ),
        ),
    ),
    (
        "Processes",
        (
            Panel("CPU", "Cores in use.", "none", (("{{process}}", rate("process_cpu_seconds_total", by="process")),)),
            Panel("Memory", "Resident.", "bytes", (("{{process}}", total("process_resident_bytes", "process")),)),
            Panel(
                "Longest pause",
                "Of the last 10 to 20 s: the event loop late for a timer, the step loop at work without waiting; "
                "garbage collections.",
                "s",
                (
                    ("{{process}}", longest("pause_longest_seconds", "process")),
                    ("{{process}}, collecting", longest("gc_longest_seconds", "process")),
                ),
            ),
            Panel(
                "Text",
                "Seconds per second of rendering and encoding prompts, and of tokens into text.",
                "s",
                (("encode", rate("tokenize_seconds_total")), ("decode", rate("detokenize_seconds_total"))),
            ),
            Panel(
                "Encode cache",
                "Texts between special tokens per second (--frontend rust).",
                "none",
                (("{{outcome}}", rate("encode_cache_texts_total", by="outcome")),),
                stacked=True,
            ),
            Panel(
                "Scheduler replaced",
                "Started with another than asked for; broke while serving and was replaced.",
                "none",
                (
                    ("at the start", f"sum({of('control_plane_fallbacks_total')})"),
                    ("while serving", total("control_plane_failovers_total")),
                ),
            ),
        ),
    ),
)


def shown(panel: Panel, number: int, x: int, y: int, height: int) -> dict[str, Any]:
    custom = {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 30} if panel.stacked else {"fillOpacity": 5}
    limits = {"min": 0, **({} if panel.most is None else {"max": panel.most})}
    options: dict[str, Any] = (
        {"reduceOptions": {"calcs": ["lastNotNull"], "values": False}, "graphMode": "area"}
        if panel.kind == "stat"
        else {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    )
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, **limits, **({} if panel.kind == "stat" else {"custom": custom})},
            "overrides": [],
        },
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for at, (legend, query) in enumerate(panel.queries)
        ],
    }


def panels() -> list[dict[str, Any]]:
    """Return all panels, laid out in rows from left to right."""
    made: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
                "panels": [],
            }
        )
        x, y = 0, y + 1
        height = 4 if row[0].kind == "stat" else 8
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y = 0, y + height
            made.append(shown(panel, len(made) + 1, x, y, height))
            x += panel.width
        y += height
    return made


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """Return a dashboard variable whose choices come from a query; all are selected at first."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def board() -> dict[str, Any]:
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}
    return {
        "uid": "minisgl",
        "title": "minisgl",
        "description": "What servers of minisgl do: docs/metrics.md has every metric.",
        "tags": ["minisgl"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                source,
                variable("job", "Job", "label_values(minisgl:engine_up, job)"),
                variable("instance", "Server", 'label_values(minisgl:engine_up{job=~"$job"}, instance)'),
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": panels(),
    }


def written() -> str:
    return json.dumps(board(), indent=1) + "\n"


if __name__ == "__main__":
    BOARD.write_text(written(), encoding="utf-8")
