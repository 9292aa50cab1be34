"""The control-plane benchmark: its cases do the work that they claim, it refuses what must not be measured."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.control_plane import __main__ as bench
from benchmark.control_plane import cases, growth
from minisgl import _rust, cli
from minisgl.cli import bench_control_plane
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import BACKENDS, make_control_plane
from minisgl.scheduler.reference import ReferenceControlPlane


def reference(config: ControlPlaneConfig) -> ReferenceControlPlane:
    return ReferenceControlPlane(config)


@pytest.mark.parametrize(
    "case", [cases.decode(1), cases.decode(32), cases.churn(cases.SMALLEST_POOL), cases.prefill_16x512]
)
def test_one_time_per_step(case: cases.Case) -> None:
    times = case(reference, 4)
    assert len(times) == 4 and min(times) > 0


def test_a_pool_that_is_not_full_is_no_churn() -> None:
    def roomy(config: ControlPlaneConfig) -> ReferenceControlPlane:
        fields = {name: getattr(config, name) for name in config.__slots__}
        return ReferenceControlPlane(ControlPlaneConfig(**(fields | {"num_pages": 2 * config.num_pages})))

    with pytest.raises(AssertionError, match="the pool is not full"):
        cases.churn(cases.SMALLEST_POOL)(roomy, 1)


def test_the_last_line_is_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--backend", "python", "--case", "decode_1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["build"] == "release"
    assert list(result["us"]) == ["python"] and result["us"]["python"]["decode_1"] > 0


def test_a_debug_build_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_rust, "build_info", lambda: {"version": "0", "profile": "debug", "features": []})
    assert bench.main(["--case", "decode_1"]) == 2
    assert "debug build" in capsys.readouterr().err


def test_a_backend_that_is_not_built_is_refused_or_measured() -> None:
    """Never the reference under the other's name."""
    try:
        plane = make_control_plane("rust_hotpath", bench.SMALLEST)
    except (ValueError, RuntimeError):
        assert bench.refusal(["rust_hotpath"])
    else:
        assert not isinstance(plane, ReferenceControlPlane)


def test_a_missed_bar_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_1 = cases.Spec(cases.decode(1), {"python": 4}, {"python": 0.0})
    monkeypatch.setitem(cases.CASES, "decode_1", decode_1)
    assert bench.main(["--backend", "python", "--case", "decode_1", "--gate"]) == 1
    assert bench.main(["--backend", "python", "--case", "decode_1"]) == 0


def test_the_command_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "control-plane", "--backend", "python", "--case", "decode_1"]) == 0
    assert list(json.loads(capsys.readouterr().out.splitlines()[-1])["us"]) == ["python"]


@pytest.mark.parametrize("flags", [[], ["--gate"], ["--case", "decode_1"], ["--help"]])
def test_without_the_checkout_one_line_says_so(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_control_plane, "PLACES", (tmp_path,))
    assert cli.main(["bench", "control-plane", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_the_extension_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "minisgl._rust", None)
    monkeypatch.delattr("minisgl._rust")
    assert bench.main(["--case", "decode_1"]) == 2
    assert "extension is missing" in capsys.readouterr().err


def test_growth_is_measured_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, sizes in {"batch": (1, 3), "context": (16, 32)}.items():
        monkeypatch.setitem(growth.SWEEPS, name, replace(growth.SWEEPS[name], sizes=sizes))
    monkeypatch.setattr(growth, "REPEATS", {"python": 2, "rust_hotpath": 2})
    monkeypatch.setattr(growth, "ROUNDS", range(1, 3))
    assert cli.main(["bench", "control-plane", "--growth", "batch", "context", "--out", str(tmp_path)]) == 0
    us = json.loads(capsys.readouterr().out.splitlines()[-1])["us"]
    assert {name: list(sizes) for name, sizes in us["context"].items()} == {name: ["16", "32"] for name in BACKENDS}
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert raw["us"]["batch"]["python"]["3"]["median"] == us["batch"]["python"]["3"] > 0
    report = (tmp_path / "README.md").read_text()
    assert "minisgl bench control-plane --growth batch context" in report and "| rows |" in report


@pytest.mark.parametrize("name", growth.SWEEPS)
def test_every_sweep_has_cases_that_hold_their_load(name: str) -> None:
    sweep = growth.SWEEPS[name]
    size = sweep.sizes[0]
    repeats = min(3, sweep.max_repeats(size))
    assert len(sweep.make(size)(lambda config: make_control_plane("rust_hotpath", config), repeats)) == repeats
