"""Routed experts on the device: compiled kernels against the grouped form and a plain loop, in graphs, in models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.engine.building import open_device
from minisgl.engine.graphs import Outputs
from minisgl.kernels import experts, experts_tiles, ops
from minisgl.layers.experts import grouped
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from tests.helpers.experts import WITHIN, Routed, assert_near, draw
from tests.helpers.gpu import (
    PLACE,
    REHEARSAL,
    WIDE,
    Run,
    assert_alike,
    checkpoint,
    engine_of,
    need_backend,
    nothing_waits,
    only_on_a_gpu,
    prompts,
    run,
    run_without_waits,
)

SHAPE = {"experts": 128, "per_token": 8, "hidden": 2048, "inner": 768}  # of Qwen3-30B-A3B
if REHEARSAL:
    SHAPE = {"experts": 8, "per_token": 2, "hidden": 64, "inner": 24}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "flashinfer", "max_running_requests": 8}


def fused(routed: Routed, tile: experts_tiles.Tile | None = None) -> Tensor:
    form = partial(experts.run, tile=tile) if experts.serves(routed.down) else grouped
    return form(*routed.inputs())


@pytest.fixture(autouse=True)
def kernels_serve() -> None:
    assert REHEARSAL or experts.serves(torch.empty(1, device=PLACE)), "Triton is not installed: no kernel for experts"


def assert_close(found: Tensor, expected: Tensor) -> None:
    off, most = float((found.float() - expected.float()).abs().max()), float(expected.float().abs().max())
    assert off <= WITHIN[found.dtype] * most, f"{off:.2e} off, of {most:.2e}"


@pytest.mark.parametrize("tokens", [1, 3, 17, 256, 2048])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_shapes_are_the_grouped_forms(dtype: torch.dtype, tokens: int) -> None:
    routed = draw(tokens, tokens=tokens, **SHAPE, dtype=dtype, device=PLACE)
    assert_close(fused(routed), grouped(*routed.inputs()))


@pytest.mark.parametrize("case", [(d, t) for d in DTYPES for t in experts_tiles.tiles(d)], ids=str)
def test_each_tile(case: tuple[torch.dtype, experts_tiles.Tile]) -> None:
    """Some experts with many uses, most with none."""
    dtype, tile = case
    routed = draw(1, tokens=700, **SHAPE, dtype=dtype, favourites=11, device=PLACE)
    assert_close(fused(routed, tile), grouped(*routed.inputs()))


@pytest.mark.parametrize("inner", [96, 192, 36, 1, 0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_shapes_and_shards_are_the_plain_loop(dtype: torch.dtype, inner: int) -> None:
    for tokens, hidden in ((40, 100), (7, 64), (0, 64)):
        routed = draw(2, tokens=tokens, experts=5, per_token=3, hidden=hidden, inner=inner, dtype=dtype, device=PLACE)
        for tile in experts_tiles.tiles(dtype):
            assert_near(fused(routed, tile), routed)


@only_on_a_gpu("torch's products differ with their rows")
@pytest.mark.parametrize("case", [(d, t) for d in DTYPES for t in experts_tiles.tiles(d)], ids=str)
def test_a_row_has_the_same_bits_in_any_batch_and_each_time(case: tuple[torch.dtype, experts_tiles.Tile]) -> None:
    dtype, tile = case
    routed = draw(3, tokens=300, **SHAPE, dtype=dtype, device=PLACE)
    whole = fused(routed, tile)
    assert torch.equal(fused(routed, tile), whole)
    for tokens in (slice(0, 1), slice(100, 177), slice(299, 300)):
        assert torch.equal(fused(routed.of_tokens(tokens), tile), whole[tokens])


@pytest.mark.parametrize("tokens", [1, 8, 256])
def test_a_graph_gives_the_bits_of_eager_work(tokens: int) -> None:
    """Captured with one ops, replayed with others."""
    routed = draw(4, tokens=tokens, **SHAPE, dtype=torch.bfloat16, device=PLACE)
    others = [draw(seed, tokens=tokens, **SHAPE, dtype=torch.bfloat16, device=PLACE) for seed in (5, 6)]
    device, capture = open_device(PLACE)
    with torch.inference_mode():
        if not REHEARSAL:
            torch.cuda.synchronize()
        graph = capture(lambda: Outputs(fused(routed), routed.x.isfinite().all().reshape(1)))
        for other in others:
            expected = fused(Routed(other.x, routed.gate_up, routed.down, other.chosen, other.shares))
            routed.x.copy_(other.x)
            routed.chosen.copy_(other.chosen)
            routed.shares.copy_(other.shares)
            if not REHEARSAL:
                torch.cuda.synchronize()
            device.forward.run("graph", graph.replay)
            device.forward.record_event().synchronize()
            assert torch.equal(graph.outputs.logits, expected)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("experts_and_k", [(128, 8), (7, 3), (512, 10), (8, 8)], ids=str)
def test_routes_are_those_of_torch(experts_and_k: tuple[int, int], normalise: bool) -> None:
    count, k = experts_and_k
    logits = torch.randn(500, count, generator=torch.Generator().manual_seed(1))
    if REHEARSAL:
        k = count  # of equal logits, torch on the CPU takes any
    else:
        logits = logits.mul_(4).round_().div_(4)
    chosen, shares = ops.route(logits.to(PLACE), k, normalise=normalise)
    order = logits.argsort(dim=-1, descending=True, stable=True)[:, :k]
    assert torch.equal(chosen.cpu().long(), order)
    expected = logits.double().softmax(-1).gather(1, order)
    if normalise:
        expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(shares.cpu().double(), expected, rtol=1e-4, atol=1e-6)


@only_on_a_gpu("torch.cuda.set_sync_debug_mode")
def test_the_host_never_waits() -> None:
    routed = draw(8, tokens=64, **SHAPE, dtype=torch.bfloat16, device=PLACE)
    fused(routed)
    with nothing_waits():
        fused(routed)
        with pytest.raises(RuntimeError, match="synchroniz"):
            grouped(*routed.inputs())


def num_compiled() -> dict[str, int]:
    """How many forms of each kernel of this project Triton has compiled or loaded for the device."""
    from triton.runtime.jit import JITFunction

    from minisgl.kernels import experts_triton, ops_triton

    kernels = {**vars(experts_triton), **vars(ops_triton)}
    at = torch.cuda.current_device()
    return {name: len(one.device_caches[at][0]) for name, one in kernels.items() if isinstance(one, JITFunction)}


def moe(folder: Path) -> Path:
    return checkpoint("qwen3-moe", folder, **WIDE)[0]


def test_graphs_of_a_model_with_experts(tmp_path: Path) -> None:
    """One row: the same kernels on the same shapes. More rows would meet near-ties of the router."""
    need_backend("flashinfer")
    folder, params = moe(tmp_path), SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=40)
    replays = []

    def drive(collector: Run) -> None:
        engine: Any = collector.engine
        replays.extend(engine.engine.graphs)
        collector.run({0: (prompts()[3], params)})

    graph = run(folder, {}, drive, cuda_graph_max_bs=8, **SETTINGS)
    eager = run(folder, {0: (prompts()[3], params)}, cuda_graph_max_bs=0, **SETTINGS)
    assert sorted(replays) == [1, 2, 4, 8], "there are no graphs"
    assert_alike(graph, eager, 2e-2, at_least=0.9)


@only_on_a_gpu("torch.cuda.set_sync_debug_mode")
@pytest.mark.parametrize("graphs", [8, 0], ids=["graphs", "eager"])
def test_launches_of_a_model_with_experts_never_wait(graphs: int, tmp_path: Path) -> None:
    """Nor does a step wait for Triton's compiler once the engine is ready."""
    need_backend("flashinfer")
    engine, config = engine_of(moe(tmp_path), cuda_graph_max_bs=graphs, **SETTINGS)
    ready = num_compiled()
    collector = run_without_waits(engine, config)
    assert num_compiled() == ready
    assert set(collector.reasons.values()) == {FinishReason.LENGTH}
