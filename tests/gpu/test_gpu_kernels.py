"""Attention backends and FlashInfer's part of sampling, kernel by kernel on the device, at the heads of real models.

What is compared is one call, without a model around it: of bfloat16 against float32 by torch. A bfloat16 has 8 bits;
outputs here are below 4, and rounded twice on the way.
"""

from __future__ import annotations

import pytest
import torch

from minisgl.attention import AttentionBackend
from minisgl.attention.backend import machine
from minisgl.attention.flashinfer import Heads
from minisgl.engine.graphs import CudaCapture
from tests.helpers.attention import Rig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing of a kernel to rehearse")

WITHIN = 0.05
HEADS = {
    "qwen3-0.6b": Heads(16, 8, 128),
    "llama-3.1-8b": Heads(32, 8, 128),
    "qwen3-32b": Heads(64, 8, 128),
    "smollm2-135m": Heads(9, 3, 64),
}
KERNELS = ("flashinfer", "flashinfer:fa3", "flash_attention")
GRAPH_SIZES = (1, 4, 64)


def backend(rig: Rig, kernels: str, graph_sizes: tuple[int, ...] = ()) -> AttentionBackend:
    name, _, prefill = kernels.partition(":")
    if name not in machine(rig.device).installed:
        pytest.skip(f"no {name}")
    if prefill == "fa3" and machine(rig.device).capability[0] != 9:
        pytest.skip("fa3 needs compute capability 9.0")
    if prefill == "fa3" and rig.heads.dim != 128:
        pytest.skip("compiling fa3 takes minutes: heads of 128 will do")
    if name == "flash_attention":
        from minisgl.attention.flash_attention import FlashAttention

        return FlashAttention(rig.pool, rig.device, rig.windows, max_pages_per_row=rig.columns, graph_sizes=graph_sizes)
    from minisgl.attention.flashinfer import FlashInfer

    return FlashInfer(
        rig.pool,
        rig.heads,
        rig.dtype,
        rig.device,
        rig.windows,
        max_rows=rig.max_rows,
        max_pages_per_row=rig.columns,
        graph_sizes=graph_sizes,
        prefill=prefill or "fa2",
    )


def rig_for(kernels: str, heads: Heads, max_rows: int = 8, tokens: int = 256, page_size: int = 16) -> Rig:
    page_size = 256 if kernels == "flash_attention" else page_size
    columns = -(-tokens // page_size)
    device = torch.device("cuda", 0)
    return Rig(device, heads, torch.bfloat16, page_size=page_size, columns=columns, max_rows=max_rows)


@pytest.mark.parametrize("model", HEADS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_steps_of_every_kind(kernels: str, model: str) -> None:
    rig = rig_for(kernels, HEADS[model])
    ours = backend(rig, kernels)
    with torch.inference_mode():
        for num_decode, num_prefill in ((1, 0), (8, 0), (0, 1), (0, 4), (5, 3)):
            rig.check(ours, rig.step(num_decode, num_prefill), WITHIN)


@pytest.mark.parametrize("page_size", [1, 7, 64])
@pytest.mark.parametrize("kernels", ["flashinfer", "flashinfer:fa3"])
def test_pages_of_any_size(kernels: str, page_size: int) -> None:
    rig = rig_for(kernels, HEADS["qwen3-0.6b"], page_size=page_size)
    with torch.inference_mode():
        rig.check(backend(rig, kernels), rig.step(3, 3), WITHIN)


@pytest.mark.parametrize("model", HEADS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_long_rows_that_are_cut(kernels: str, model: str) -> None:
    """Few rows and much KV: its pieces go to several multiprocessors, and are merged."""
    rig = rig_for(kernels, HEADS[model], max_rows=2, tokens=8192)
    ours = backend(rig, kernels)
    with torch.inference_mode():
        rig.check(ours, rig.step(2, 0, at_least=6000), WITHIN)
        rig.check(ours, rig.step(1, 1, at_least=6000), WITHIN)


@pytest.mark.parametrize("size", GRAPH_SIZES)
@pytest.mark.parametrize("model", HEADS)
@pytest.mark.parametrize("kernels", ["flashinfer", "flash_attention"])
def test_a_graph_attends_to_the_rows_of_its_step(kernels: str, model: str, size: int) -> None:
    """Captured for rows of one token, as the engine does; then short rows, long ones, and short ones again."""
    rig = rig_for(kernels, HEADS[model], max_rows=size, tokens=1024)
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        ours = backend(rig, kernels, GRAPH_SIZES)
        lengths = ((1, 1), (1, 40), (900, 1024), (1, 1024), (1, 3))
        rig.check_graph(ours, CudaCapture(stream), size, WITHIN, lengths)


def test_the_workspace_holds_the_largest_plans() -> None:
    """256 rows of 64 query heads in a graph, and a prompt of 8,192 tokens: a plan that does not fit raises."""
    rig = rig_for("flashinfer", HEADS["qwen3-32b"], max_rows=256, tokens=64)
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        rig.check_graph(backend(rig, "flashinfer", (256,)), CudaCapture(stream), 256, WITHIN, ((1, 1), (1, 64)))
    for heads in (HEADS["qwen3-32b"], Heads(32, 1, 128)):
        rig = rig_for("flashinfer", heads, max_rows=1, tokens=8192)
        with torch.inference_mode():
            rig.check(backend(rig, "flashinfer"), rig.step(0, 1, at_least=8192), WITHIN)


@pytest.mark.parametrize("vocabulary", [300, 49_152, 151_936])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_left_of_probabilities(vocabulary: int, seed: int) -> None:
    """As the host's sort leaves it, but for a token where rounding decides whether the share is reached."""
    pytest.importorskip("flashinfer")
    from minisgl.attention.flashinfer import renormalise
    from minisgl.engine.sampler import truncate

    noise = torch.Generator().manual_seed(seed)
    probabilities = (torch.randn(64, vocabulary, generator=noise) * 3).softmax(-1).cuda()
    top_k = torch.tensor([-1, 1, 50, vocabulary]).repeat(16).cuda()
    top_p = torch.tensor([1.0] * 4 + [0.9] * 4 + [0.3] * 8).repeat(4).cuda()
    left, expected = renormalise(probabilities, top_k, top_p), truncate(probabilities, top_k, top_p)
    differ = (left > 0) != (expected > 0)
    assert bool((torch.where(differ, probabilities, 0.0).sum(-1) <= 1e-3).all())
    assert torch.equal(left[~differ], expected[~differ])
    untouched = (top_k <= 0) & (top_p >= 1)
    assert torch.equal(left[untouched], probabilities[untouched])
    assert torch.equal(left, renormalise(probabilities, top_k, top_p)), "the same each time"
    probabilities[5] = float("nan")
    again = renormalise(probabilities, top_k, top_p)  # returns, and leaves the other rows alone
    others = torch.arange(64, device=again.device) != 5
    assert torch.equal(again[others], left[others])
