"""The tests under tests/gpu, rehearsed on the CPU: some of each file, so that they run when a GPU is at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOME = (
    "test_gpu_pieces.py::test_streams_keep_their_order",
    "test_gpu_pieces.py::test_a_graph_does_its_forward_again_with_what_is_there_then",
    "test_gpu_pieces.py::test_equal_logits_give_the_draws_of_the_cpu[300-1]",
    "test_gpu_models.py::test_float32[llama3-tied]",
    "test_gpu_models.py::test_bfloat16[qwen3-moe]",
    "test_gpu_attention.py::test_flashinfer_gives_the_logits_of_torch[float16-16-window]",
    "test_gpu_graphs.py::test_logits_of_graphs_are_those_of_eager_steps[qwen3-tied-3-True]",
    "test_gpu_graphs.py::test_padding_rows_touch_nothing",
    "test_gpu_experts.py::test_a_graph_gives_the_bits_of_eager_work[8]",
    "test_gpu_experts.py::test_graphs_of_a_model_with_experts",
    "test_gpu_scheduling.py::test_all_parameters_as_on_the_cpu[1-rust_hotpath-overlap]",
    "test_gpu_scheduling.py::test_aborts_take_nothing_from_others[python]",
    "test_gpu_failures.py::test_a_step_that_fails_ends_its_requests_only[not-finite-2]",
)

LATE = ("test_gpu_graphs.py", "test_gpu_scheduling.py", "test_gpu_failures.py")
"""In which steps overlap: what is late makes no difference to the others."""


def rehearsal(how: str, *tests: str) -> str:
    arguments = [sys.executable, "-m", "pytest", "-rs", "--tb=short", *(f"tests/gpu/{test}" for test in tests)]
    environment = {**os.environ, "MINISGL_GPU_REHEARSAL": how, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("how", ["1", "late"])
def test_some_of_each(how: str) -> None:
    said = rehearsal(how, *(SOME if how == "1" else SOME[4:8]))
    assert "passed" not in said, "a rehearsal counts as seen on a GPU"
    assert said.count("rehearsed on cpu") >= 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["1", "late"])
def test_all(how: str) -> None:
    rehearsal(how, *([""] if how == "1" else LATE))
