"""What the FlashInfer backend asks of the package, on a stand-in with the same calls: it attends as torch does."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.attention import AttentionRows, KVPool, TorchSdpa, flashinfer
from minisgl.attention.api import RowsThere
from minisgl.attention.flashinfer import FlashInfer, Heads
from tests import helpers_flashinfer

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 8)
PAGE, COLUMNS, WINDOWS = 4, 6, (None, 5)


class Fence:
    def __init__(self, waits: list[int]) -> None:
        self._waits = waits

    def synchronize(self) -> None:
        self._waits.append(1)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setitem(sys.modules, "flashinfer", helpers_flashinfer.module())
    monkeypatch.setattr(flashinfer, "_fence", lambda: Fence(found))
    helpers_flashinfer.log.clear()
    return found


def filled_pool(seed: int) -> KVPool:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"num_kv_heads": HEADS.kv, "head_dim": HEADS.dim, "dtype": torch.float32, "device": CPU}
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
    there = RowsThere(*(torch.from_numpy(array) for array in (slots, indptr, places)))
    return AttentionRows(num_decode, slots, seq_lens, extend_lens, places, there), table


def backend(pool: KVPool, graph_sizes: tuple[int, ...] = ()) -> FlashInfer:
    return FlashInfer(
        pool, HEADS, torch.float32, CPU, WINDOWS, max_rows=8, max_pages_per_row=COLUMNS, graph_sizes=graph_sizes
    )


@pytest.mark.parametrize(
    ("num_decode", "num_prefill", "plans"),
    [
        (5, 0, ["decode 5 eager"]),
        (4, 0, ["decode 4 graph"]),
        (0, 3, ["prefill 3"]),
        (4, 2, ["decode 4 eager", "prefill 2"]),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_it_attends_as_torch_does(
    waits: list[int], seed: int, num_decode: int, num_prefill: int, plans: list[str]
) -> None:
    rng = np.random.default_rng(seed)
    mine, reference = filled_pool(seed), filled_pool(seed)
    ours = backend(mine, graph_sizes=(4,))
    sdpa = TorchSdpa(reference, torch.float32, CPU, WINDOWS)
    for _ in range(3):
        rows, table = random_step(rng, num_decode, num_prefill)
        helpers_flashinfer.log.clear()
        ours.prepare(rows, table)
        sdpa.prepare(rows, table)
        assert helpers_flashinfer.log == [plan for plan in plans for _ in set(WINDOWS)]
        merged = torch.randn(len(rows.out_loc), HEADS.query + 2 * HEADS.kv, HEADS.dim)
        q, k, v = merged.split((HEADS.query, HEADS.kv, HEADS.kv), 1)
        for layer in range(2):
            assert torch.allclose(ours.attend(layer, q, k, v), sdpa.attend(layer, q, k, v), atol=1e-5)
    assert all(map(torch.equal, (*mine.k, *mine.v), (*reference.k, *reference.v)))


def test_a_wrapper_is_planned_again_only_after_its_fence(waits: list[int]) -> None:
    ours = backend(filled_pool(0))
    rng = np.random.default_rng(0)
    ours.prepare(*random_step(rng, 3, 0))
    assert not waits
    ours.prepare(*random_step(rng, 0, 3))  # other wrappers
    assert not waits
    ours.prepare(*random_step(rng, 2, 0))
    assert len(waits) == len(set(WINDOWS))


def test_what_a_graph_reads_stays_in_place(waits: list[int]) -> None:
    ours = backend(filled_pool(0), graph_sizes=(4,))
    rng = np.random.default_rng(0)
    places = set()
    for _ in range(3):
        ours.prepare(*random_step(rng, 4, 0))
        wrapper = ours._decode[-1].wrapper
        places.add(tuple(t.data_ptr() for t in (wrapper.indptr, wrapper.indices, wrapper.last_page_len)))
    assert len(places) == 1
