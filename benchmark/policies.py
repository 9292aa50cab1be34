"""Who of the waiting goes first: the schedule policies on traces, in virtual time.

    python -m benchmark.policies --out benchmark/runs/DATE-policies     # half an hour; MINISGL_DATA has the traces

Every trace at shares of what the simulated device can do, under every policy: times to the first token by length of the
prompt, between tokens, goodput, hits, fairness. Then the claims that were made for the policies, each with its figure.
Whoever runs it gets the same, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

from tqdm import tqdm

from minisgl.bench.plots import Series, line_plot
from minisgl.bench.report import RAW, Report, public_command, read_raw, table
from minisgl.bench.simulate import PROMPTS, Simulation, simulate
from minisgl.bench.traces import BLOCK
from minisgl.config import EngineConfig
from minisgl.scheduler.policies import SchedulePolicy
from minisgl.scheduler.reference.ranking import WINDOWS
from minisgl.scheduler.reference.scheduler.step_pass import StepPass

LOADS = (0.7, 0.85, 0.9, 1.0, 1.2)
POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)
PROFILES = ("qwen3-8b-h200", "qwen3-0.6b-h200", "qwen3-32b-tp4-h200")
TRACES = ("azure-code", "azure-conversation", "mooncake-conversation", "mooncake-synthetic")
SHARED = "shared prefixes"
SHORT, _, LONGEST = PROMPTS
MOST = 4000  # requests of the traces with long prompts
NUM_PREFIXES, PREFIX_BLOCKS, NUM_SHARED = 256, 4, 4000
PRESSED_PAGES = 4096  # of 16 tokens: an eighth of the prefixes
UNLIMITED_PAGES = 60_000
ORACLES = {"lpm of all": "the best order of all that wait", "unlimited": "an unlimited cache"}
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Job:
    profile: str
    trace: str
    file: str
    policies: tuple[SchedulePolicy, ...] = POLICIES
    num_pages: int | None = None
    max_requests: int | None = None
    scheduler: str = "auto"

    def run(self, loads: tuple[float, ...]) -> Rows:
        engine = EngineConfig(
            engine="sim",
            sim_profile=self.profile,
            max_running_requests=256,
            max_prefill_length=8192,
            max_seq_len=131_072,
            num_pages=self.num_pages,
            cpu_backend=self.scheduler,
        )
        found = simulate(
            Simulation(
                engine=engine, trace=self.file, loads=loads, policies=self.policies, max_requests=self.max_requests
            )
        )
        about = {"profile": self.profile, "trace": self.trace, "pages": self.num_pages}
        return [{**about, "capacity_req_s": found["capacity_req_s"], **run} for run in found["runs"]]


def write_shared(file: Path) -> None:
    """Prompts that begin with one of `NUM_PREFIXES` beginnings of 2,048 tokens and go on with their own; as Poisson
    has it."""
    draw, now = random.Random(11), 0.0
    with file.open("w") as lines:
        for i in range(NUM_SHARED):
            now += draw.expovariate(1.0)
            prefix, own = draw.randrange(NUM_PREFIXES), draw.randrange(64, 257)
            line = {
                "timestamp": 1000 * now,
                "input_length": PREFIX_BLOCKS * BLOCK + own,
                "output_length": draw.randrange(32, 129),
                "hash_ids": [*range(100 * prefix, 100 * prefix + PREFIX_BLOCKS), 10**6 + i],
            }
            lines.write(json.dumps(line) + "\n")


def jobs(shared: str) -> Iterator[Job]:
    for profile in PROFILES:
        yield Job(profile, SHARED, shared, num_pages=PRESSED_PAGES)
        for trace in TRACES:
            yield Job(profile, trace, trace, max_requests=MOST if trace.startswith("mooncake") else None)


def with_unlimited(rows: Rows, shared: str, profile: str) -> Rows:
    """What the requests of the pressed cache would find in one that holds all, at the same rates."""
    scales = {row["load"]: row["time_scale"] for row in rows if _is(row, profile, SHARED, "fcfs")}
    job = Job(profile, SHARED, shared, ("fcfs",), UNLIMITED_PAGES)
    own = job.run((1.0,))[0]
    loads = tuple(scale / own["time_scale"] for scale in scales.values())
    found = job.run(loads)
    return [{**row, "load": load, "policy": "unlimited"} for row, load in zip(found, scales, strict=True)]


def with_all_waiting(shared: str, profile: str, loads: tuple[float, ...]) -> Rows:
    """lpm that chooses among all that wait: no order of theirs finds much more. Such a policy would starve some."""
    with patch.dict(WINDOWS, lpm=10**9):
        rows = Job(profile, SHARED, shared, ("lpm",), PRESSED_PAGES, scheduler="python").run(loads)
    return [{**row, "policy": "lpm of all"} for row in rows]


def with_nobody_passing(job: Job, loads: tuple[float, ...]) -> Rows:
    """srpf with a head without room in everybody's way."""
    with patch.object(StepPass, "_let_pass", lambda self, head, wait, needed, decided, budget: budget):
        rows = replace(job, policies=("srpf",), scheduler="python").run(loads[-2:])
    return [{**row, "policy": "srpf, none passes"} for row in rows]


def _is(row: dict[str, Any], profile: str, trace: str, policy: str) -> bool:
    return (row["profile"], row["trace"], row["policy"]) == (profile, trace, policy)


def ttft(row: Mapping[str, Any], which: str, percentile: str) -> float:
    found = row["ttft_by_prompt_s"].get(which)
    return float("nan") if found is None else float(found[percentile])


def main_table(rows: Rows) -> str:
    head = ("load", "policy", "TTFT p50 short", "p99 short", "p99 longest", "TPOT p50 ms", "p99 ms", "ITL p99 ms")
    head += ("goodput req/s", "in SLO", "hit rate", "Jain")
    return table(
        head,
        [
            (
                row["load"],
                row["policy"],
                ttft(row, SHORT, "p50"),
                ttft(row, SHORT, "p99"),
                ttft(row, LONGEST, "p99"),
                1e3 * row["tpot_s"]["p50"],
                1e3 * row["tpot_s"]["p99"],
                1e3 * row["longest_gap_s"]["p99"],
                row["goodput_req_s"],
                row["within_slo"],
                row["hit_rate"],
                row["fairness"],
            )
            for row in rows
        ],
    )


def plots(folder: Path, profile: str, trace: str, rows: Rows) -> list[str]:
    """Times of the short and of the longest prompts, goodput and hits against the load, a line for each policy."""
    figures: dict[str, tuple[str, Any, bool]] = {
        "short": ("TTFT p99 of prompts below 1,000, s", lambda row: ttft(row, SHORT, "p99"), True),
        "longest": ("TTFT p99 of prompts from 4,000, s", lambda row: ttft(row, LONGEST, "p99"), True),
        "goodput": ("requests a second within the SLO", lambda row: row["goodput_req_s"], False),
        "hits": ("prompt tokens found", lambda row: row["hit_rate"], False),
    }
    wanted = ("goodput", "hits") if trace == SHARED else ("short", "longest", "goodput")
    found = []
    for name in wanted:
        label, figure, log_y = figures[name]
        policies = dict.fromkeys(row["policy"] for row in rows)
        series = [
            Series(policy, [row["load"] for row in of], [figure(row) for row in of])
            for policy in policies
            if (of := [row for row in rows if row["policy"] == policy])
        ]
        file = folder / f"{profile}-{trace.replace(' ', '-')}-{name}.svg"
        title = f"{trace}, simulated {profile}"
        found.append(line_plot(file, series, title=title, x_label="share of capacity", y_label=label, log_y=log_y))
    return found


def claims(rows: Rows) -> str:
    """The bars that were set, by profile: their figures, and whether they are met."""
    found = []
    by = {(row["profile"], row["trace"], row["policy"], row["load"]): row for row in rows}
    for profile in dict.fromkeys(row["profile"] for row in rows):
        if (profile, "azure-code", "srpf", 0.9) in by:
            first, short = (by[profile, "azure-code", policy, 0.9] for policy in ("fcfs", "srpf"))
            less = 1 - ttft(short, SHORT, "p99") / ttft(first, SHORT, "p99")
            more = ttft(short, LONGEST, "p99") / ttft(first, LONGEST, "p99") - 1
            is_met = less >= 0.5 and more <= 0.15
            claim = "srpf, Azure code at 0.9: p99 of prompts below 1,000 halved, of the longest at most 15 % more"
            found.append((claim, profile, f"{-100 * less:+.1f} %, {100 * more:+.1f} %", "met" if is_met else "missed"))
        for load in (row["load"] for row in rows if _is(row, profile, SHARED, "lpm")):
            of = {one: by[profile, SHARED, one, load]["hit_rate"] for one in ("fcfs", "lpm", *ORACLES)}
            for oracle, name in ORACLES.items():
                part = (of["lpm"] - of["fcfs"]) / max(of[oracle] - of["fcfs"], 1e-9)
                figure = f"{of['fcfs']:.3f}, lpm {of['lpm']:.3f}, {oracle} {of[oracle]:.3f}: {100 * part:.0f} %"
                claim = f"lpm, shared prefixes at {load:g}: a third of what {name} finds more"
                found.append((claim, profile, figure, "met" if part >= 1 / 3 else "missed"))
    return table(("claim", "profile", "figure", ""), found) if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--profiles", nargs="+", choices=PROFILES, default=PROFILES, help="the rest stays as it is there"
    )
    parser.add_argument("--traces", nargs="+", choices=(SHARED, *TRACES), default=(SHARED, *TRACES))
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS, metavar="SHARE", help="of capacity")
    args = parser.parse_args()
    loads = tuple(args.loads)
    command = public_command(sys.argv[1:], "python -m benchmark.policies")
    report = Report(args.out, "Schedule policies on traces", command=command)
    before = read_raw(args.out)["rows"] if (args.out / RAW).exists() else []
    with tempfile.TemporaryDirectory() as folder:
        shared = str(Path(folder) / "shared.jsonl")
        write_shared(Path(shared))
        wanted = [job for job in jobs(shared) if job.profile in args.profiles and job.trace in args.traces]
        for job in tqdm(wanted, unit="job"):
            rows = job.run(loads)
            if job.trace == SHARED:
                rows += with_unlimited(rows, shared, job.profile) + with_all_waiting(shared, job.profile, loads)
            elif job.profile == PROFILES[0]:
                rows += with_nobody_passing(job, loads)
            before = [row for row in before if (row["profile"], row["trace"]) != (job.profile, job.trace)] + rows
            write(report, before)


def write(report: Report, rows: Rows) -> None:
    """What is there so far."""
    report.clear()
    if found := claims(rows):
        report.section("Claims", found)
    for profile in PROFILES:
        for trace in (SHARED, *TRACES):
            of = [row for row in rows if (row["profile"], row["trace"]) == (profile, trace)]
            if of:
                shown = plots(report.folder, profile, trace, of) if profile == PROFILES[0] else []
                title = f"{trace}, {profile}: capacity {of[0]['capacity_req_s']:.3g} requests a second"
                report.section(title, main_table(of), *shown)
    report.write({"rows": rows})


if __name__ == "__main__":
    main()
