"""Plots and a table of what `benchmark.routing.study` found.

python -m benchmark.routing.plots benchmark/runs/DATE-routing --out docs/img
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from minisgl.bench.plots import Series, line_plot
from minisgl.bench.report import table

FIGURES = (("hit rate", "hit_rate"), ("p99 TTFT s", "p99"), ("most over mean", "balance"))


def by_policy(cases: list[dict[str, Any]], figure: str) -> list[Series]:
    """A line for each policy that ran, over the numbers of engines."""
    found = []
    for policy in dict.fromkeys(one["routing"] for one in cases):
        points = sorted((one["engines"], value_of(one, figure)) for one in cases if one["routing"] == policy)
        found.append(Series(policy, [x for x, _ in points], [y for _, y in points]))
    return found


def value_of(case: dict[str, Any], figure: str) -> float:
    return float(case["ttft_s"]["p99"] if figure == "p99" else case[figure])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder with engines.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for the plots")
    args = parser.parse_args()
    cases = json.loads((args.run / "engines.json").read_text(encoding="utf-8"))["cases"]
    for trace in dict.fromkeys(one["trace"] for one in cases):
        of_trace = [one for one in cases if one["trace"] == trace]
        for title, figure in FIGURES:
            compared = [one for one in of_trace if figure == "hit_rate" or one["routing"] != "one cache"]
            file = args.out / f"routing-{trace}-{title.split()[0].lower()}.png"
            label = f"{trace}: {title}"
            line_plot(file, by_policy(compared, figure), title=label, x_label="engines", y_label=title, log_x=True)
    head = ("trace", "engines", "routing", "hit rate", "p99 TTFT s", "balance", "busy")
    rows = [
        (
            one["trace"],
            one["engines"],
            one["routing"],
            one["hit_rate"],
            value_of(one, "p99"),
            one["balance"],
            one["device_busy"],
        )
        for one in cases
    ]
    print(table(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
