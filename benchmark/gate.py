"""Run every release gate of a file and report which passed: one table, one exit code.

    python -m benchmark.gate benchmark/gates/release.yaml [--only TEXT] [--out DIR]

The file states the requirements as data:

    gates:
      - name: a decode step of 256 rows
        run: minisgl bench scheduler --case decode_256
        checks:
          - {field: us.rust_hotpath.decode_256, at_most: 5}

Exit code 0 if all passed. A gate that could not run counts as failed; one gate's failure never stops the others. A
misspelt key, a kind without its required keys, a check without a bound and two gates of one name are errors that name
the file; no default lets a gate pass. A command that takes too long is killed with its children.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import yaml

from minisgl.bench.report import Report, number, print_result, public_command, table
from minisgl.bench.server_process import Launch, ServerFailed, ServerProcess
from minisgl.bench.stats import coefficient_of_variation
from minisgl.config import ConfigError, DebugConfig, EngineConfig
from minisgl.message import AbortRequest, AddRequest, ToEngine
from minisgl.runner.build import build_control_plane, build_engine
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.shadow import ShadowControlPlane

Kind = Literal["command", "variation", "start_stop", "shadow"]
State = Literal["passed", "failed", "could not run"]
Result = dict[str, Any]
TAIL = 600  # characters of a failed command's output that are shown
PREFIXES = (0, 24, 100)  # tokens
MAX_STEPS = 100_000


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bound on one field of the result, which is named by its keys with dots between (`variants.python.cpu_s`)."""

    field: str
    at_least: float | None = None
    at_most: float | None = None
    equals: bool | int | float | str | None = None

    def bound(self) -> str:
        low = None if self.at_least is None else f"at least {self.at_least:g}"
        high = None if self.at_most is None else f"at most {self.at_most:g}"
        same = None if self.equals is None else f"{self.equals}"
        return ", ".join(text for text in (low, high, same) if text is not None)

    def holds(self, value: object) -> bool:
        if self.equals is not None and (
            value != self.equals or isinstance(value, bool) != isinstance(self.equals, bool)
        ):
            return False
        if self.at_least is None and self.at_most is None:
            return True
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        low = -float("inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        return low <= value <= high


class Gate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Release gate.

    Kind command: `run` must exit with 0, and its last line on stdout must be JSON that meets `checks` (without checks
    the exit code alone decides). variation: `run`, `repeats` times; checks see cv (of `field`), median and values.
    start_stop: a server with `flags` started and stopped `repeats` times; checks see start_s, stop_s (medians);
    anything left running fails. shadow: a seeded load on the echo engine with both schedulers; any difference fails.
    """

    name: str
    kind: Kind = "command"
    run: str = ""
    field: str = ""
    flags: tuple[str, ...] = ()
    repeats: int = 0
    checks: tuple[Check, ...] = ()
    timeout_s: float = 600.0

    def problem(self) -> str | None:
        """Return the reason why this is not a valid gate, or `None`."""
        if self.kind in ("command", "variation") and not self.run:
            return "run: missing: the command"
        if self.kind in ("start_stop", "shadow") and self.run:
            return f"run: not for the kind {self.kind}"
        if self.kind == "variation" and (not self.field or self.repeats < 2 or not self.checks):
            return "variation: needs field, repeats of at least 2, and checks"
        if self.kind == "start_stop" and self.repeats < 1:
            return "start_stop: needs repeats of at least 1"
        if self.timeout_s <= 0:
            return "timeout_s: must be above 0"
        empty = [check.field for check in self.checks if not check.bound()]
        return f"checks: {empty[0]}: needs at_least, at_most or equals" if empty else None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gates: tuple[Gate, ...]


def read_gates(path: Path) -> tuple[Gate, ...]:
    """Read the gates of a file. Raises `ConfigError` that names the fault and its place."""
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        gates = msgspec.convert(data, _File).gates
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not gates:
        raise ConfigError(f"{path}: gates: must have at least one")
    names = [gate.name for gate in gates]
    for gate in gates:
        if names.count(gate.name) > 1:
            raise ConfigError(f"{path}: {gate.name}: two gates have this name")
        if (problem := gate.problem()) is not None:
            raise ConfigError(f"{path}: {gate.name}: {problem}")
    return gates


class CouldNotRun(Exception):
    """Error for a gate that produced no result to judge."""


class Failed(Exception):
    """Error for a gate that ran and broke a condition that must always hold."""


def result_of(gate: Gate) -> Result:
    """Run a gate and return its result. Raises `CouldNotRun` or `Failed`."""
    return KINDS[gate.kind](gate)


def look_up(result: object, field: str) -> object:
    """Return the value at `field`, keys with dots between, list items by index. Raises `CouldNotRun` without one."""
    value, left = result, field
    while left:
        if isinstance(value, dict):
            # the longest key first: keys may have dots in them
            key = max((key for key in value if left == key or left.startswith(f"{key}.")), key=len, default=None)
        else:
            head = left.split(".", 1)[0]
            key = head if isinstance(value, list) and head.isdecimal() and int(head) < len(value) else None
        if key is None:
            raise CouldNotRun(f"the result has no {field}")
        value = value[key] if isinstance(value, dict) else value[int(key)]  # type: ignore[index]
        left = left[len(key) + 1 :]
    if value is None:
        raise CouldNotRun(f"{field} is null in the result")
    return value


def _command(gate: Gate) -> Result:
    code, output, errors = _run(gate)
    if code:
        raise Failed(f"exit code {code}: {(errors or output).strip()[-TAIL:]}")
    if not gate.checks and not gate.field:
        return {"exit_code": 0}
    lines = output.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise CouldNotRun("the last line of stdout is not a JSON object")
    return result


def _run(gate: Gate) -> tuple[int, str, str]:
    """Run the gate's command; return its exit code, stdout and stderr. Raises `CouldNotRun` on a timeout."""
    program = shlex.split(gate.run)
    own = {"python": [sys.executable], "minisgl": [sys.executable, "-m", "minisgl"]}
    program = [*own.get(program[0], program[:1]), *program[1:]]
    try:
        process = subprocess.Popen(
            program,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise CouldNotRun(f"{program[0]}: {error.strerror or error}") from error
    try:
        output, errors = process.communicate(timeout=gate.timeout_s)
    except subprocess.TimeoutExpired as error:
        raise CouldNotRun(f"no result after {gate.timeout_s:g} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its session: children that it left running
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return process.returncode, output, errors


def _variation(gate: Gate) -> Result:
    values = []
    for _ in range(gate.repeats):
        value = look_up(_command(gate), gate.field)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CouldNotRun(f"{gate.field} is {value!r}; it must be a number")
        values.append(float(value))
    return {"cv": coefficient_of_variation(values), "median": statistics.median(values), "values": values}


def _start_stop(gate: Gate) -> Result:
    starts, stops = [], []
    for turn in range(1, gate.repeats + 1):
        server = ServerProcess(Launch(gate.flags))
        try:
            with server:
                pass
        except ServerFailed as error:
            raise Failed(f"start {turn} of {gate.repeats}: {error}") from error
        if server.left_behind or server.exit_code:
            left = ", ".join(server.left_behind) or "nothing"
            raise Failed(f"stop {turn} of {gate.repeats}: exit code {server.exit_code}, left behind: {left}")
        starts.append(server.start_s)
        stops.append(server.stop_s)
    return {
        "times": gate.repeats,
        "start_s": statistics.median(starts),
        "stop_s": statistics.median(stops),
        "starts_s": starts,
        "stops_s": stops,
    }


def _shadow(gate: Gate) -> Result:
    counts = shadow_run()
    if counts["num_diffs"] or counts["stopped"]:
        raise Failed(f"{counts['num_diffs']} differences, {counts['num_equal']} equal calls {counts['stopped']}")
    if not counts["num_equal"]:
        raise CouldNotRun("no call was compared")
    return counts


KINDS: dict[Kind, Callable[[Gate], Result]] = {
    "command": _command,
    "variation": _variation,
    "start_stop": _start_stop,
    "shadow": _shadow,
}


def shadow_run(num_requests: int = 400, seed: int = 0, page_size: int = 4) -> dict[str, Any]:
    """Run a seeded load with both schedulers under the same calls, in this process, made to reach every decision:
    shared prefixes, a pool that is too small (eviction and retraction), aborted requests, new ones while others run.

    Returns the counts of `ShadowSummary`, num_retracted and num_steps.
    """
    config = EngineConfig(
        engine="echo",
        num_pages=96,
        page_size=page_size,
        max_running_requests=16,
        max_prefill_length=128,
        max_seq_len=256,
        cpu_backend="rust_hotpath",
        debug=DebugConfig(shadow=True),
    )
    engine = build_engine(config, lambda *report: None)
    try:
        plane = build_control_plane(config, engine.info)
        assert isinstance(plane, ShadowControlPlane)
        loop = StepLoop(plane, engine, lambda messages: None)
        waiting = _messages(num_requests, seed, engine.info.vocab_size)
        rng = random.Random(seed + 1)
        while (waiting or not loop.idle) and loop.num_steps < MAX_STEPS:
            count = rng.choice((0, 0, 0, 1, 2, 8))
            loop.step(waiting[:count])
            del waiting[:count]
        retracted = plane.stats().num_retracted_total
    finally:
        engine.close()
    return {**asdict(plane.summary), "num_retracted": retracted, "num_steps": loop.num_steps}


def _messages(num_requests: int, seed: int, vocab_size: int) -> list[ToEngine]:
    """Return requests in order of arrival; one of every eight is aborted shortly after it was sent."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(vocab_size) for _ in range(length)] for length in PREFIXES]
    messages: list[ToEngine] = []
    for req_id in range(num_requests):
        tokens = rng.choice(prefixes) + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 60))]
        sampling = SamplingParams(temperature=0, max_tokens=rng.randint(1, 80), seed=req_id, ignore_eos=True)
        messages.append(AddRequest(req_id, np.array(tokens, np.int32).tobytes(), sampling))
        if req_id % 8 == 7:
            messages.append(AbortRequest(req_id - rng.randint(0, 7)))
    return messages


@dataclass(slots=True)
class Verdict:
    """Outcome of a gate: `findings` are (field, value, bound, passed) by check; `reason`: a failure without a check."""

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
    parser.add_argument("file", type=Path, help="file of gates, such as benchmark/gates/release.yaml")
    parser.add_argument("--only", action="append", metavar="TEXT", help="run only gates whose name contains TEXT")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and the table there (default: print)")
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
        raise ConfigError(f"--only: no gate of {args.file} has a name that contains this")
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
