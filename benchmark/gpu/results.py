"""Format the GPU benchmark's records as lines and tables.

Every figure shown is in raw.json; medians are over the runs of a variant, with their number.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from minisgl.bench.report import Report, table, write_json

GOAL_IDLE = 0.03
Record = dict[str, Any]


def line(record: Record) -> str:
    head = f"{record['model']:12} {record['kind']:7}"
    if record["kind"] == "error":
        return f"{head} exit code {record['code']}: {record['error']}"
    if record["kind"] == "run":
        full = record["full_batch"]
        return (
            f"{head} {_variant(record):26} {record['output_tok_s']:9.0f} tok/s, {record['wall_s']:.1f} s, full batch: "
            f"step {_ms(full.get('step_ms_median'))}, "
            f"idle {_share(full.get('idle_share'))} (goal under {GOAL_IDLE:.0%}), "
            f"launch {_ms(full.get('launch_ms_median'))}, roofline {_share(record['roofline_ratio'])}"
        )
    if record["kind"] == "points":
        return f"{head} {len(record['points'])} steps"
    return f"{head} " + ", ".join(f"{k} {v}" for k, v in record.items() if k not in ("model", "kind"))


def write(report: Report, records: Sequence[Record]) -> None:
    """Write all files from the records so far."""
    report.clear()
    models = list(dict.fromkeys(record["model"] for record in records))
    for model in models:
        mine = [record for record in records if record["model"] == model]
        report.section(model, *_of_model(mine))
    report.section("Figures", _NOTES)
    report.write({"records": [record for record in records if record["kind"] != "points"]})
    steps = {record["model"]: record["points"] for record in records if record["kind"] == "points"}
    if steps:
        columns = ["rows", "tokens", "samples", "kv_tokens", "pairs", "ms"]
        write_json(report.folder / "points.json", {"columns": columns, "steps": steps})


def _of_model(records: Sequence[Record]) -> list[str]:
    runs = [record for record in records if record["kind"] == "run"]
    texts = []
    for record in records:
        if record["kind"] == "engine":
            texts.append(
                f"{record['device']}, torch {record['torch']}, attention {record['attention']}, "
                f"{len(record['graphs'])} graphs, {record['num_pages']} pages; ready after {record['ready_s']:.0f} s."
            )
        if record["kind"] == "error":
            texts.append(f"Failed with exit code {record['code']}:\n\n```\n{record['error'][-1500:]}\n```")
    if runs:
        texts += [_runs(runs), _kinds(runs)]
    for record in records:
        if record["kind"] == "trace" and record.get("kernels"):
            texts.append(
                f"By kernels, {record['kernels']} in twenty decode steps of all rows: none ran "
                f"{_share(record['idle_share'])} of the time."
            )
            rows = [[f"`{name}`", us] for name, us in record["longest_us_per_step"].items()]
            texts.append(table(("kernel", "us a step"), rows))
    return texts


def _runs(runs: Sequence[Record]) -> str:
    head = ("scheduler", "overlap", "runs", "output tok/s", "full batch: step ms", "idle ms", "idle %")
    head += ("launch ms", "roofline %", "host ms a step", "of it waiting")
    rows = []
    for variant in dict.fromkeys((run["control_plane"], run["overlap"]) for run in runs):
        mine = [run for run in runs if (run["control_plane"], run["overlap"]) == variant]
        full = [run["full_batch"] for run in mine]

        def median(values: Sequence[float | None]) -> float | None:
            known = [value for value in values if value is not None]
            return statistics.median(known) if known else None

        rows.append(
            (
                variant[0],
                "on" if variant[1] else "off",
                len(mine),
                median([run["output_tok_s"] for run in mine]),
                median([one.get("step_ms_median") for one in full]),
                median([one.get("idle_ms_mean") for one in full]),
                _percent(median([one.get("idle_share") for one in full])),
                median([one.get("launch_ms_median") for one in full]),
                _percent(median([run["roofline_ratio"] for run in mine])),
                median([1e3 * run["wall_s"] / run["steps"] for run in mine]),
                median([1e3 * run["host_s"]["wait"] / run["steps"] for run in mine]),
            )
        )
    return table(head, rows)


def _kinds(runs: Sequence[Record]) -> str:
    """Return the table of step kinds for the last run, which is the most warmed up."""
    head = (
        "steps of the last run",
        "number",
        "tokens",
        "device s",
        "median ms",
        "p90 ms",
        "p95 ms",
        "p99 ms",
        "launch ms",
    )
    percentiles = ("step_ms_median", "step_ms_p90", "step_ms_p95", "step_ms_p99")
    names = ("steps", "tokens", "device_s", *percentiles, "launch_ms_median")
    return table(head, [(kind, *(of[name] for name in names)) for kind, of in runs[-1]["kinds"].items()])


def _variant(record: Record) -> str:
    return f"{record['control_plane']}, overlap {'on' if record['overlap'] else 'off'}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


_NOTES = f"""- *full batch*: pairs of decode steps that follow each other, with at least nine tenths of the most rows
- *step*: device time from the step's block to its tokens, median. With overlap off it contains what the host does
  meanwhile
- *idle*: from the end of a step's forward to the start of the next one, mean; the host's time that the device sees.
  Goal: under {GOAL_IDLE:.0%}. Gaps between kernels of one step are in `trace`, not here
- *launch*: the host's time in the engine's launch, median; with overlap it runs beside the device
- *roofline*: weights and KV of a decode step, read once at the pace of a copy on this device (`copy_bytes_per_s`), over
  its time with idle time; all decode pairs
- *host ms a step*: wall time over steps; *of it waiting*: for the device"""
