"""CUDA graphs against eager steps: outputs, not only tokens; also where a graph has more rows than the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from tests.engine.test_torch_engine import VOCAB
from tests.helpers.gpu import (
    BFLOAT16_WITHIN,
    WIDE,
    WIDE_WINDOW,
    Run,
    assert_alike,
    checkpoint,
    engine_of,
    greedily,
    need_backend,
    only_on_a_gpu,
    prompts,
    run,
    run_without_waits,
)

BACKEND = "flashinfer"
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": BACKEND}


@pytest.fixture(autouse=True)
def backend() -> None:
    need_backend(BACKEND)


def decoded(rows: int, folder: Path, graphs: int, **settings: Any) -> Run:
    """So many requests that decode together for long."""
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=40)
    wanted = {i: (prompts()[i % 8], params) for i in range(rows)}
    replays = []

    def drive(collector: Run) -> None:
        engine: Any = collector.engine
        for size, graph in engine.engine.graphs.items():
            graph.replay = _counted(graph.replay, replays, size)
        collector.run(wanted)

    got = run(folder, wanted, drive, cuda_graph_max_bs=graphs, max_running_requests=8, **{**SETTINGS, **settings})
    assert all(reason is FinishReason.LENGTH for reason in got.reasons.values())
    if graphs:
        assert max(replays) >= rows, "no step ran as a graph of all rows"
        assert rows in (1, 2, 4, 8) or max(replays) > rows
    else:
        assert not replays
    return got


def _counted(replay: Any, replays: list[int], size: int) -> Any:
    def counted() -> None:
        replays.append(size)
        replay()

    return counted


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("variant", ["qwen3-tied", "mistral-window"])
def test_logits_of_graphs_are_those_of_eager_steps(variant: str, rows: int, overlap: bool, tmp_path: Path) -> None:
    """3 and 5 rows run with padding rows."""
    changes = WIDE if variant == "qwen3-tied" else WIDE_WINDOW
    folder, _ = checkpoint(variant, tmp_path, **changes)
    graph, eager = (decoded(rows, folder, graphs, overlap=overlap) for graphs in (8, 0))
    assert_alike(graph, eager, BFLOAT16_WITHIN, at_least=0.3)


def test_a_graph_of_exactly_the_rows_is_as_good_as_exact(tmp_path: Path) -> None:
    """The same shapes, if not the same kernels: at one row logits are two roundings apart at most."""
    folder, _ = checkpoint("qwen3-tied", tmp_path, **WIDE)
    graph, eager = (decoded(1, folder, graphs) for graphs in (8, 0))
    assert_alike(graph, eager, BFLOAT16_WITHIN / 4, at_least=0.3)


def test_padding_rows_touch_nothing(tmp_path: Path) -> None:
    """What padding rows store goes to the scratch page: all pages that no request had are still zero."""
    folder, _ = checkpoint("qwen3-tied", tmp_path, **WIDE)
    engine, config = engine_of(folder, cuda_graph_max_bs=8, max_running_requests=8, **SETTINGS)
    collector = Run(engine, config)
    collector.run({i: (prompts()[i], SamplingParams(temperature=0, max_tokens=30, seed=0)) for i in range(3)})
    used = sum(-(-(len(prompts()[i]) + 30) // config.page_size) for i in range(3))
    engine.close()
    touched = sum(bool(page.any()) for page in engine.pool.k[0][: engine.info.num_pages])
    assert 0 < touched <= used


@only_on_a_gpu("torch.cuda.set_sync_debug_mode")
@pytest.mark.parametrize("graphs", [8, 0], ids=["graphs", "eager"])
def test_launches_do_not_wait_for_the_device(graphs: int, tmp_path: Path) -> None:
    """Any operation that makes the host wait raises, once the engine is warm."""
    folder, _ = checkpoint("qwen3-tied", tmp_path, **WIDE)
    engine, config = engine_of(folder, cuda_graph_max_bs=graphs, max_running_requests=8, **SETTINGS)
    collector = run_without_waits(engine, config, top_k=VOCAB // 2, min_p=0.01)
    assert set(collector.reasons.values()) == {FinishReason.LENGTH}


def test_a_crowd_in_graphs(tmp_path: Path) -> None:
    """Sizes go up and down, prefills come between."""
    folder, _ = checkpoint("qwen3-tied", tmp_path, **WIDE)
    graph, eager = (run(folder, greedily(40), cuda_graph_max_bs=n, **SETTINGS) for n in (6, 0))
    assert_alike(graph, eager, BFLOAT16_WITHIN, at_least=0.3)
