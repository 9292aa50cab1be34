"""The GPU benchmark without a GPU: its shapes are those of the models, its figures are right on made-up times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmark.gpu import experts as experts_benchmark
from benchmark.gpu import offline
from benchmark.gpu.shapes import SHAPES, write_shape
from minisgl.config import EngineConfig
from minisgl.kernels import experts
from minisgl.models import build_model, load_config
from tests.helpers_experts import assert_near, draw


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
        assert offline.weight_bytes(config, torch.bfloat16) / 2e9 == pytest.approx(billions, rel=0.005)


class Mark:
    def __init__(self, at: float) -> None:
        self.at = at

    def seconds_after(self, earlier: Mark) -> float:
        return self.at - earlier.at


class Step:
    def __init__(self, start: float, computed: float) -> None:
        self.start, self.computed = Mark(start), Mark(computed)


class Engine:
    def __init__(self, steps: list[tuple[Step, bool, int, int]]) -> None:
        self.steps = steps


def test_idle_time_and_roofline() -> None:
    """A prefill, then decode steps of 10 ms; 1 ms of waiting between two full ones, 5 ms before a smaller one."""
    steps = [
        (Step(0.000, 0.100), False, 2, 0),
        (Step(0.200, 0.210), True, 2, 100),
        (Step(0.211, 0.221), True, 2, 102),
        (Step(0.226, 0.236), True, 1, 60),
    ]
    weights, token = int(4.3e12 * 0.004), int(4.3e12 * 0.00001)
    found = offline.device_figures(Engine(steps), weights, token)  # type: ignore[arg-type]
    assert found["decode_steps"] == 2
    assert found["idle_share"] == pytest.approx(6 / 26)
    assert found["idle_share_at_full_batch"] == pytest.approx(1 / 11)
    assert found["roofline_ratio"] == pytest.approx((4 + 1.02 + 4 + 0.6) / 26, rel=1e-3)
    assert found["decode_step_ms_median"] == pytest.approx(10.0)


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
    assert found[0] in experts.tiles(torch.bfloat16)
    assert 5 < len(found) == len(set(found)) < 80
