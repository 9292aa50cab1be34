"""`minisgl bench offline`: both schedulers in turns, honest figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.bench import offline
from minisgl.bench.offline import Offline
from minisgl.bench.offline_run import OfflineJob, run_job
from minisgl.cli import main
from minisgl.config import EngineConfig

ECHO = EngineConfig(engine="echo", num_pages=256, page_size=4, max_running_requests=8, max_seq_len=512)

JOB = OfflineJob(engine=ECHO, num_sequences=6, input_len=(5, 40), output_len=(3, 9), seed=7)


def both(**changes: Any) -> Offline:
    return Offline(**{"engine": ECHO, "control_planes": ("python", "rust_hotpath"), **changes})


def test_both_control_planes_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-sequences", "4", "--input-len", "5", "20", "--output-len", "3", "8", "--repeats", "2"]
    assert main(["bench", "offline", "--engine", "echo", *flags, "--out", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert set(result["variants"]) == {"python", "rust_hotpath"} and result["same_tokens"] is True
    assert result["rust_hotpath_against_python"]["num_pairs"] == 2
    raw = json.loads((tmp_path / "run" / "raw.json").read_text())
    assert len(raw["runs"]["python"]) == 2
    report = (tmp_path / "run" / "README.md").read_text()
    assert "Both gave the same tokens" in report and str(tmp_path) not in report


def test_variants_with_different_tokens_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = run_job(JOB)

    def run(job: OfflineJob, control_plane: str) -> dict[str, Any]:
        return {**real, "tokens_sha256": control_plane}

    monkeypatch.setattr(offline, "run_in_a_process", run)
    assert offline.run_offline(both(repeats=1), None, command="") == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["same_tokens"] is False


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--repeats", "0"], "--repeats 0"), (["--input-len", "9", "3"], "--input-len 9 3"),
     (["--num-sequences", "-1"], "--num-sequences -1"), (["--output-len", "0", "3"], "--output-len 0 3")],
)  # fmt: skip
def test_invalid_workloads_are_rejected(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "--engine", "echo", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_run_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--engine", "echo", "--max-seq-len", "20", "--size", "small", "--repeats", "1"]
    assert main(["bench", "offline", *flags]) == 2
    said = capsys.readouterr().err
    assert "does not fit" in said or "cut short" in said


def test_the_size_goes_by_the_engine() -> None:
    assert both().job().num_sequences == 256
    assert both(engine=EngineConfig(device="cpu")).job().num_sequences == 16
    assert both(size="small").job().num_sequences == 16


def test_order_of_variants_alternates(monkeypatch: pytest.MonkeyPatch) -> None:
    real, order = run_job(JOB), []

    def run(job: OfflineJob, control_plane: str) -> dict[str, Any]:
        order.append(control_plane[0])
        return real

    monkeypatch.setattr(offline, "run_in_a_process", run)
    offline.run_offline(both(repeats=3), None, command="")
    assert "".join(order) == "prrppr"
