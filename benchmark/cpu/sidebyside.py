"""Variants in turns: every round asks each one every point, and the next round goes through them the other way.

A variant that fails is told with its reason and ends no other; prompts depend on round and point alone.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmark.cpu.variants import Point, Setup, Variant, start
from minisgl.bench.compare_variants import Missing
from minisgl.bench.report import table

WARM_UP = Point("decode", 2, 16, 4)


@dataclass(slots=True)
class Found:
    """Answers by variant, point and round; `missing`: why a variant was not measured."""

    answers: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def samples(self, points: Sequence[Point]) -> dict[str, dict[str, list[float]]]:
        """The figure of each point in each round, by variant."""
        return {
            variant: {
                point.name: [value for one in of_variant[point.name] if (value := point.figure(one)) is not None]
                for point in points
                if point.name in of_variant
            }
            for variant, of_variant in self.answers.items()
        }

    def medians(self, points: Sequence[Point]) -> dict[str, dict[str, float]]:
        return {
            variant: {name: statistics.median(values) for name, values in of_variant.items() if values}
            for variant, of_variant in self.samples(points).items()
        }

    def record(self, points: Sequence[Point]) -> dict[str, Any]:
        return {
            "medians": self.medians(points),
            "samples": self.samples(points),
            "answers": self.answers,
            "about": self.about,
            "missing": self.missing,
            "seconds": self.seconds,
        }


def measure(
    names: Sequence[str], setup: Setup, points: Sequence[Point], rounds: int, label: str, *, distinct: bool = False
) -> Found:
    """`distinct`: points of one name are different ones, told apart by their place."""
    found, began = Found(), time.monotonic()
    with contextlib.ExitStack() as stack:
        variants: dict[str, Variant] = {}
        for name in names:
            own = stack.enter_context(contextlib.ExitStack())
            try:
                variants[name] = own.enter_context(start(name, setup))
                variants[name].ask(WARM_UP, (0, 0))
                found.about[name] = variants[name].about
            except Missing as error:
                own.close()
                variants.pop(name, None)
                found.missing[name] = str(error)
                print(f"{label}: {name}: {error}", file=sys.stderr, flush=True)
        for number in range(rounds):
            for name in list(variants) if number % 2 == 0 else list(reversed(variants)):
                try:
                    _ask_all(found, name, variants[name], points, number, label, distinct)
                except Missing as error:
                    found.missing[name] = str(error)
                    del variants[name]
    found.seconds = time.monotonic() - began
    return found


def _ask_all(
    found: Found, name: str, variant: Variant, points: Sequence[Point], number: int, label: str, distinct: bool
) -> None:
    said = []
    for i, point in enumerate(points):
        answer = variant.ask(point, (number + 1, i))
        key = f"{i}: {point.name}" if distinct else point.name
        found.answers.setdefault(name, {}).setdefault(key, []).append(answer)
        said.append(f"{point.name}: {point.figure(answer) or 0:.1f}")
    print(f"{label}: round {number + 1}, {name}: {', '.join(said)} tok/s", file=sys.stderr, flush=True)


def speeds_table(found: Found, points: Sequence[Point]) -> str:
    """Median of each variant and point, with the lowest and the highest round."""
    samples = found.samples(points)
    head = ("tok/s, median (lowest to highest)", *(point.name for point in points))
    rows = []
    for variant, of_variant in samples.items():
        cells = []
        for point in points:
            values = of_variant.get(point.name)
            cells.append(
                f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})" if values else None
            )
        rows.append((variant, *cells))
    return table(head, rows)


def missing_table(missing: dict[str, str]) -> str:
    return table(("not measured", "why"), missing.items()) if missing else ""
