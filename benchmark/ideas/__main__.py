"""What each idea gains: the claims that engines of this kind are known for, measured in one run.

    python -m benchmark.ideas --out FOLDER            # raw.json and a report; with MINISGL_DATA also published traces
    python -m benchmark.ideas --page FOLDER           # docs/ideas.md and its plots, from that folder's raw.json

Variants of an experiment take turns, there and back; a change is the geometric mean of the paired ratios with Student's
t interval at 95 %. What runs in virtual time, or counts, is exact and has none. An experiment that cannot run is listed
with the reason.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmark.ideas.experiments import Experiment, experiments
from minisgl.bench.plots import grouped_bars
from minisgl.bench.report import Report, number, plain, print_result, public_command, read_raw, table
from minisgl.bench.stats import Interval, PairedDifference, paired_difference
from minisgl.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TITLE = "What each idea gains"
LABELS = {
    "output_tok_s": "tokens per second",
    "scheduler_step_us": "scheduler, us a step",
    "ttft_p50_ms": "TTFT p50, ms",
    "long_ttft_ms": "TTFT of the long prompts, ms",
    "longest_itl_ms": "longest ITL of the others, ms",
    "cached_share": "prompt tokens found",
    "engine_rss_mib": "engine's memory, MiB",
}
ABOUT = {
    "overlap": "The next step is scheduled while the device computes this one. It gains what the host takes for a "
    "step, so it shows where steps are short; who comes while a step is under way waits for one more.",
    "prefix cache": "Prompts that begin alike are computed once. It gains in the time to the first token, by as much "
    "as they have in common.",
    "chunk size": "A long prompt is computed in pieces between the steps of others (`--max-prefill-length`). Small "
    "pieces keep the others' tokens coming, and take longer for the prompt itself.",
    "page size": "Tokens of a page are kept and shared together (`--page-size`, 16 by default): large pages find less, "
    "and leave more of their last one empty.",
    "LFU for LRU": "What is evicted when the cache is full: what was used least recently (the default), or least often "
    "(`--cache lfu`).",
    "the scheduler in Rust": "The same decisions, bit for bit, from the Python reference and from Rust. A model on a "
    "CPU takes far longer for a step than either; where steps are short it shows (`docs/performance.md`).",
}
COMMAND = "python -m benchmark.ideas"
LABELS_WIDTH = 90  # characters below a plot, of all its groups


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="benchmark.ideas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--out", type=Path, metavar="DIR", help="measure; write raw.json and a report")
    ways.add_argument("--page", type=Path, metavar="DIR", help="write docs/ideas.md from its raw.json")
    parser.add_argument("--only", nargs="+", choices=tuple(ABOUT), default=list(ABOUT), metavar="IDEA")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of what takes time; 2 or more for an interval (default: 3)"
    )
    parser.add_argument("--resume", action="store_true", help="keep what DIR/raw.json has, and measure the rest")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the command; no figures to quote")
    args = parser.parse_args(arguments)
    if args.page is not None:
        write_page(read_raw(args.page), args.page.name, ROOT / "docs")
        return 0
    if args.rounds < 1:
        parser.error("--rounds: must be at least 1")
    report = Report(args.out, TITLE, command=public_command(arguments, COMMAND))
    result: dict[str, Any] = {}
    before = read_raw(args.out)["result"]["experiments"] if args.resume else []
    chosen = [one for one in experiments() if one.idea in args.only]
    for result in measured(chosen, args.rounds, args.quick, before):
        report.clear()
        for heading, *texts in sections(result, args.out, ""):
            report.section(heading, *texts)
        report.write({"result": result})  # kept, whatever comes later
    print(whole_table(result))
    print_result({"bench": "ideas", "experiments": len(result["experiments"]), "missing": result["missing"]})
    return 0


def measured(
    chosen: Sequence[Experiment], rounds: int, quick: bool, before: Sequence[dict[str, Any]] = ()
) -> Iterator[dict[str, Any]]:
    """All that is known after each experiment, as plain data; those of `before` are not measured again."""
    found, missing = list(before), dict[str, str]()
    known = {(one["idea"], one["where"], one["load"]) for one in before}
    chosen = [one for one in chosen if (one.idea, one.where, one.load) not in known]
    for one in (bar := tqdm(chosen, unit="experiment", disable=None)):
        name = f"{one.idea}, {one.where}, {one.load}"
        bar.set_description(name[:60])
        if bar.disable:
            print(f"ideas: {name}", file=sys.stderr, flush=True)
        try:
            samples = one.run(1 if one.exact else rounds, quick)
        except ConfigError as error:
            missing[name], samples = str(error), {}
        kept = {variant: [{key: run[key] for key in one.figures} for run in runs] for variant, runs in samples.items()}
        told = {"idea": one.idea, "where": one.where, "load": one.load, "exact": one.exact}
        if kept:
            found.append(told | {"figures": one.figures, "samples": kept, "load_average": round(os.getloadavg()[0], 2)})
        yield plain({"quick": quick, "rounds": rounds, "experiments": found, "missing": missing})


# ------------------------------------------------------------------------------------------------------------- showing


def changes(one: Mapping[str, Any], figure: str) -> Iterator[tuple[str, PairedDifference]]:
    """Of each variant but the first, against the first."""
    first, *others = one["samples"]
    before = [run[figure] for run in one["samples"][first]]
    for name in others:
        yield name, paired_difference(before, [run[figure] for run in one["samples"][name]])


def rows_of(one: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    first = next(iter(one["samples"]))
    for figure in one["figures"]:
        for name, found in changes(one, figure):
            yield (
                one["idea"],
                f"{one['where']}: {one['load']}",
                LABELS[figure],
                f"{first}: {number(found.median_a)}",
                f"{name}: {number(found.median_b)}",
                _change(found, exact=one["exact"]),
            )


def _change(found: PairedDifference, *, exact: bool) -> str:
    if found.ratio is None:  # from nothing, or to it
        return "exact" if exact else ""
    percent = [100 * value for value in (found.ratio.estimate, found.ratio.low, found.ratio.high)]
    if exact:
        return f"{percent[0]:+.1f} %, exact"
    if not math.isfinite(percent[2]):  # of one round
        return f"{percent[0]:+.1f} %"
    said = "" if found.ratio.excludes_zero else ": no difference seen"
    return f"{percent[0]:+.1f} % [{percent[1]:+.1f}, {percent[2]:+.1f}]{said}"


HEAD = ("idea", "measured on", "figure", "from", "to", "change")


def whole_table(result: Mapping[str, Any]) -> str:
    return table(HEAD, [row for one in result["experiments"] for row in rows_of(one)])


def sections(result: Mapping[str, Any], folder: Path, prefix: str) -> Iterator[tuple[str, ...]]:
    """Heading and texts of each idea: what it is, its plot in `folder`, its rows."""
    for idea, about in ABOUT.items():
        of_idea = [one for one in result["experiments"] if one["idea"] == idea]
        if of_idea:
            rows = [row[1:] for one in of_idea for row in rows_of(one)]
            file = f"{prefix}{idea.replace(' ', '-').lower()}.svg"
            yield _heading(idea), about, _plot(folder / file, idea, of_idea), table(HEAD[1:], rows)
    if result["missing"]:
        yield "Not measured", table(("experiment", "why"), result["missing"].items())


def _plot(path: Path, idea: str, of_idea: Sequence[Mapping[str, Any]]) -> str:
    """The first figure of each experiment, as a multiple of its first variant's."""
    names = list(dict.fromkeys(name for one in of_idea for name in one["samples"]))
    series: dict[str, list[Interval | None]] = {name: [] for name in names}
    for one in of_idea:
        bars = dict.fromkeys(names, None) | {next(iter(one["samples"])): Interval(1.0, 1.0, 1.0)}
        shown: dict[str, Interval | None] = dict(bars)
        for name, found in changes(one, one["figures"][0]):
            ratio = found.ratio
            shown[name] = None if ratio is None else Interval(1 + ratio.estimate, 1 + ratio.low, 1 + ratio.high)
        for name in names:
            series[name].append(shown[name])
    width = LABELS_WIDTH // len(of_idea)
    groups = [_wrapped(f"{one['where']}, {one['load']}: {LABELS[one['figures'][0]]}", width) for one in of_idea]
    firsts = {next(iter(one["samples"])) for one in of_idea}
    first = firsts.pop() if len(firsts) == 1 else "the first"
    return grouped_bars(path, groups, series, title=_heading(idea), y_label=f"against {first} (= 1)")


def _heading(idea: str) -> str:
    return idea[0].upper() + idea[1:]


def _wrapped(text: str, width: int) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width and lines[-1]:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def write_page(raw: Mapping[str, Any], run: str, docs: Path) -> Path:
    """Write `ideas.md` in `docs`, with its plots beside the other pictures.

    Timings of a machine that was busier than it has cores are left out, and the page says so."""
    machine = raw["environment"]
    quiet = [one for one in raw["result"]["experiments"] if one["exact"] or one["load_average"] <= machine["cores"]]
    num_busy = len(raw["result"]["experiments"]) - len(quiet)
    result = raw["result"] | {"experiments": quiet}
    busy = (
        f" {num_busy} timings of the CPU engine are left out: the machine was busy with other work." if num_busy else ""
    )
    parts = [
        f"# {TITLE}",
        "Claims that engines of this kind are known for, measured in one run of one command; the page is made from its "
        f"[raw data](../benchmark/runs/{run}/README.md), not by hand.",
        f"```sh\n{COMMAND} --out FOLDER      # minutes; MINISGL_DATA adds published traces\n"
        f"{COMMAND} --page FOLDER     # this page\n```",
        f"{machine['cpu']}, {machine['cores']} cores, commit {machine['commit']}.{busy} *CPU engine*: real work, the "
        f"embedded model, {result['rounds']} rounds, the variants in turns; changes are paired, with 95 % intervals. "
        "*Simulated*: the server's own loop, scheduler and cache in virtual time on a profile's step times: exact, and "
        "no GPU was there. Bars are multiples of the first variant's figure.",
    ]
    for heading, *texts in sections(result, docs / "img", "ideas-"):
        shown = (text.replace("](ideas-", "](img/ideas-") for text in texts)
        parts.append(f"## {heading}\n\n" + "\n\n".join(text for text in shown if text))
    path = docs / "ideas.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
