"""Plots of benchmark results: lines (throughput against latency, growth), CDFs of latencies, stacked bars (step times),
groups of bars with intervals (variants beside each other).

Every function writes one picture (PNG or SVG, as its name says) and returns the Markdown that shows it, for a section
of a `Report` in the same folder. Without matplotlib (the extra `bench`) nothing is written and the Markdown
says so: a missing plot never costs a measurement.

No display is needed, and no global state of matplotlib is touched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl.bench.report import number
from minisgl.bench.stats import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_CDF_POINTS = 500  # more are not visible, and make no difference but to the time
SIZE_INCHES = (7.0, 4.2)
DPI = 110
MARKERS = "osD^vP*X"
# a glyph drawn as a path takes as much as a line of a plot, and names that change with each run make every file differ
TEXT_AS_TEXT: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "minisgl"}


@dataclass(frozen=True, slots=True)
class Series:
    """A named line: `y[i]` at `x[i]`."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_plot(
    path: Path,
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Lines through the points in the order given: a throughput-latency curve may bend back."""

    def draw(axes: Axes) -> None:
        for i, one in enumerate(series):
            axes.plot(one.x, one.y, marker=MARKERS[i % len(MARKERS)], markersize=4, label=one.name)
        _label(axes, x_label, y_label)
        _scale(axes, log_x=log_x, log_y=log_y)

    return _written(path, title, draw)


def cdf_plot(
    path: Path, samples: Mapping[str, Sequence[float]], *, title: str, x_label: str, log_x: bool = False
) -> str:
    """The share of each variant's samples at or below x. Variants without a sample are left out."""

    def draw(axes: Axes) -> None:
        for name, values in samples.items():
            if len(values):
                shares = np.linspace(0, 100, min(len(values), MAX_CDF_POINTS) + 1)
                axes.step(np.percentile(np.asarray(values, float), shares), shares, where="post", label=name)
        axes.set_ylim(0, 100)
        _label(axes, x_label, "% of samples")
        _scale(axes, log_x=log_x, log_y=False)

    return _written(path, title, draw)


def bar_breakdown(path: Path, bars: Mapping[str, Mapping[str, float]], *, title: str, y_label: str) -> str:
    """One stacked bar per key of `bars`, from part to height. Parts keep one colour over all bars."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))

    def draw(axes: Axes) -> None:
        bottom = np.zeros(len(bars))
        for part in parts:
            heights = np.array([bar.get(part, 0.0) for bar in bars.values()])
            axes.bar(range(len(bars)), heights, width=0.6, bottom=bottom, label=part)
            bottom += heights
        axes.set_xticks(range(len(bars)), list(bars))
        _label(axes, "", y_label)

    return _written(path, title, draw)


def grouped_bars(
    path: Path, groups: Sequence[str], series: Mapping[str, Sequence[Interval | None]], *, title: str, y_label: str
) -> str:
    """For each group a bar per name of `series`, with its value on it and its interval, where that is finite; None:
    no bar."""

    def draw(axes: Axes) -> None:
        width = 0.8 / max(1, len(series))
        for i, (name, values) in enumerate(series.items()):
            shown = [(at + (i - (len(series) - 1) / 2) * width, one) for at, one in enumerate(values) if one]
            bars = axes.bar([x for x, _ in shown], [one.estimate for _, one in shown], width=0.92 * width, label=name)
            axes.bar_label(bars, [number(one.estimate) for _, one in shown], padding=2, fontsize=7)
            known = [(x, one) for x, one in shown if np.isfinite([one.low, one.high]).all()]
            below, above = [one.estimate - one.low for _, one in known], [one.high - one.estimate for _, one in known]
            middle = [one.estimate for _, one in known]
            axes.errorbar([x for x, _ in known], middle, [below, above], fmt="none", ecolor="#444444", elinewidth=1)
        axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
        axes.set_ylim(bottom=0)
        _label(axes, "", y_label)

    return _written(path, title, draw)


def _label(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)


def _scale(axes: Axes, *, log_x: bool, log_y: bool) -> None:
    if log_x:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    if log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _on_fewer_lines(svg: str) -> str:
    """A line for each thing drawn: matplotlib begins a new one at every point of a path, and for every group."""
    svg = re.sub(r"<[^>]*>", lambda element: " ".join(element[0].split()), svg)
    return re.sub(r">\s+(?=<(?:/?g|/?defs)\b)", ">", svg)


def _written(path: Path, title: str, draw: Any) -> str:
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return f"*{title}: not plotted, matplotlib is missing (the extra `bench` brings it).*"
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.set_title(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    unsaid = "Date" if path.suffix == ".svg" else "Software"
    with rc_context(TEXT_AS_TEXT):
        figure.savefig(path, dpi=DPI, metadata={unsaid: None})
    if path.suffix == ".svg":
        path.write_text(_on_fewer_lines(path.read_text(encoding="utf-8")), encoding="utf-8")
    return f"![{title}]({path.name})"
