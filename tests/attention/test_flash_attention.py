"""What the flash-attn backend asks of the package, on a stand-in with its calls (2.x): it attends as torch does, and
what a graph reads stays in place."""

from __future__ import annotations

import sys

import pytest
import torch

from minisgl.attention.flash_attention import FlashAttention
from minisgl.attention.flashinfer import Heads
from minisgl.engine.graphs import RunAgain
from tests.helpers.attention import Rig
from tests.helpers.flash_attention import calls, module

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 8)
PAGE, COLUMNS, WINDOWS = 256, 3, (None, 300)
WITHIN = 1e-4


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", module())
    calls.clear()


def rig(seed: int) -> tuple[Rig, FlashAttention]:
    made = Rig(CPU, HEADS, torch.float32, windows=WINDOWS, page_size=PAGE, columns=COLUMNS, seed=seed)
    return made, FlashAttention(made.pool, CPU, WINDOWS, max_pages_per_row=COLUMNS, graph_sizes=(2, 4))


@pytest.mark.parametrize(
    ("num_decode", "num_prefill", "name"),
    [(5, 0, "with_kvcache"), (4, 0, "with_kvcache"), (0, 3, "varlen"), (3, 2, "varlen")],
)
@pytest.mark.parametrize("seed", range(3))
def test_attention_equals_torch_sdpa(seed: int, num_decode: int, num_prefill: int, name: str) -> None:
    mine, ours = rig(seed)
    for _ in range(3):
        step = mine.step(num_decode, num_prefill)
        calls.clear()
        mine.check(ours, step, WITHIN)
        widest = COLUMNS if num_decode == 4 else -(-int(step[0].seq_lens.max()) // PAGE)
        assert calls == [(name, (num_decode + num_prefill, widest))] * 2


def test_a_graph_attends_to_the_rows_of_its_step() -> None:
    mine, ours = rig(0)
    mine.check_graph(ours, RunAgain, 4, WITHIN, ((1, 1), (1, 700), (600, 768), (1, 3)))


def test_a_graphs_tensors_lie_where_they_lay() -> None:
    """A graph calls the kernels again with the tensors of its capture, whatever the backend holds by then."""
    mine, ours = rig(0)
    places = set()
    for num_decode, num_prefill in ((4, 0), (2, 0), (1, 2), (4, 0)):
        ours.prepare(*mine.step(num_decode, num_prefill))
        if num_decode == 4:
            places.add(tuple(ours._step[name].data_ptr() for name in ("cache_seqlens", "block_table")))
    assert len(places) == 1
