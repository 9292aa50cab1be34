"""What the FlashInfer backend asks of the package: it attends as torch does, on a stand-in with the same calls, and on
the package itself where it is installed, with plain softmax in the place of its kernels."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.attention import AttentionRows, KVPool, TorchSdpa, flashinfer
from minisgl.attention.api import RowsThere
from minisgl.attention.flashinfer import FlashInfer, renormalise
from minisgl.attention.flashinfer_workspace import Heads, workspace_bytes
from minisgl.engine import sampler
from tests import helpers_flashinfer

CPU = torch.device("cpu")
DTYPE = torch.float16  # the package knows no float32
HEADS = Heads(4, 2, 8)
TENSOR_CORES = Heads(8, 2, 8)
GROUP_OF_THREE = Heads(9, 3, 8)
PAGE, COLUMNS, WINDOWS = 4, 6, (None, 5)


class Fence:
    def __init__(self, waits: list[int]) -> None:
        self._waits = waits

    def synchronize(self) -> None:
        self._waits.append(1)


@pytest.fixture(params=["stand-in", "package"])
def waits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    if request.param == "package":
        pytest.importorskip("flashinfer")
        helpers_flashinfer.with_plain_kernels(monkeypatch)
    else:
        monkeypatch.setitem(sys.modules, "flashinfer", helpers_flashinfer.module())
    monkeypatch.setattr(flashinfer, "_fence", lambda: Fence(found))
    helpers_flashinfer.log.clear()
    return found


def filled_pool(seed: int, heads: Heads = HEADS) -> KVPool:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"num_kv_heads": heads.kv, "head_dim": heads.dim, "dtype": DTYPE, "device": CPU}
    pool = KVPool(num_layers=2, num_pages=60, page_size=PAGE, **settings)
    for tensor in (*pool.k, *pool.v):
        tensor.normal_()
    return pool


def random_step(rng: np.random.Generator, num_decode: int, num_prefill: int) -> tuple[AttentionRows, torch.Tensor]:
    """Rows with pages of their own; slots in any order."""
    num_rows = num_decode + num_prefill
    pages = rng.permutation(60)[: 8 * COLUMNS].reshape(8, COLUMNS)
    table = torch.from_numpy(pages.astype(np.int32))
    slots = rng.permutation(8)[:num_rows].astype(np.int32)
    seq_lens = rng.integers(1, PAGE * COLUMNS + 1, num_rows).astype(np.int32)
    extend_lens = np.ones(num_rows, np.int32)
    for row in range(num_decode, num_rows):
        extend_lens[row] = rng.integers(1, seq_lens[row] + 1)
    out_loc = []
    for row in range(num_rows):
        for position in range(seq_lens[row] - extend_lens[row], seq_lens[row]):
            out_loc.append(pages[slots[row], position // PAGE] * PAGE + position % PAGE)
    places = np.array(out_loc, np.int32)
    indptr = np.concatenate([[0], np.cumsum(-(-seq_lens // PAGE))]).astype(np.int32)
    there = RowsThere(*(torch.from_numpy(array) for array in (slots, seq_lens, indptr, places)))
    return AttentionRows(num_decode, slots, seq_lens, extend_lens, places, there), table


def backend(pool: KVPool, heads: Heads = HEADS, graph_sizes: tuple[int, ...] = (), prefill: str = "fa2") -> FlashInfer:
    settings: dict[str, Any] = {"max_rows": 8, "max_pages_per_row": COLUMNS, "prefill": prefill}
    return FlashInfer(pool, heads, DTYPE, CPU, WINDOWS, graph_sizes=graph_sizes, **settings)


def check_steps(
    heads: Heads, prefill: str, seed: int, num_decode: int, num_prefill: int, plans: list[str], steps: int = 3
) -> None:
    rng = np.random.default_rng(seed)
    mine, reference = filled_pool(seed, heads), filled_pool(seed, heads)
    ours = backend(mine, heads, graph_sizes=(4,), prefill=prefill)
    sdpa = TorchSdpa(reference, DTYPE, CPU, WINDOWS)
    for _ in range(steps):
        rows, table = random_step(rng, num_decode, num_prefill)
        helpers_flashinfer.log.clear()
        ours.prepare(rows, table)
        sdpa.prepare(rows, table)
        assert helpers_flashinfer.log == [plan for plan in plans for _ in set(WINDOWS)]
        merged = torch.randn(len(rows.out_loc), heads.query + 2 * heads.kv, heads.dim, dtype=DTYPE)
        q, k, v = merged.split((heads.query, heads.kv, heads.kv), 1)
        for layer in range(2):
            assert torch.allclose(ours.attend(layer, q, k, v), sdpa.attend(layer, q, k, v), atol=5e-3)
    assert all(map(torch.equal, (*mine.k, *mine.v), (*reference.k, *reference.v)))


@pytest.mark.parametrize(
    ("num_decode", "num_prefill", "plans"),
    [
        (5, 0, ["decode 5 eager"]),
        (4, 0, ["decode 4 graph"]),
        (0, 3, ["prefill 3"]),
        (4, 2, ["decode 4 eager", "prefill 2"]),
    ],
)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("heads", [HEADS, TENSOR_CORES, GROUP_OF_THREE], ids=["pairs", "tensor-cores", "threes"])
def test_it_attends_as_torch_does(
    waits: list[int], heads: Heads, seed: int, num_decode: int, num_prefill: int, plans: list[str]
) -> None:
    check_steps(heads, "fa2", seed, num_decode, num_prefill, plans)


def test_fa3_takes_prefill_and_leaves_decode(waits: list[int]) -> None:
    check_steps(TENSOR_CORES, "fa3", 0, 3, 2, ["decode 3 eager", "prefill 2"])


def test_a_wrapper_is_planned_again_only_after_its_fence(waits: list[int]) -> None:
    ours = backend(filled_pool(0))
    rng = np.random.default_rng(0)
    ours.prepare(*random_step(rng, 3, 0))
    assert not waits
    ours.prepare(*random_step(rng, 0, 3))  # other wrappers
    assert not waits
    ours.prepare(*random_step(rng, 2, 0))
    assert len(waits) == len(set(WINDOWS))


@pytest.mark.parametrize("heads", [HEADS, TENSOR_CORES], ids=["pairs", "tensor-cores"])
def test_what_a_graph_reads_stays_in_place(waits: list[int], heads: Heads) -> None:
    ours = backend(filled_pool(0, heads), heads, graph_sizes=(4,))
    rng = np.random.default_rng(0)
    places = set()
    for _ in range(3):
        ours.prepare(*random_step(rng, 4, 0))
        wrapper = ours._decode[-1].wrapper
        buffers = (wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf)
        places.add(tuple(buffer.data_ptr() for buffer in buffers))
    assert len(places) == 1


def test_the_list_of_pages_is_never_copied(waits: list[int]) -> None:
    """Under graphs, what is planned is the wrapper's own buffer; torch skips the package's copy of it onto itself."""
    ours = backend(filled_pool(0), graph_sizes=(4,))
    ours.prepare(*random_step(np.random.default_rng(0), 4, 0))
    wrapper = ours._decode[-1].wrapper
    assert wrapper._paged_kv_indices_buf.data_ptr() == ours._page_list.data_ptr()


# ---------------------------------------------------------------------------------------------------------- workspace

H200 = 132  # multiprocessors


@pytest.mark.parametrize(
    ("heads", "sizes", "mebibytes"),
    [
        (Heads(16, 8, 128), (1, 256), 128),  # Qwen3-0.6B
        (Heads(32, 8, 128), (1, 256), 128),  # Llama-3.1-8B
        (Heads(64, 8, 128), (1, 256), 193),  # Qwen3-32B
        (Heads(64, 8, 128), (1, 512), 387),
        (Heads(64, 8, 128), (), 134),
        (Heads(64, 1, 128), (), 1065),
        (Heads(9, 3, 64), (1, 256), 128),  # SmolLM2-135M
    ],
)
def test_workspace_holds_the_largest_plan(heads: Heads, sizes: tuple[int, ...], mebibytes: int) -> None:
    assert -(-workspace_bytes(heads, H200, sizes) // 2**20) == mebibytes


# ----------------------------------------------------------------------------------------------------------- sampling


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    made = helpers_flashinfer.module()
    monkeypatch.setitem(sys.modules, "flashinfer", made)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", made.sampling)


def random_rows(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    probabilities = torch.from_numpy(rng.standard_normal((16, 300)).astype(np.float32) * 3).softmax(-1)
    probabilities[::3] = probabilities[::3].masked_fill(probabilities[::3] < 0.01, 0.0)  # min_p was here
    top_k = torch.from_numpy(rng.choice([-1, 1, 5, 299, 300, 10_000], 16))
    top_p = torch.from_numpy(rng.choice([1.0, 0.9, 0.3], 16).astype(np.float32))
    return probabilities, top_k, top_p


@pytest.mark.parametrize("seed", range(5))
def test_what_stays_is_what_the_host_leaves(sampling: None, seed: int) -> None:
    """And as it was: a row draws the same whatever the kernels scale by."""
    probabilities, top_k, top_p = random_rows(seed)
    assert torch.equal(renormalise(probabilities, top_k, top_p), sampler.truncate(probabilities, top_k, top_p))


def test_numbers_that_are_none_end_at_the_first_kernel(sampling: None) -> None:
    probabilities, top_k, top_p = random_rows(0)
    probabilities[4] = float("nan")
    left = renormalise(probabilities, top_k, top_p)
    assert not left[4].any()
    others = torch.arange(16) != 4
    assert torch.equal(left[others], sampler.truncate(probabilities, top_k, top_p)[others])
