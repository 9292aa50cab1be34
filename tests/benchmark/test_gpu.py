"""The GPU benchmark without a GPU: its shapes are those of the models, its figures are right on made-up times;
rehearsed, it writes what it should."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmark.gpu import experts as experts_benchmark
from benchmark.gpu import offline, one_model, serve_http, watch
from benchmark.gpu.shapes import SHAPES, write_shape
from benchmark.gpu.watch import Step
from minisgl.bench.offline_run import OfflineJob
from minisgl.config import EngineConfig
from minisgl.engine.sim.profile import StepLoad
from minisgl.kernels import experts_tiles
from minisgl.models import load_config
from minisgl.models.decoder import build_model
from minisgl.step import StepBuffers, StepLimits, StepPlan
from minisgl.tokenizer import Tokenizer
from tests.helpers.experts import assert_near, draw

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19), ("qwen3-32b", 32.76), ("qwen3-30b-a3b", 30.53), ("llama-3.1-8b", 8.03)],
)
def test_shapes_have_the_published_sizes(name: str, billions: float, tmp_path: Path) -> None:
    config = load_config(write_shape(name, tmp_path))
    model = build_model(config, dtype=torch.bfloat16, device=torch.device("meta"), max_position=8)
    total = sum(tensor.numel() for tensor in model.checkpoint().values())
    assert total / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_step_reads_an_embedding_only_as_head(tmp_path: Path) -> None:
    for name, billions in (("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19 - 0.622)):
        config = EngineConfig(model=str(write_shape(name, tmp_path / name)))
        assert one_model.weight_bytes(config, torch.bfloat16) / 2e9 == pytest.approx(billions, rel=0.005)


class DeviceEvent:
    def __init__(self, at: float) -> None:
        self.at = at

    def seconds_since(self, earlier: DeviceEvent) -> float:
        return self.at - earlier.at


class Handle:
    def __init__(self, start: float, computed: float) -> None:
        self.start, self.computed = DeviceEvent(start), DeviceEvent(computed)


def step(start: float, computed: float, kind: str, rows: int, kv_tokens: int) -> Step:
    return Step(Handle(start, computed), kind, StepLoad(rows, rows, rows, kv_tokens, 0), 0.002)


def test_idle_time_and_roofline() -> None:
    """A prefill, then decode steps of 10 ms; 1 ms of waiting between two full ones, 5 ms before a smaller one."""
    steps = [
        step(0.000, 0.100, "prefill", 2, 0),
        step(0.200, 0.210, "decode", 2, 100),
        step(0.211, 0.221, "decode", 2, 102),
        step(0.226, 0.236, "decode", 1, 60),
    ]
    weights, token = int(4.3e12 * 0.004), int(4.3e12 * 0.00001)
    found = watch.decode_figures(steps, weights, token)
    assert found["decode_pairs"] == 2
    assert found["idle_share"] == pytest.approx(6 / 26)
    assert found["roofline_ratio"] == pytest.approx((4 + 1.02 + 4 + 0.6) / 26, rel=1e-3)
    full = found["full_batch"]
    assert (full["rows"], full["pairs"]) == (2, 1)
    assert full["idle_share"] == pytest.approx(1 / 11) and full["idle_ms_mean"] == pytest.approx(1.0)
    assert full["step_ms_median"] == pytest.approx(10.0) and full["launch_ms_median"] == pytest.approx(2.0)
    kinds = watch.by_kind(steps)
    assert kinds["decode"]["steps"] == 3 and kinds["prefill"]["device_s"] == pytest.approx(0.1)


def test_time_without_a_kernel() -> None:
    """Kernels of 0 to 10, 5 to 12 and 20 to 30 us: 8 of 30 us without one; copies and the host don't count."""

    class Event:
        def __init__(self, name: str, start: float, end: float, kind: str = "CUDA") -> None:
            self.name, self.device_type = name, getattr(torch.autograd.DeviceType, kind)
            self.time_range = type("Range", (), {"start": start, "end": end})

    events = [Event("b", 5, 12), Event("a", 0, 10), Event("a", 20, 30), Event("Memcpy HtoD", 12, 20)]
    found = one_model.kernel_figures([*events, Event("step", 0, 99, "CPU")])
    assert found["kernels"] == 3 and found["idle_share"] == pytest.approx(8 / 30)
    assert found["longest_us_per_step"] == {"a": 1.0, "b": 0.35}


def test_loads_of_steps() -> None:
    limits = StepLimits(max_rows=3, max_tokens=20, page_size=4, num_pages=9, max_seq_len=32)
    buffers = StepBuffers(limits)
    entry = buffers.ring[0]
    entry.seq_lens[:2], entry.extend_lens[:2] = (10, 4), (1, 3)
    plan = StepPlan(num_rows=2, num_decode_rows=1, num_tokens=4, num_samples=2)
    assert watch.load_of(plan, buffers) == StepLoad(2, 4, 2, 14, 10 + 2 + 3 + 4)
    assert watch.kind_of(plan) == "mixed"
    assert watch.kind_of(StepPlan(num_rows=1, num_tokens=5)) == "prefill"
    assert watch.kind_of(StepPlan(num_rows=2, num_decode_rows=2, num_tokens=2)) == "decode"


def rehearse(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmark/gpu/offline.py", "--rehearse", "--out", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_rehearsal_writes_all_that_a_run_writes(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--trace", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "raw.json").read_text())["records"]
    assert [record["kind"] for record in records] == ["engine", "run", "run", "run", "run", "trace"]
    runs = [record for record in records if record["kind"] == "run"]
    assert {(run["control_plane"], run["overlap"]) for run in runs} == set(offline.VARIANTS)
    assert all(run["full_batch"]["pairs"] > 0 and run["kinds"].keys() == {"decode", "mixed", "prefill"} for run in runs)
    steps = json.loads((tmp_path / "points.json").read_text())["steps"]["tiny"]
    assert len(steps) == runs[0]["steps"]
    report = (tmp_path / "README.md").read_text()
    assert report.startswith("# Rehearsal") and str(tmp_path) not in report
    assert (tmp_path / "trace.json.gz").stat().st_size < one_model.MAX_TRACE_BYTES


@pytest.mark.slow
def test_without_time_nothing_is_run(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--seconds", "0")
    assert done.returncode == 0, done.stderr
    assert [record["kind"] for record in json.loads((tmp_path / "raw.json").read_text())["records"]] == ["engine"]


def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, "benchmark/gpu/offline.py", "--rehearse", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        for text in process.stdout:
            if b" run " in text:
                break
        next(iter(process.stdout))  # by then the line before is in the files
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    kinds = [record["kind"] for record in json.loads((tmp_path / "raw.json").read_text())["records"]]
    assert kinds[:2] == ["engine", "run"]
    assert "tok/s" in (tmp_path / "README.md").read_text()


def test_a_model_that_fails_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    engine = EngineConfig(model="nowhere", load_format="dummy", device="inline")
    work = OfflineJob(engine=engine, num_sequences=1, input_len=(1, 1), output_len=(1, 1))
    job = one_model.ModelJob(work=work, variants=offline.VARIANTS, repeats=1, deadline=time.time() + 60)
    (record,) = offline.lines_of(job)
    assert record["kind"] == "error" and record["code"] == 1 and "nowhere" in record["error"]


def test_shapes_are_known_by_the_command() -> None:
    assert set(offline.parser().parse_args([]).models) <= set(SHAPES)


def test_experts_benchmark_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["experts.py", "--rehearse", "--repeats", "2", "--tokens", "1", "5", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    assert experts_benchmark.main() == 0
    kept = json.loads((tmp_path / "experts.json").read_text())
    assert [found["tokens"] for found in kept["side_by_side"]] == [1, 5]
    assert all(found["us"]["grouped"] > 0 for found in kept["side_by_side"])
    assert (tmp_path / "experts.md").read_text().count("\n") == 4


def test_experts_forms_of_the_benchmark_do_the_same_work() -> None:
    routed = draw(0, tokens=33, experts=6, per_token=2, hidden=32, inner=16)
    assert_near(experts_benchmark.library(*routed.inputs()), routed)
    work = experts_benchmark.Work(experts_benchmark.REHEARSAL_SHAPE, torch.bfloat16, "cpu", 1)
    chosen = torch.tensor([[0, 1], [0, 2]])  # three experts of 3 * 64 * 32 values
    assert work.best_s(chosen) == pytest.approx(3 * 3 * 64 * 32 * 2 / 4.3e12)


@pytest.mark.parametrize("rows", [0.1, 8, 16, 40, 100, 1000])
def test_experts_sweep_begins_with_what_is_in_use(rows: float) -> None:
    found = experts_benchmark.candidates(torch.bfloat16, rows)
    assert found[0] in experts_tiles.tiles(torch.bfloat16)
    assert 5 < len(found) == len(set(found)) < 80


def test_every_id_of_the_served_shape_is_a_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(serve_http.write_model(serve_http.GPU, tmp_path))
    assert tokenizer.num_ids == SHAPES["qwen3-0.6b"]["vocab_size"]
    assert tokenizer.encode("hello").tolist() == [*b"hello"]
    assert tokenizer.decode([104, 151_935]) == "hw151935"


def test_a_server_that_does_not_start_is_a_record(tmp_path: Path) -> None:
    (record,) = serve_http.served("python", tmp_path / "nowhere", serve_http.REHEARSAL, time.monotonic())
    assert record["kind"] == "error" and "nowhere" in record["error"]


@pytest.mark.slow
def test_serving_rehearsed_writes_what_a_run_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["serve_http.py", "--tiny", "--out", str(tmp_path), "--seconds", "600"])
    assert serve_http.main() == 0
    records = json.loads((tmp_path / "raw.json").read_text())["records"]
    of_a_server = ["server", "point", "point"]
    assert [record["kind"] for record in records] == [*of_a_server, *of_a_server, "offline"]
    assert [record["cpu_backend"] for record in records if record["kind"] == "server"] == ["rust_hotpath", "python"]
    assert all(one["failed"] == 0 and one["output_tok_s"] > 0 for one in records if one["kind"] == "point")
    report = (tmp_path / "README.md").read_text()
    assert report.startswith("# Rehearsal") and str(tmp_path) not in report


@pytest.mark.slow
def test_serving_without_time_leaves_points_out(tmp_path: Path) -> None:
    model = serve_http.write_model(serve_http.REHEARSAL, tmp_path / "tiny")
    found = [one["kind"] for one in serve_http.served("python", model, serve_http.REHEARSAL, time.monotonic())]
    assert found == ["server", "left out", "left out"]
