"""Run every gate of a file, say which held: one table, one exit code.

    python -m benchmark.gate benchmark/gates/release.yaml [--only TEXT] [--out DIR]

Exit code 0 if all passed. A gate that could not run counts as failed; one gate's failure never stops the others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from benchmark.gate.file import Gate, read_gates
from benchmark.gate.kinds import CouldNotRun, Failed, Result, look_up, result_of
from minisgl.bench.report import Report, number, print_result, public_command, table
from minisgl.config import ConfigError

State = Literal["passed", "failed", "could not run"]


@dataclass(slots=True)
class Verdict:
    """`findings` has (field, value, bound, held) of each check; `reason` says why without a check."""

    name: str
    kind: str
    state: State = "passed"
    reason: str = ""
    findings: list[tuple[str, object, str, bool]] = field(default_factory=list)
    seconds: float = 0.0
    result: Result = field(default_factory=dict)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmark.gate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="the gates, such as benchmark/gates/release.yaml")
    parser.add_argument("--only", action="append", metavar="TEXT", help="only gates with this in their name")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and the table (default: nothing)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return run(make_parser().parse_args(arguments), public_command(arguments, "python -m benchmark.gate"))
    except ConfigError as error:
        print(f"benchmark.gate: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace, command: str) -> int:
    gates = [gate for gate in read_gates(args.file) if any(text in gate.name for text in args.only or [""])]
    if not gates:
        raise ConfigError(f"--only: no gate of {args.file} has this in its name")
    report = None if args.out is None else Report(args.out, "Gates", command=command)
    verdicts = []
    for i, gate in enumerate(gates, 1):
        print(f"[{i}/{len(gates)}] {gate.name} ...", file=sys.stderr, flush=True)
        verdict = judge(gate)
        print(f"[{i}/{len(gates)}] {gate.name}: {verdict.state}, {verdict.seconds:.1f} s", file=sys.stderr, flush=True)
        verdicts.append(verdict)
    figures = _table(verdicts)
    print(figures)
    if report is not None:
        report.section("Verdicts", figures)
        report.write({"gates": [asdict(verdict) for verdict in verdicts]})
    by_state = {state: [v.name for v in verdicts if v.state == state] for state in ("failed", "could not run")}
    passed = sum(verdict.state == "passed" for verdict in verdicts)
    print_result(
        {
            "bench": "gate",
            "gates": len(verdicts),
            "passed": passed,
            "failed": by_state["failed"],
            "could_not_run": by_state["could not run"],
        }
    )
    return 0 if passed == len(verdicts) else 1


def judge(gate: Gate) -> Verdict:
    verdict = Verdict(gate.name, gate.kind)
    began = time.monotonic()
    try:
        verdict.result = result_of(gate)
        for check in gate.checks:
            value = look_up(verdict.result, check.field)
            verdict.findings.append((check.field, value, check.bound(), check.holds(value)))
        if not all(held for *_, held in verdict.findings):
            verdict.state = "failed"
    except Failed as failure:
        verdict.state, verdict.reason = "failed", str(failure)
    except (CouldNotRun, ConfigError, OSError) as error:
        verdict.state, verdict.reason = "could not run", str(error)
    verdict.seconds = time.monotonic() - began
    return verdict


def _table(verdicts: Sequence[Verdict]) -> str:
    rows: list[tuple[str, str, str, str, str]] = []
    for verdict in verdicts:
        if verdict.reason or not verdict.findings:
            rows.append(
                (verdict.name, "", verdict.reason.splitlines()[0][:160] if verdict.reason else "", "", verdict.state)
            )
        for name, value, bound, held in verdict.findings if not verdict.reason else ():
            shown = number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
            rows.append((verdict.name, name, shown, bound, "passed" if held else "failed"))
    return table(("gate", "field", "found", "bound", "verdict"), rows)


if __name__ == "__main__":
    sys.exit(main())
