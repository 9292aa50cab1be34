"""Two variants of the server under the same loads, on several profiles: the body of `schedulers` and `front_ends`.

Each profile is measured as `benchmark.ab` does: a fresh server for every run, variants in alternating order, paired
differences. Writes raw.json and a report after each profile; the last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmark.ab.__main__ import Figures, compare, figures_table, paired
from benchmark.ab.point import measure_point, point_from
from benchmark.ab.variants import Variant
from minisgl.bench.plots import bar_breakdown
from minisgl.bench.report import Report, print_result, read_raw, table
from minisgl.bench.server_process import ServerProcess
from minisgl.bench.stats import Interval, PairedDifference


class Profile(NamedTuple):
    flags: tuple[str, ...]
    load: str  # flags of `minisgl bench serve`; empty with `measure`
    measure: Callable[[ServerProcess], Figures] | None = None  # instead of a load


def simulated(profile: str, *flags: str) -> tuple[str, ...]:
    """Flags of a simulated engine."""
    return ("--engine", "sim", "--sim-profile", profile, "--max-running-requests", "512", *flags)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared, under which loads, and which figures are shown first. `parts` of a step are plotted, if any."""

    name: str  # of the module in benchmark.online
    title: str
    variants: tuple[Variant, Variant]
    profiles: Mapping[str, Profile]
    summary: tuple[str, ...]
    text: str  # of the summary
    parts: tuple[str, ...] = ()

    def main(self, args: Sequence[str] | None = None) -> int:
        parser = argparse.ArgumentParser(prog=f"benchmark.online.{self.name}", description=self.title)
        parser.add_argument("--out", type=Path, required=True, help="folder for raw.json and README.md")
        parser.add_argument("--pairs", type=int, default=6)
        parser.add_argument(
            "--again", action="store_true", help="write the report of FOLDER/raw.json again; measure nothing"
        )
        parser.add_argument("--profile", nargs="+", choices=tuple(self.profiles), default=list(self.profiles))
        parser.add_argument("--tokenizer", default="smollm2")
        options = parser.parse_args(args)
        if options.again:
            return self._again(options.out)
        command = f"python -m benchmark.online.{self.name} --pairs {options.pairs} --out FOLDER"
        report = Report(options.out, self.title, command=command)
        runs, found = {}, {}
        for name in options.profile:
            print(name, file=sys.stderr, flush=True)
            runs[name] = self._run(self.profiles[name], options.tokenizer, options.pairs)
            found[name] = paired(self.variants, runs[name], 0.95)
            print(f"\n{name}\n\n{figures_table(self.variants, found[name])}", flush=True)
            self._write(report, runs, found, options.pairs)  # kept, whatever comes later
        print_result({"benchmark": self.name, "profiles": {name: self._short(one) for name, one in found.items()}})
        return 0

    def _run(self, profile: Profile, tokenizer: str, pairs: int) -> dict[str, list[Figures]]:
        model = ("--model", tokenizer) if "sim" in profile.flags else ()
        measure = profile.measure
        if measure is None:
            load = point_from(profile.load.split())

            def measure(server: ServerProcess) -> Figures:
                return measure_point(server, load)

        return compare(self.variants, (*profile.flags, *model), pairs, measure)

    def _again(self, folder: Path) -> int:
        raw = read_raw(folder)
        report = Report(folder, raw["title"], command=raw["command"])
        report.environment = raw["environment"]
        runs = raw["runs"]
        found = {name: paired(self.variants, by_variant, 0.95) for name, by_variant in runs.items()}
        self._write(report, runs, found, len(next(iter(runs.values()))[self.variants[0].name]))
        return 0

    def _short(self, found: Mapping[str, PairedDifference]) -> dict[str, Any]:
        return {name: asdict(found[name].ratio or found[name].difference) for name in self.summary if name in found}

    def _write(
        self,
        report: Report,
        runs: Mapping[str, Mapping[str, Sequence[Figures]]],
        found: Mapping[str, Mapping[str, PairedDifference]],
        pairs: int,
    ) -> None:
        report.clear()
        a, b = self.variants
        figures = (*self.summary, "start_s", "stop_s")
        rows = [(name, *(_percent(by_figure.get(figure)) for figure in figures)) for name, by_figure in found.items()]
        text = f"{pairs} pairs of fresh servers for each profile, in alternating order; paired differences with "
        text += f"Student's t interval at 95 %. {self.text}"
        report.section(f"`{b.name}` against `{a.name}`", text, table(("profile", *figures), rows))
        for name, by_figure in found.items():
            flags, load = " ".join(self.profiles[name].flags), self.profiles[name].load
            shown = f"`{flags}`" + (f"; load: `{load}`." if load else ".")
            plots = [self._plot(report.folder, name, runs[name])] if self.parts else []
            report.section(name, shown, figures_table(self.variants, by_figure), *plots)
        loads = {name: self.profiles[name].load for name in runs}
        differences = {name: {k: v.as_dict() for k, v in by_figure.items()} for name, by_figure in found.items()}
        report.write({"loads": loads, "runs": runs, "differences": differences})

    def _plot(self, folder: Path, name: str, runs: Mapping[str, Sequence[Figures]]) -> Path:
        steps = {
            variant.name: {part: _mean(runs[variant.name], f"{part}_us_per_step") for part in self.parts}
            for variant in self.variants
        }
        file = "".join(char if char.isalnum() else "-" for char in name)
        return bar_breakdown(folder / f"{file}.png", steps, title=f"{name}: a step of the loop", y_label="us")


def _percent(found: PairedDifference | None) -> str:
    if found is None or found.ratio is None:
        return ""
    ratio: Interval = found.ratio
    return f"{100 * ratio.estimate:+.0f} % [{100 * ratio.low:+.0f}, {100 * ratio.high:+.0f}]"


def _mean(runs: Sequence[Figures], figure: str) -> float:
    return sum(run.get(figure, 0.0) for run in runs) / len(runs)
