"""What the CUDA engine is made of, each on the CPU: page table, KV store, packed steps, sampling, choices at start."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.attention import TorchSdpa
from minisgl.attention.backend import BACKENDS, BackendError, Choice, Machine, Shape, choose
from minisgl.attention.flash_attention import FlashAttention
from minisgl.attention.flashinfer import FlashInfer
from minisgl.cli.flags import add_engine_arguments
from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.api import SlotBinding
from minisgl.engine.cuda_loading import check_device, graphs_for, num_pages
from minisgl.engine.device_buffers import Layout, StepInputs, pack
from minisgl.engine.device_sampler import DeviceSampler
from minisgl.engine.graph import Outputs, capture_all, graph_sizes
from minisgl.engine.sampler import SamplingRows, sample
from minisgl.kernels import kv_store, pages
from minisgl.sampling_params import SamplingParams
from minisgl.step import RingEntry, StepLimits, StepPlan
from tests.helpers.triton import interpreted

CPU = torch.device("cpu")
EXAMPLES = settings(max_examples=60, deadline=None)


# ---------------------------------------------------------------------------------------------------------- kernels


def table_case(seed: int) -> dict[str, Any]:
    """A table, changes of distinct slots, and rows to gather; with what plain Python makes of them."""
    rng = np.random.default_rng(seed)
    slots, columns = int(rng.integers(1, 9)), int(rng.integers(1, 600))
    table = rng.integers(0, 1000, (slots, columns)).astype(np.int32)
    updates, page_ids, expected = [], [], table.copy()
    for slot in rng.permutation(slots)[: int(rng.integers(0, slots + 1))].tolist():
        first = int(rng.integers(0, columns))
        count = int(rng.integers(0, columns - first + 1))
        new = rng.integers(1000, 2000, count).tolist()
        updates.append((slot, first, count, len(page_ids)))
        for i, page in enumerate(new):
            expected[slot, first + i] = page
        page_ids += new
    rows = rng.integers(0, slots, int(rng.integers(0, 7))).astype(np.int32)
    counts = rng.integers(0, columns + 1, len(rows))
    gathered = [int(p) for slot, count in zip(rows, counts, strict=True) for p in expected[slot, :count]]
    return {
        "table": torch.from_numpy(table),
        "updates": torch.tensor(updates, dtype=torch.int32).reshape(-1, 4),
        "page_ids": torch.tensor(page_ids, dtype=torch.int32),
        "expected": torch.from_numpy(expected),
        "slots": torch.from_numpy(rows),
        "indptr": torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
        "gathered": torch.tensor(gathered, dtype=torch.int32),
    }


def check_tables(module: Any, seed: int) -> None:
    case = table_case(seed)
    if len(case["updates"]):
        module.apply_updates(case["table"], case["updates"], case["page_ids"])
    assert torch.equal(case["table"], case["expected"])
    out = torch.full_like(case["gathered"], -1)
    if len(case["slots"]):
        module.gather_pages(case["table"], case["slots"], case["indptr"], out)
    assert torch.equal(out, case["gathered"])


def check_store(module: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, heads, dim = int(rng.integers(1, 9)), int(rng.integers(1, 4)), int(rng.choice([3, 8, 24]))
    merged = torch.from_numpy(rng.standard_normal((tokens, 2 * heads + 1, dim)).astype(np.float32))
    k, v = merged[:, :heads], merged[:, heads : 2 * heads]
    pools = [torch.zeros(20, heads, dim), torch.zeros(20, heads, dim)]
    expected = [pool.clone() for pool in pools]
    places = torch.from_numpy(rng.permutation(20)[:tokens].astype(np.int32))
    for token, place in enumerate(places.tolist()):
        expected[0][place], expected[1][place] = k[token], v[token]
    module.store_kv(*pools, places, k, v)
    assert all(map(torch.equal, pools, expected))


@EXAMPLES
@given(st.integers(0, 2**32))
def test_page_table_in_torch_is_that_of_plain_python(seed: int) -> None:
    check_tables(pages, seed)


@EXAMPLES
@given(st.integers(0, 2**32))
def test_kv_store_in_torch(seed: int) -> None:
    check_store(kv_store, seed)


def test_triton_kernels_do_the_same_in_the_interpreter() -> None:
    program = (
        "from minisgl.kernels import kv_store_triton, pages_triton\n"
        "from tests.engine import test_device_pieces as tests\n"
        "for seed in range(25): tests.check_tables(pages_triton, seed); tests.check_store(kv_store_triton, seed)\n"
        "print('same')"
    )
    assert interpreted(program) == "same\n"


# ----------------------------------------------------------------------------------------------------------- blocks


def binding(slot: int, **sampling: Any) -> SlotBinding:
    return SlotBinding(slot, slot, SamplingParams(**sampling), np.zeros(1, np.int32), 1)


@EXAMPLES
@given(st.integers(0, 2**32))
def test_what_is_packed_is_what_a_step_reads(seed: int) -> None:
    rng = np.random.default_rng(seed)
    limits = StepLimits(max_rows=5, max_tokens=17, page_size=4, num_pages=30, max_seq_len=64)
    entry = RingEntry(limits, 8)
    for name in RingEntry.__slots__:
        array = getattr(entry, name)
        array[...] = rng.integers(0, 50, array.shape)
    rows = int(rng.integers(0, 6))
    plan = StepPlan(
        num_rows=rows,
        padded_rows=rows + int(rng.integers(0, 3)),
        num_tokens=rows + int(rng.integers(0, 8)),
        num_samples=int(rng.integers(0, rows + 1)),
        num_page_table_updates=int(rng.integers(0, rows + 1)),
        num_page_ids=int(rng.integers(0, 9)),
    )
    bound = [binding(i, seed=int(rng.integers(-(2**63), 2**63)), top_k=2**40 if i else -1) for i in range(rows)]
    layout = Layout.of(plan, len(bound))
    largest = Layout.largest(limits, 8)
    assert layout.size <= largest.size
    block = np.full(largest.size, -7, np.int32)
    pack(block, layout, entry, bound)
    assert (block[layout.size :] == -7).all()
    inputs = StepInputs(torch.from_numpy(block), layout)
    tokens = plan.num_tokens + plan.padded_rows - plan.num_rows
    sizes = {"input_ids": tokens, "positions": tokens, "out_loc": tokens}
    sizes |= dict.fromkeys(("req_slots", "seq_lens", "last_page_len"), plan.padded_rows)
    sizes |= dict.fromkeys(("qo_indptr", "kv_indptr"), plan.padded_rows + 1)
    sizes |= {"sample_rows": plan.num_samples, "page_ids": plan.num_page_ids}
    for name, size in sizes.items():
        assert getattr(inputs, name).tolist() == getattr(entry, name)[:size].tolist(), name
    starts = 0
    for mine, theirs in zip(inputs.page_table_updates.tolist(), entry.page_table_updates.tolist(), strict=False):
        assert mine == [*theirs, starts]
        starts += theirs[2]


def test_fields_that_a_graph_reads_lie_where_the_size_says() -> None:
    """Whatever else a step carries."""
    plain, full = Layout(8, 8).fields(), Layout(8, 8, 5, 3, 9, 4).fields()
    for name in ("input_ids", "positions", "out_loc", "req_slots", "seq_lens", "kv_indptr"):
        assert plain[name] == full[name]


# --------------------------------------------------------------------------------------------------------- sampling


def bind_all(sampler: DeviceSampler, params: Sequence[SamplingParams], place: torch.device) -> None:
    """Slot i gets `params[i]`, by a packed step."""
    rows = len(params)
    bound = [SlotBinding(i, i, one, np.zeros(1, np.int32), 1) for i, one in enumerate(params)]
    layout = Layout.of(StepPlan(num_assigned=rows), rows)
    block = np.zeros(layout.size, np.int32)
    limits = StepLimits(max_rows=rows, max_tokens=1, page_size=1, num_pages=1, max_seq_len=2)
    pack(block, layout, RingEntry(limits, rows), bound)
    sampler.remember(bound)
    sampler.bind(StepInputs(torch.from_numpy(block).to(place), layout).bound)


@pytest.mark.parametrize("seed", range(8))
def test_device_sampling_gives_the_hosts_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, vocab = 24, 300
    logits = torch.from_numpy(rng.standard_normal((rows, vocab)).astype(np.float32) * 3)
    bound = [
        binding(
            slot,
            temperature=float(rng.choice([0.0, 0.5, 1.7])),
            top_k=int(rng.choice([-1, 1, 7, 1000])),
            top_p=float(rng.choice([1.0, 0.6])),
            min_p=float(rng.choice([0.0, 0.1])),
            seed=int(rng.integers(-(2**63), 2**63)),
        )
        for slot in range(rows)
    ]
    slots = rng.permutation(rows).astype(np.int32)
    position = torch.from_numpy(rng.integers(0, 1000, rows))
    sampler = DeviceSampler(rows + 1, CPU)
    bind_all(sampler, [one.sampling for one in bound], CPU)
    slots_device = torch.from_numpy(slots).long()
    got = sampler.sample(logits, slots_device, position, sampler.needs(slots))
    params = [bound[slot].sampling for slot in slots.tolist()]
    host = SamplingRows(
        torch.tensor([p.temperature for p in params]),
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.min_p for p in params]),
        torch.tensor([p.seed for p in params]),
        position,
    )
    assert got.tolist() == sample(logits, host).tolist()
    one = sampler.sample(logits[3:4], slots_device[3:4], position[3:4], sampler.needs(slots[3:4]))
    assert one.tolist() == got[3:4].tolist()


def test_rows_of_nan_give_an_id_of_the_vocabulary() -> None:
    sampler = DeviceSampler(2, CPU)
    bound = [binding(0, temperature=1.0, seed=1)]
    sampler.remember(bound)
    sampler._floats[0] = torch.tensor([1.0, 1.0, 0.0])
    slots = np.zeros(1, np.int32)
    chosen = sampler.sample(
        torch.full((1, 9), float("nan")), torch.zeros(1).long(), torch.ones(1).long(), sampler.needs(slots)
    )
    assert 0 <= int(chosen) < 9


# ---------------------------------------------------------------------------------------------------------- choices

H200 = Machine("cuda", (9, 0), frozenset({"flashinfer", "flash_attention"}))
QWEN3 = Shape(torch.bfloat16, 128, 16, (None, None))


@pytest.mark.parametrize(
    ("machine", "shape", "name", "reason"),
    [
        (H200, QWEN3, "flashinfer", "fastest"),
        (Machine("cuda", (9, 0), frozenset()), QWEN3, "torch_sdpa", "pip install flashinfer-python"),
        (H200, Shape(torch.float32, 128, 16), "torch_sdpa", "float16 or bfloat16"),
        (H200, Shape(torch.bfloat16, 80, 16), "torch_sdpa", "head_dim 80"),
        (H200, Shape(torch.bfloat16, 80, 256), "flash_attention", "not flashinfer: head_dim 80"),
        (Machine("cuda", (7, 5), H200.installed), QWEN3, "torch_sdpa", "capability 8.0, and this device has 7.5"),
        (Machine("cpu", (0, 0), H200.installed), QWEN3, "torch_sdpa", "needs a CUDA device"),
    ],
)
def test_auto_says_why(machine: Machine, shape: Shape, name: str, reason: str) -> None:
    choice = choose("auto", machine, shape)
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("asked", "machine", "shape", "says"),
    [
        ("flashinfer", Machine("cuda", (9, 0), frozenset()), QWEN3, "not installed: pip install flashinfer-python"),
        ("flash_attention", H200, QWEN3, "--page-size 16 is no multiple of 256"),
        ("flash_attention", Machine("cuda", (9, 0), frozenset()), QWEN3, "pip install flash-attn"),
        ("flashinfer", Machine("cpu", (0, 0), frozenset()), QWEN3, "needs a CUDA device, and this is cpu"),
        ("flashinfer:fa3", Machine("cuda", (8, 9), H200.installed), QWEN3, "fa3 needs .* 9.0, .* 8.9: use flashinfer"),
        ("flashinfer:fa3", Machine("cuda", (10, 0), H200.installed), QWEN3, "fa3 needs"),
        ("flashinfer:fa3", Machine("cuda", (9, 0), frozenset()), QWEN3, "not installed: pip install flashinfer-python"),
        ("flashinfer:fa3", H200, Shape(torch.float32, 128, 16), "float16 or bfloat16"),
        ("flashinfer:fa3", H200, Shape(torch.bfloat16, 80, 16), "head_dim 80"),
        ("xformers", H200, QWEN3, "choose one of auto, torch_sdpa"),
    ],
)
def test_a_backend_that_cannot_serve_says_what_to_do(asked: str, machine: Machine, shape: Shape, says: str) -> None:
    with pytest.raises(BackendError, match=says):
        choose(asked, machine, shape)


def test_what_was_asked_for_is_taken() -> None:
    for name in ("torch_sdpa", "flashinfer"):
        assert choose(name, H200, QWEN3).name == name


def test_fa3_is_taken_only_if_asked_for() -> None:
    assert choose("flashinfer:fa3", H200, QWEN3) == Choice("flashinfer", "asked for", "fa3")
    for asked in ("auto", "flashinfer"):
        choice = choose(asked, H200, QWEN3)
        assert (choice.name, choice.prefill) == ("flashinfer", "fa2")
        assert "flashinfer:fa3" in choice.reason
    older = choose("auto", Machine("cuda", (8, 0), H200.installed), QWEN3)
    assert older.prefill == "fa2" and "fa3" not in older.reason


def test_every_backend_can_be_asked_for_by_flag() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    for name in BACKENDS:
        assert parser.parse_args(["--attention-backend", name]).attention_backend == name


@pytest.mark.parametrize(
    ("max_bs", "max_rows", "sizes"),
    [
        (None, 64, (1, 2, 4, 8, 16, 32, 48, 64)),
        (None, 5, (1, 2, 4, 5)),
        (20, 64, (1, 2, 4, 8, 16, 20)),
        (1, 64, (1,)),
        (0, 64, ()),
        (None, 4096, (1, 2, 4, 8, *range(16, 257, 16))),
    ],
)
def test_graph_sizes(max_bs: int | None, max_rows: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_bs, max_rows) == sizes


def test_graphs_are_captured_largest_first_and_told() -> None:
    order: list[int] = []
    lines: list[str] = []
    free = iter([900 * 2**20, 400 * 2**20])

    def forward_of(size: int) -> Any:
        order.append(size)
        return lambda: Outputs(torch.zeros(size, 3), torch.ones(1))

    graphs = capture_all(
        (1, 4, 2),
        forward_of,
        lambda forward: forward(),
        lambda text, done=0, total=0: lines.append(f"{text} {done}/{total}"),
        lambda: next(free),
    )
    assert order == [4, 2, 1]
    assert sorted(graphs) == [1, 2, 4]
    assert lines[:3] == [f"capturing CUDA graphs {i}/3" for i in (1, 2, 3)]
    assert lines[3].startswith("CUDA graphs: 3 sizes up to 4, 500 MiB")


def test_without_a_backend_for_them_there_are_no_graphs() -> None:
    lines: list[str] = []

    class Dense:
        moe = None

    config = EngineConfig(max_running_requests=4)
    tell = lambda text, done=0, total=0: lines.append(text)  # noqa: E731
    for can in (FlashInfer, FlashAttention):
        assert graphs_for(config, Dense(), can, tell) == (1, 2, 4)  # type: ignore[arg-type]
    assert not lines
    assert graphs_for(config, Dense(), TorchSdpa, tell) == ()  # type: ignore[arg-type]
    assert lines == [f"CUDA graphs: none: TorchSdpa: {TorchSdpa.graph_obstacle}"]


def test_mixtures_of_experts_have_graphs_where_their_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    class Mixture:
        moe = "experts"

    config = EngineConfig(max_running_requests=4)
    tell = lambda text, done=0, total=0: lines.append(text)  # noqa: E731
    monkeypatch.setattr("minisgl.engine.cuda_loading.triton_is_installed", lambda: True)
    assert graphs_for(config, Mixture(), FlashInfer, tell) == (1, 2, 4)  # type: ignore[arg-type]
    assert not lines
    monkeypatch.setattr("minisgl.engine.cuda_loading.triton_is_installed", lambda: False)
    assert graphs_for(config, Mixture(), FlashInfer, tell) == ()  # type: ignore[arg-type]
    assert lines == ["CUDA graphs: none: without Triton the host looks at which experts a step uses"]


def test_pool_from_free_memory() -> None:
    config = EngineConfig(max_running_requests=1000)
    assert num_pages(config, 1000, 10**6, 10_000_000) == 8500
    assert num_pages(EngineConfig(memory_ratio=0.5), 1000, 10**6, 10_000_000) == 5000
    assert num_pages(EngineConfig(max_running_requests=2), 1000, 64, 10_000_000) == 8  # no more than rows can use
    assert num_pages(EngineConfig(num_pages=7), 1000, 64, 7000) == 7


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (EngineConfig(num_pages=8), r"--num-pages 8: .* at most 7 pages fit"),
        (EngineConfig(memory_ratio=0.1), r"--memory-ratio 0.1: .* raise it"),
    ],
)
def test_a_pool_that_does_not_fit_names_the_flag(config: EngineConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        num_pages(config, 1000, 64, 7000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: .*use --device cpu"):
        check_device("cuda")
