"""How each kind of gate comes to its result, a dictionary that its checks look into.

What cannot be run is `CouldNotRun`, never a result; a command that takes too long is ended with everything
it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmark.gate.file import Gate, Kind
from benchmark.gate.shadow_run import shadow_run
from minisgl.bench.server_process import Launch, ServerFailed, ServerProcess
from minisgl.bench.stats import coefficient_of_variation

Result = dict[str, Any]
TAIL = 600  # characters of a failed command's output that are shown


class CouldNotRun(Exception):
    """There is no result to judge."""


class Failed(Exception):
    """It ran, and what must always hold did not."""


def result_of(gate: Gate) -> Result:
    """Raises `CouldNotRun`, `Failed`."""
    return KINDS[gate.kind](gate)


def look_up(result: object, field: str) -> object:
    """The value at `field`, keys with dots between; list items by number. Raises `CouldNotRun`."""
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
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CouldNotRun("the last line of stdout is no JSON object")
    return found


def _run(gate: Gate) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the gate's command."""
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
            os.killpg(process.pid, signal.SIGKILL)  # its session: what it started and left
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
            raise CouldNotRun(f"{gate.field} is no number: {value!r}")
        values.append(float(value))
    return {"cv": coefficient_of_variation(values), "median": statistics.median(values), "values": values}


def _start_stop(gate: Gate) -> Result:
    starts, stops = [], []
    for number in range(1, gate.repeats + 1):
        server = ServerProcess(Launch(gate.flags))
        try:
            with server:
                pass
        except ServerFailed as error:
            raise Failed(f"start {number} of {gate.repeats}: {error}") from error
        if server.left_behind or server.exit_code:
            left = ", ".join(server.left_behind) or "nothing"
            raise Failed(f"stop {number} of {gate.repeats}: exit code {server.exit_code}, left behind: {left}")
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
    found = shadow_run()
    if found["num_diffs"] or found["stopped"]:
        raise Failed(f"{found['num_diffs']} differences in {found['num_compared']} steps {found['stopped']}")
    if not found["num_compared"]:
        raise CouldNotRun("no step was compared")
    return found


KINDS: dict[Kind, Callable[[Gate], Result]] = {
    "command": _command,
    "variation": _variation,
    "start_stop": _start_stop,
    "shadow": _shadow,
}
