"""`minisgl bench scheduler`: its cases do the work that they claim, it refuses what must not be measured."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl import _rust
from minisgl.bench import scheduler
from minisgl.bench import scheduler_cases as cases
from minisgl.cli import main
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.reference import ReferenceControlPlane

COMMAND = ("bench", "scheduler")
CHEAP = ("--backend", "python", "--case", "decode_1")


def reference(config: ControlPlaneConfig) -> ReferenceControlPlane:
    return ReferenceControlPlane(config)


@pytest.mark.parametrize(
    "case",
    [
        cases.decode(1),
        cases.decode(32),
        cases.churn(cases.SMALLEST_POOL),
        cases.prefill_16x512,
        cases.line("lpm"),
        cases.blocked_line("srpf"),
    ],
)
def test_each_timed_step_has_one_time(case: cases.Case) -> None:
    times = case(reference, 4)
    assert len(times) == 4 and min(times) > 0


def test_a_pool_that_is_not_full_is_no_churn() -> None:
    def roomy(config: ControlPlaneConfig) -> ReferenceControlPlane:
        fields = {name: getattr(config, name) for name in config.__slots__}
        return ReferenceControlPlane(ControlPlaneConfig(**(fields | {"num_pages": 2 * config.num_pages})))

    with pytest.raises(AssertionError, match="the pool is not full"):
        cases.churn(cases.SMALLEST_POOL)(roomy, 1)


@pytest.mark.parametrize("name", ["scheduler", "control-plane"], ids=["now", "before"])
def test_the_last_line_is_the_result(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--backend", "python", "--case", "decode_1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["build"] == "release"
    assert list(result["us"]) == ["python"] and result["us"]["python"]["decode_1"] > 0


def test_a_debug_build_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_rust, "build_info", lambda: {"version": "0", "profile": "debug", "features": []})
    assert main([*COMMAND, "--case", "decode_1"]) == 2
    assert "debug build" in capsys.readouterr().err


def test_a_missed_bar_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_1 = cases.Spec(cases.decode(1), {"python": 4}, {"python": 0.0})
    monkeypatch.setitem(cases.CASES, "decode_1", decode_1)
    assert main([*COMMAND, "--backend", "python", "--case", "decode_1", "--gate"]) == 1
    assert main([*COMMAND, "--backend", "python", "--case", "decode_1"]) == 0


def test_missing_extension_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "minisgl._rust", None)
    monkeypatch.delattr("minisgl._rust")
    assert main([*COMMAND, "--case", "decode_1"]) == 2
    assert "extension is missing" in capsys.readouterr().err


def test_every_benchmark_is_in_the_package() -> None:
    """Nothing of the checkout beside it is needed, and nothing is put on `sys.path`."""
    program = (
        f"import sys; before = list(sys.path)\nfrom minisgl.cli import main\ncode = main({[*COMMAND, *CHEAP]!r})\n"
    )
    program += "assert sys.path == before and 'benchmark' not in sys.modules\nsys.exit(code)"
    source = Path(scheduler.__file__).parents[2]
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd="/", env={"PYTHONPATH": str(source)}, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(("disturbed", "code"), [({1, 3}, 0), ({0, 1, 3}, 1)])
def test_a_moment_decides_no_figure(monkeypatch: pytest.MonkeyPatch, disturbed: set[int], code: int) -> None:
    """Two rounds of five in which something else has the machine do not miss a bar, three do."""
    rounds = itertools.count()

    def case(make: cases.Make, repeats: int) -> list[float]:
        return [9.0 if next(rounds) in disturbed else 1.0]

    monkeypatch.setitem(cases.CASES, "decode_1", cases.Spec(case, {"python": 1}, {"python": 2.0}))
    assert main([*COMMAND, "--backend", "python", "--case", "decode_1", "--gate"]) == code
    assert next(rounds) == 5
