"""Gates that pass, that fail and that cannot run; the last two count alike."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from benchmark import gate as gates
from benchmark.gate import Check, CouldNotRun, Gate, judge, look_up, main, read_gates
from minisgl.bench.server_process import Launch, ServerProcess
from minisgl.config import ConfigError
from minisgl.step import StepPlan
from tests.helpers.e2e import is_gone, until
from tests.helpers.seconds import WAIT_S

ROOT = Path(__file__).resolve().parents[2]
PRINT = "import json; print('noise'); print(json.dumps({'speed': {'at.256': 5.0}, 'same': True, 'none': None}))"


def command(*checks: Check, run: str = "", **fields: Any) -> Gate:
    return Gate(name="g", run=run or f'python -c "{PRINT}"', checks=checks, **fields)


@pytest.mark.parametrize(
    ("check", "state"),
    [
        (Check(field="speed.at.256", at_most=5.0), "passed"),
        (Check(field="speed.at.256", at_most=4.9), "failed"),
        (Check(field="speed.at.256", at_least=5.1), "failed"),
        (Check(field="same", equals=True), "passed"),
        (Check(field="same", equals=1), "failed"),
        (Check(field="same", at_most=2), "failed"),
        (Check(field="none", at_most=1), "could not run"),
        (Check(field="speed.missing", at_most=1), "could not run"),
    ],
)
def test_checks(check: Check, state: str) -> None:
    assert judge(command(check)).state == state


@pytest.mark.parametrize(
    ("run", "state", "reason"),
    [
        ('python -c "raise SystemExit(3)"', "failed", "exit code 3"),
        ('python -c "print(1)"', "could not run", "not a JSON object"),
        ('python -c "print()"', "could not run", "not a JSON object"),
        ("no-such-program-anywhere", "could not run", "No such file"),
    ],
)
def test_commands_without_a_result(run: str, state: str, reason: str) -> None:
    verdict = judge(command(Check(field="x", at_most=1), run=run))
    assert verdict.state == state and reason in verdict.reason


def test_without_checks_the_exit_code_decides() -> None:
    assert judge(command(run='python -c "print(1)"')).state == "passed"


def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    program = (
        f"import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, file=open('{file}', 'w')); p.wait()"
    )
    for timeout_s in (1.0, 10.0, WAIT_S):  # enough for it to begin, which a busy machine decides
        verdict = judge(command(run=f'python -c "{program}"', timeout_s=timeout_s))
        assert verdict.state == "could not run" and f"no result after {timeout_s:g}" in verdict.reason
        if file.exists() and file.read_text():
            break
    until(lambda: is_gone(int(file.read_text())), "its child goes on")


def test_variation() -> None:
    counter = "import json,random; print(json.dumps({'x': random.uniform(99, 101)}))"
    gate = command(
        Check(field="cv", at_most=0.05), run=f'python -c "{counter}"', kind="variation", field="x", repeats=3
    )
    verdict = judge(gate)
    assert verdict.state == "passed" and len(verdict.result["values"]) == 3
    wild = counter.replace("99, 101", "1, 101")
    assert judge(msgspec.structs.replace(gate, run=f'python -c "{wild}"', repeats=8)).state == "failed"


def test_start_and_stop() -> None:
    gate = Gate(
        name="g", kind="start_stop", flags=("--engine", "echo"), repeats=2, checks=(Check(field="times", equals=2),)
    )
    verdict = judge(gate)
    assert verdict.state == "passed", verdict.reason
    assert len(verdict.result["starts_s"]) == 2


def test_something_left_behind_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaky(ServerProcess):
        def start(self) -> ServerProcess:
            return self

        def stop(self) -> int:
            self.exit_code, self.left_behind = 0, ["shared memory x"]
            return 0

    monkeypatch.setattr(gates, "ServerProcess", Leaky)
    verdict = judge(Gate(name="g", kind="start_stop", repeats=1))
    assert verdict.state == "failed" and "shared memory x" in verdict.reason


def test_a_server_that_does_not_start_fails() -> None:
    verdict = judge(Gate(name="g", kind="start_stop", flags=("--engine", "none-such"), repeats=1))
    assert verdict.state == "failed" and "none-such" in verdict.reason
    assert Launch().flags == ()


def test_shadow_compares_every_kind_of_decision() -> None:
    verdict = judge(Gate(name="g", kind="shadow"))
    assert verdict.state == "passed", verdict.reason
    assert verdict.result["num_retracted"] > 0 and verdict.result["num_equal"] > 1000


def test_a_planted_divergence_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    build = gates.build_control_plane

    def planted(*args: Any) -> Any:
        plane = build(*args)
        schedule = plane._shadow.schedule

        class Wrong:
            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

            def schedule(self, *args: Any) -> StepPlan:
                plan = schedule(*args)
                return replace(plan, num_free_pages=plan.num_free_pages + 1) if plan.step == 50 else plan

        inner, plane._shadow = plane._shadow, Wrong()
        return plane

    monkeypatch.setattr(gates, "build_control_plane", planted)
    verdict = judge(Gate(name="g", kind="shadow"))
    assert verdict.state == "failed" and verdict.reason.startswith("1 differences")


# ------------------------------------------------------------------------------------------------------ files, command


def written(folder: Path, text: str) -> Path:
    path = folder / "gates.yaml"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gates: []", "at least one"),
        ("gates:\n  - {name: a}", "run: missing"),
        ("gates:\n  - {name: a, run: x, chekcs: []}", "chekcs"),
        ("gates:\n  - {name: a, run: x, checks: [{field: y}]}", "at_least, at_most or equals"),
        ("gates:\n  - {name: a, run: x}\n  - {name: a, run: y}", "two gates"),
        ("gates:\n  - {name: a, kind: variation, run: x}", "needs field"),
        ("gates:\n  - {name: a, kind: start_stop}", "repeats"),
        ("gates:\n  - {name: a, kind: speed, run: x}", "speed"),
        ("gates:\n  - {name: a, kind: shadow, run: x}", "not for the kind"),
        ("gates: [", "not valid YAML"),
    ],
)
def test_bad_files_are_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        read_gates(written(tmp_path, text))


def test_one_table_one_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [{"field": "x", "at_most": 2}]
    gates = [
        {"name": "good", "run": """python -c 'print("{\\"x\\":1}")'""", "checks": small},
        {"name": "bad", "run": """python -c 'print("{\\"x\\":3}")'""", "checks": small},
        {"name": "absent", "run": "no-such-program-anywhere"},
    ]
    path = written(tmp_path, yaml.safe_dump({"gates": gates}))
    assert main([str(path), "--out", str(tmp_path / "out")]) == 1
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert (found["gates"], found["passed"], found["failed"], found["could_not_run"]) == (3, 1, ["bad"], ["absent"])
    assert sum("passed" in line for line in lines[:-1]) == 1
    assert json.loads((tmp_path / "out" / "raw.json").read_text())["gates"][1]["state"] == "failed"
    assert main([str(path), "--only", "good"]) == 0
    assert main([str(path), "--only", "nothing like it"]) == 2
    assert main([str(tmp_path / "missing.yaml")]) == 2


def test_fields_are_found_by_the_longest_key() -> None:
    data = {"a": {"b": 1}, "a.b": 2, "list": [{"c": 3}]}
    assert look_up(data, "a.b") == 2
    assert look_up(data, "list.0.c") == 3
    for field in ("list.1.c", "a.c", "list.x", "a.b.c"):
        with pytest.raises(CouldNotRun):
            look_up(data, field)


def test_the_release_gates_can_be_read() -> None:
    gates = read_gates(ROOT / "benchmark" / "gates" / "release.yaml")
    assert {"command", "start_stop", "shadow", "variation"} <= {gate.kind for gate in gates}
    start_stop = next(gate for gate in gates if gate.kind == "start_stop")
    assert start_stop.repeats == 20
