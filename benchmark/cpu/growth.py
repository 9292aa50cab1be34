"""`python -m benchmark.cpu growth`: how the time of a step grows with the batch and the context, of a prefill with its
length; nothing may be worse than linear.

Each point is the fastest of its rounds: other work only adds. The exponent is that of the largest fourfold growth at
the end of a sweep, log(time ratio) / log(size ratio): 1 is linear. A sum like weights + context grows slower at first,
so the end says how it goes on. A prefill has a part that grows with the square of its length (each token attends to all
before it), a small one up to some thousand tokens: its exponent may be that much larger.

In each sweep one size changes and everything else stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.cpu.sidebyside import measure, missing_table
from benchmark.cpu.variants import Point, Setup
from minisgl.bench.plots import Series, line_plot
from minisgl.bench.report import Report, print_result, table

NOISE = 0.1  # that an exponent may lie above 1
TAIL = 4.0  # the end of a sweep: its last growth by so much
STEPS = 24  # decode steps of a point; the largest batch takes some of them to get in


@dataclass(frozen=True, slots=True)
class Sweep:
    """`point` makes a size's question; the answer's `key`, in ms by `scale`, is what grows. `most`: the exponent that
    may not be exceeded at the end."""

    title: str
    unit: str
    sizes: tuple[int, ...]
    point: Callable[[int], Point]
    key: str
    scale: float = 1.0
    most: float = 1.0


SWEEPS = {
    "batch": Sweep(
        "decode step against its rows (context 32 to 48)",
        "rows",
        (1, 2, 4, 8, 16, 32, 64, 128, 256),
        lambda rows: Point("decode", rows, 32, STEPS),
        "step_ms",
    ),
    "context": Sweep(
        "decode step of one row against its context",
        "tokens",
        (128, 256, 512, 1024, 2048, 4096, 8128),
        lambda length: Point("decode", 1, length, STEPS),
        "step_ms",
    ),
    "rows-context": Sweep(
        "decode step of 8 rows against their context",
        "tokens of each row",
        (128, 256, 512, 1024, 2048),
        lambda length: Point("decode", 8, length, STEPS),
        "step_ms",
    ),
    "prefill": Sweep(
        "prefill of one prompt against its length",
        "tokens",
        (16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
        lambda length: Point("prefill", 1, length),
        "seconds",
        1e3,
        1.25,
    ),
}
DEFAULT_VARIANTS = ("exact", "int8")


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float | None:
    """Of the last growth of the size by `TAIL` or more."""
    if len(sizes) < 2:
        return None
    first = max([i for i, size in enumerate(sizes) if size * TAIL <= sizes[-1]], default=0)
    return math.log(times[-1] / times[first]) / math.log(sizes[-1] / sizes[first])


def run(
    names: Sequence[str],
    variants: Sequence[str],
    rounds: int,
    threads: int,
    out: Path | None,
    command: str,
    rehearse: bool,
) -> dict[str, Any]:
    report = None if out is None else Report(out, "Growth of the CPU engine's steps", command=command)
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name in names:
        sweep = SWEEPS[name]
        sizes = sweep.sizes[:2] if rehearse else sweep.sizes
        points = [sweep.point(size) for size in sizes]
        # sizes make the names, so that the context of a decode step is one, too
        answers = _ask(variants, points, rounds, threads, name, rehearse)
        missing.update(answers.pop("missing"))
        found[name] = {
            variant: {
                "ms": dict(zip(sizes, times, strict=True)),
                "exponent": (fitted := exponent(sizes, times)),
                "bar": sweep.most,
                "met": None if fitted is None else fitted <= sweep.most + NOISE,
            }
            for variant, of_variant in answers.items()
            if (times := [sweep.scale * best for best in _best(of_variant, len(points), sweep.key)])
        }
        print(f"\n{sweep.title}\n\n{_table(sweep, found[name])}\n", flush=True)
        if report is not None and found[name]:
            report.section(sweep.title, _table(sweep, found[name]), _plot(report.folder, name, found[name]))
            report.write({"sweeps": found, "missing": missing})
    if report is not None:
        report.section("Exponents", _exponents(found), missing_table(missing))
        report.write({"sweeps": found, "missing": missing})
    print(_exponents(found))
    result = {
        "bench": "cpu growth",
        "exponents": {n: {a: r["exponent"] for a, r in of.items()} for n, of in found.items()},
    }
    print_result(result)
    return found


def _ask(
    variants: Sequence[str], points: Sequence[Point], rounds: int, threads: int, label: str, rehearse: bool
) -> dict[str, Any]:
    """Answers by variant: of each round, of each point."""
    setup = Setup(model="smollm2", threads=threads, points=points)
    by_variant: dict[str, Any] = {}
    missing: dict[str, str] = {}
    found = measure(["echo"] if rehearse else variants, setup, points, rounds, label, distinct=True)
    missing.update(found.missing)
    for variant, of_variant in found.answers.items():
        by_variant[variant] = list(of_variant.values())
    return {**by_variant, "missing": missing}


def _best(of_variant: Sequence[Sequence[Mapping[str, Any]]], count: int, key: str) -> list[float]:
    """The fastest round of each point; nothing if one of them is missing."""
    best = [min((one[key] for one in rounds if one[key]), default=math.nan) for rounds in of_variant]
    return best if len(best) == count and all(map(math.isfinite, best)) else []


def _table(sweep: Sweep, of_sweep: Mapping[str, Any]) -> str:
    if not of_sweep:
        return ""
    head = [sweep.unit, *(f"{variant}, {what}" for variant in of_sweep for what in ("ms", "us for each"))]
    sizes = next(iter(of_sweep.values()))["ms"]
    rows = [
        [size, *(value for one in of_sweep.values() for value in (one["ms"][size], 1e3 * one["ms"][size] / size))]
        for size in sizes
    ]
    return table(head, rows)


def _plot(folder: Path, name: str, of_sweep: Mapping[str, Any]) -> str:
    sweep = SWEEPS[name]
    series = [Series(variant, list(one["ms"]), list(one["ms"].values())) for variant, one in of_sweep.items()]
    first = next(iter(of_sweep.values()))["ms"]
    sizes = list(first)
    line = [first[sizes[-1]] * size / sizes[-1] for size in sizes]
    return line_plot(
        folder / f"{name}.png",
        [*series, Series("linear", sizes, line)],
        title=sweep.title,
        x_label=sweep.unit,
        y_label="ms, the fastest",
        log_x=True,
        log_y=True,
    )


def _exponents(found: Mapping[str, Any]) -> str:
    said = {True: "met", False: "**not met**", None: "not measured"}
    rows = [
        (SWEEPS[name].title, variant, one["exponent"], one["bar"], said[one["met"]])
        for name, of_sweep in found.items()
        for variant, one in of_sweep.items()
    ]
    return table(("sweep", "variant", "exponent at its end", "at most", ""), rows) if rows else ""
