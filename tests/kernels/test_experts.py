"""Routed experts: both forms against a plain loop in float64, the Triton form in Triton's interpreter; a model with it
against transformers; nothing on its way asks the device anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minisgl.kernels import experts, ops
from minisgl.kernels.experts_tiles import Tile, max_blocks, tile_for, tiles
from minisgl.layers.experts import grouped
from tests.helpers.experts import Routed, assert_near, draw
from tests.helpers.models import LOGITS_WITHIN, DenseSequence, load, reference_logits, save, tiny_model
from tests.helpers.triton import interpreted

SMALL = (
    Tile(16, 16, 16, 16, 4, 2),
    Tile(16, 16, 32, 16, 4, 2, alone=True),
    Tile(16, 32, 16, 16, 4, 2),
    Tile(32, 16, 64, 32, 4, 2),
)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


@st.composite
def cases(draws: st.DrawFn) -> tuple[Routed, Tile]:
    def number(low: int, high: int) -> int:
        return draws(st.integers(low, high))

    dtype = draws(st.sampled_from(DTYPES))
    count = number(1, 9)
    routed = draw(
        number(0, 2**32),
        tokens=number(0, 24),
        experts=count,
        per_token=draws(st.sampled_from([1, min(2, count), count])),
        hidden=number(2, 50),
        inner=number(0, 40),
        dtype=dtype,
        favourites=draws(st.sampled_from([None, 1, 2])),
    )
    return routed, draws(st.sampled_from([*SMALL, tiles(dtype)[1]]))


def once(max_examples: int) -> Callable[[Any], Any]:
    return settings(max_examples=max_examples, deadline=None, derandomize=True, database=None)


@once(60)
@given(cases())
def test_grouped_experts_equal_a_loop_over_tokens(case: tuple[Routed, Tile]) -> None:
    assert_near(grouped(*case[0].inputs()), case[0])


@once(200)
@given(st.integers(0, 300), st.integers(1, 20), st.sampled_from([1, 16, 64]), st.integers(0, 2**32))
def test_blocks_suffice_and_not_one_too_many(uses: int, count: int, block_m: int, seed: int) -> None:
    chosen = torch.randint(0, count, (uses,), generator=torch.Generator().manual_seed(seed))
    most = max_blocks(uses, count, block_m)
    assert int((-(-chosen.bincount(minlength=count) // block_m)).sum()) <= most
    worst = torch.zeros(count, dtype=torch.int64)
    worst[: min(uses, count)] = 1
    worst[0] += uses - worst.sum()  # one in each expert, the rest in one
    assert most - 1 <= int((-(-worst // block_m)).sum()) <= most


def test_more_uses_larger_blocks() -> None:
    sizes = [tile_for(n * 8, 128, torch.bfloat16).block_m for n in (1, 64, 256, 512, 1024, 4096, 8192)]
    assert sizes == sorted(sizes)
    assert {sizes[0], sizes[-1]} == {16, 128}
    assert tile_for(8192 * 8, 128, torch.float32) == tiles(torch.float32)[1]
    assert [tile_for(n * 8, 128, torch.bfloat16).alone for n in (1, 4, 5, 8192)] == [True, True, False, False]


def test_a_device_with_little_shared_memory_has_no_large_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        shared_memory_per_block_optin = 99 * 1024  # sm_89

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    device = torch.device("cuda", 7)
    assert [tile.block_m for tile in tiles(torch.bfloat16, device)] == [16, 16, 64]
    assert tile_for(8192 * 8, 128, torch.bfloat16, device).block_m == 64
    assert tiles(torch.float32, device) == tiles(torch.float32)
    tiles.cache_clear()


# ------------------------------------------------------------------------------------------ in Triton's interpreter


@once(25)
@given(cases())
def fused_is_the_plain_loop(case: tuple[Routed, Tile]) -> None:
    routed, tile = case
    assert_near(experts.run(*routed.inputs(), tile), routed)


@once(10)
@example(tokens=600, count=5, per_token=4, block_m=16, seed=0)  # looked at in three parts
@given(st.integers(1, 700), st.integers(1, 20), st.integers(1, 4), st.sampled_from([16, 64]), st.integers(0, 2**32))
def uses_are_dealt_in_order(tokens: int, count: int, per_token: int, block_m: int, seed: int) -> None:
    """More uses than are looked at together; each stands once, in a block of its expert, after those before it."""
    from minisgl.kernels import experts_triton

    shape = (tokens, min(per_token, count))
    chosen = torch.randint(0, count, shape, generator=torch.Generator().manual_seed(seed))
    uses, owners = experts_triton.assign_uses(chosen, count, block_m)
    flat, expected, blocks = chosen.flatten().tolist(), list[int](), list[int]()
    for expert in range(count):
        mine = [use for use, choice in enumerate(flat) if choice == expert]
        mine += [len(flat)] * (-len(mine) % block_m)
        expected += mine
        blocks += [expert] * (len(mine) // block_m)
    assert uses[: len(expected)].tolist() == expected
    assert owners.tolist() == blocks + [-1] * (len(owners) - len(blocks))


def a_row_is_the_same_in_any_batch() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        routed = draw(5, tokens=20, experts=6, per_token=2, hidden=48, inner=40, dtype=dtype)
        whole = experts.run(*routed.inputs(), SMALL[0])
        for tokens in (slice(0, 1), slice(7, 18)):
            assert torch.equal(experts.run(*routed.of_tokens(tokens).inputs(), SMALL[0]), whole[tokens])


def a_model_is_that_of_transformers(folder: Path) -> None:
    experts.serves = ops.serves = lambda weight: True
    calls = []
    run = experts.run
    experts.run = lambda *inputs: calls.append(len(inputs[0])) or run(*inputs)  # type: ignore[func-returns-value]
    ids = list(range(3, 34))
    reference = tiny_model("qwen3-moe", num_hidden_layers=2)
    sequence = DenseSequence(load(save(reference, folder)))
    ours = torch.cat([sequence.extend(ids[:20]), sequence.extend(ids[20:30]), sequence.extend(ids[30:])])
    torch.testing.assert_close(ours, reference_logits(reference, ids), rtol=0, atol=LOGITS_WITHIN)
    assert calls == [20] * 2 + [10] * 2 + [1] * 2


def shards_add_up() -> None:
    """Ranks with equal and with unequal parts of an expert, and one with nothing."""
    routed = draw(3, tokens=9, experts=4, per_token=2, hidden=32, inner=20)
    x, gate_up, down, chosen, shares = routed.inputs()
    total = torch.zeros_like(x)
    for part in (slice(0, 8), slice(8, 16), slice(16, 20), slice(20, 20)):
        both = torch.cat((gate_up[:, :20][:, part], gate_up[:, 20:][:, part]), 1)
        total += experts.run(x, both, down[..., part].contiguous(), chosen, shares)
    assert_near(total, routed)


@once(25)
@given(st.integers(1, 40), st.integers(0, 9), st.integers(0, 2**32), st.booleans(), st.data())
def routes_are_the_plain_ones(count: int, tokens: int, seed: int, normalise: bool, data: st.DataObject) -> None:
    """Of logits that are often equal: then the lower number is chosen first."""
    per_token = data.draw(st.integers(1, count))
    logits = torch.randint(-9, 9, (tokens, count), generator=torch.Generator().manual_seed(seed)) / 4.0
    chosen, shares = ops.route(logits, per_token, normalise=normalise)
    order = logits.argsort(dim=-1, descending=True, stable=True)[:, :per_token]
    assert torch.equal(chosen.long(), order)
    expected = logits.double().softmax(-1).gather(1, order)
    if normalise:
        expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(shares.double(), expected, rtol=1e-5, atol=1e-7)
    assert shares.dtype is logits.dtype


@once(60)
@given(st.integers(1, 9), st.integers(0, 9), st.booleans(), st.integers(0, 2**32))
def test_routes_in_torch(per_token: int, tokens: int, normalise: bool, seed: int) -> None:
    logits = torch.randn(tokens, 9, generator=torch.Generator().manual_seed(seed))
    chosen, shares = ops.route(logits, per_token, normalise=normalise)
    probabilities = logits.softmax(-1).gather(1, chosen)
    assert torch.equal(chosen, logits.argsort(-1, descending=True)[:, :per_token])
    expected = probabilities / probabilities.sum(-1, keepdim=True) if normalise else probabilities
    torch.testing.assert_close(shares, expected)


def choices_are_experts_whatever_the_logits() -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        logits = torch.randn(4, 7)
        logits[1, 3], logits[2], logits[3, 1:] = bad, bad, bad
        chosen, _ = ops.route(logits, 3, normalise=True)
        assert ((chosen >= 0) & (chosen < 7)).all()


@pytest.mark.slow
def test_triton_forms_in_the_interpreter(tmp_path: Path) -> None:
    program = (
        "import pathlib\n"
        "from minisgl.kernels import ops\n"
        "from tests.kernels import test_experts as tests\n"
        "from tests.helpers.triton import let_products_be_plain\n"
        "let_products_be_plain()\n"
        "tests.fused_is_the_plain_loop()\n"
        "tests.uses_are_dealt_in_order()\n"
        "tests.a_row_is_the_same_in_any_batch()\n"
        "tests.shards_add_up()\n"
        f"tests.a_model_is_that_of_transformers(pathlib.Path({str(tmp_path)!r}))\n"
        "ops.serves = lambda logits: True\n"
        "tests.routes_are_the_plain_ones()\n"
        "tests.choices_are_experts_whatever_the_logits()\n"
        "print('same')"
    )
    assert interpreted(program) == "same\n"
