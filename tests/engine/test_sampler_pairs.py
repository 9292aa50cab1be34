"""The CPU engine's sampler against the torch engine's: the same assignments and logits, step by step.

Tokens are equal, changed logits equal number by number, log probabilities within 1e-5 (over a large vocabulary torch's
own are that far from float64). Probabilities differ by a common factor and a few units in the last place: a token could
differ only where a draw falls between two sums that differ by as much. Of 200,000 draws from logits like a language
model's 2 did, each within 5e-9 of the sum; of torch's own with AVX2 and with AVX-512 3 differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl._rust import CpuSampler
from minisgl.engine.api import SlotAssignment
from minisgl.sampling_params import SamplingParams
from minisgl.step import Int32Array
from tests.helpers.samplers import Logprobs, RustSampler, TorchSampler, assignment

pytestmark = pytest.mark.any_cpu
SLOTS = 3
EOS = (0, 2)


@dataclass(frozen=True)
class Scenario:
    vocab_size: int
    steps: list[tuple[list[SlotAssignment], int]]  # assignments before a step, and the seed of its logits and masks


def mostly(value: object, other: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(st.just(value), other)


@st.composite
def sampling(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    token = st.integers(0, vocab_size - 1)
    some = st.lists(token, max_size=6).map(tuple)
    fields = {
        "temperature": mostly(1.0, st.one_of(st.just(0.0), st.floats(1e-3, 2.0))),
        "top_k": mostly(-1, st.integers(1, 2 * vocab_size)),
        "top_p": mostly(1.0, st.floats(0.0, 1.0)),
        "min_p": mostly(0.0, st.floats(0.0, 1.0)),
        "frequency_penalty": mostly(0.0, st.floats(-2.0, 2.0)),
        "presence_penalty": mostly(0.0, st.floats(-2.0, 2.0)),
        "repetition_penalty": mostly(1.0, st.floats(0.05, 10.0)),
        "logit_bias": st.dictionaries(token, st.floats(-100.0, 100.0), max_size=3),
        "allowed_token_ids": mostly((), some),
        "bad_token_ids": st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
        "min_tokens": mostly(0, st.integers(0, 12)),
        "stop_token_ids": some,
        "ignore_eos": st.booleans(),
        "logprobs": mostly(None, st.integers(0, 20)),
        "seed": st.integers(-(2**63), 2**63 - 1),
    }
    return SamplingParams(max_tokens=100, **draw(st.fixed_dictionaries(fields))).check()  # type: ignore[arg-type]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    vocab_size = draw(st.one_of(st.integers(3, 12), st.integers(13, 600)))
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=8)
    one = st.builds(assignment, st.integers(0, SLOTS - 1), sampling(vocab_size), st.just([1]), tokens)
    first = [assignment(slot, draw(sampling(vocab_size)), [1, *draw(tokens)], draw(tokens)) for slot in range(SLOTS)]
    later = draw(st.lists(st.tuples(mostly([], st.lists(one, max_size=2)), st.integers(0, 2**32 - 1)), max_size=8))
    return Scenario(vocab_size, [(first, draw(st.integers(0, 2**32 - 1))), *later])  # type: ignore[list-item]


def logits_of(seed: int, vocab_size: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Of one spread or another; some on a coarse grid, so that there are ties."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((SLOTS, vocab_size)) * rng.choice([0.1, 1.0, 4.0, 20.0])
    if seed % 3 == 0:
        logits = np.round(logits)
    return logits.astype(np.float32)


def masks_of(seed: int, vocab_size: int, asked: list[SamplingParams]) -> list[Int32Array | None] | None:
    """Of no row, or of some: of many tokens or of few, with words that are full and words that are empty."""
    rng = np.random.default_rng(seed + 1)
    if seed % 2:
        return None
    masks: list[Int32Array | None] = []
    for asks in asked:
        if asks.allowed_token_ids:  # never beside a grammar: together they may leave nothing
            masks.append(None)
            continue
        may = rng.random(vocab_size) < rng.choice([0.0, 0.02, 0.5, 0.98, 1.0])
        may[rng.integers(vocab_size)] = True
        packed = np.packbits(may, bitorder="little")
        words = np.zeros(-(-vocab_size // 32), np.int32)
        words.view(np.uint8)[: len(packed)] = packed
        masks.append(words if rng.random() < 0.7 else None)
    return masks


def check_logprobs(ours: Logprobs | None, theirs: Logprobs | None, within: float = 1e-5) -> None:
    if ours is None or theirs is None:
        assert ours is theirs is None
        return
    assert ours[0] == pytest.approx(theirs[0], abs=within, rel=1e-6)
    assert ours[2] == pytest.approx(theirs[2], abs=within, rel=1e-6)
    values = np.array(theirs[2])
    alone = [i for i in range(len(values)) if np.sum(abs(values - values[i]) < 1e-5) == 1][:-1]  # the last may tie
    assert [ours[1][i] for i in alone] == [theirs[1][i] for i in alone]
    assert len(set(ours[1])) == len(ours[1])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(scenarios())
def test_both_samplers_draw_the_same(scenario: Scenario) -> None:
    theirs = TorchSampler(SLOTS, scenario.vocab_size, EOS)
    ours = RustSampler(SLOTS, scenario.vocab_size, EOS)
    position = [0] * SLOTS
    asked = [SamplingParams()] * SLOTS
    for assignments, seed in scenario.steps:
        for one in assignments:
            theirs.assign(one)
            ours.assign(one)
            position[one.slot], asked[one.slot] = len(one.tokens), one.sampling
        logits, masks = logits_of(seed, scenario.vocab_size), masks_of(seed, scenario.vocab_size, asked)
        expected = theirs.step(logits, range(SLOTS), position, masks)
        found = ours.step(logits, range(SLOTS), position, masks)
        assert np.array_equal(found.changed, expected.changed)
        assert found.tokens == expected.tokens
        for one_of_ours, one_of_theirs in zip(found.logprobs, expected.logprobs, strict=True):
            check_logprobs(one_of_ours, one_of_theirs)
        position = [at + 1 for at in position]


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
def test_both_draw_the_same_from_a_large_vocabulary(spread: float) -> None:
    rng = np.random.default_rng(3)
    asks = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.9),
        SamplingParams(seed=3, top_k=50),
        SamplingParams(seed=4, top_k=1000, top_p=0.95, min_p=0.001, temperature=0.7),
        SamplingParams(seed=5, top_p=0.5, temperature=1.7, logprobs=20),
        SamplingParams(seed=6, temperature=0.0, repetition_penalty=1.1, logprobs=1),
    ]
    slots = range(len(asks))
    theirs, ours = TorchSampler(len(asks), 151_936), RustSampler(len(asks), 151_936)
    prompt = rng.integers(0, 151_936, 500).tolist()
    for slot, params in enumerate(asks):
        theirs.assign(assignment(slot, params, prompt))
        ours.assign(assignment(slot, params, prompt))
    for step in range(2):
        logits = (rng.standard_normal((len(asks), 151_936)) * spread).astype(np.float32)
        expected = theirs.step(logits, slots, [500 + step] * len(asks))
        found = ours.step(logits, slots, [500 + step] * len(asks))
        assert found.tokens == expected.tokens
        assert np.array_equal(found.changed, expected.changed)
        for one_of_ours, one_of_theirs in zip(found.logprobs, expected.logprobs, strict=True):
            check_logprobs(one_of_ours, one_of_theirs, 3e-5)  # torch adds up so many in float32
        exact = torch.from_numpy(logits).double().log_softmax(-1)
        for row, one_of_ours in enumerate(found.logprobs):
            if one_of_ours is not None:
                assert one_of_ours[0] == pytest.approx(float(exact[row, found.tokens[row]]), abs=3e-6)
                assert one_of_ours[2] == pytest.approx(exact[row, one_of_ours[1]].tolist(), abs=3e-6)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 9e-6, 1.1e-5])
def test_the_lowest_temperatures_give_the_most_likely_token(temperature: float) -> None:
    """Logits divided by those below would be NaN or infinite."""
    asks = SamplingParams(temperature=temperature, seed=0).check()
    logits = np.array([[1.0, -3.0, 9.0, 5.0]], np.float32) * np.float32(1e4)
    for sampler in (TorchSampler(1, 4), RustSampler(1, 4)):
        sampler.assign(assignment(0, asks, [1]))
        assert sampler.step(logits, [0], [1]).tokens == [2]


def test_invalid_ids_and_infinite_values_are_handled() -> None:
    """Whoever accepts requests refuses the first; the others are valid."""
    sampler = CpuSampler(1, 8, (2, 500))
    asks = SamplingParams(
        seed=0,
        min_tokens=10**30,
        top_k=10**30,
        stop_token_ids=(900,),
        logit_bias={2**40: 1.0},
        allowed_token_ids=(3, 99),
        bad_token_ids=((3,), (77, 3)),
        repetition_penalty=2.0,
    )
    sampler.bind(assignment(0, asks, [1, 70], [2, 80]))
    logits = np.zeros((1, 8), np.float32)
    assert sampler.step(logits, [0], [4])[0] == [3]
    with pytest.raises(ValueError, match="slot is 1"):
        sampler.step(logits, [1], [4])
    with pytest.raises(ValueError, match="row counts"):
        sampler.step(logits, [0, 0], [4, 4])


def test_prompt_parts_are_those_of_the_torch_engine() -> None:
    sampler = CpuSampler(2, 50, ())
    sampler.bind(assignment(0, SamplingParams(seed=0, prompt_logprobs=4), [10, 11, 12, 13, 14], [15], req_id=9))
    sampler.bind(assignment(1, SamplingParams(seed=0), [10, 11, 12]))
    assert sampler.prompt_part(0, 0, 2) == (9, 1, [11, 12], 4)
    assert sampler.prompt_part(0, 2, 6) == (9, 3, [13, 14], 4)
    assert sampler.prompt_part(0, 4, 2) is None and sampler.prompt_part(1, 0, 2) is None


def test_both_agree_on_what_is_greedy() -> None:
    """A share too small for float32 is no zero: it leaves the most likely tokens, of which the lowest id wins, and not
    the best by its logit, where probabilities cannot tell them apart."""
    least = float(np.finfo(np.float32).tiny)
    params = SamplingParams(seed=1, top_p=1e-240, logit_bias={1: least})
    theirs, ours = TorchSampler(1, 4), RustSampler(1, 4)
    for one in (theirs, ours):
        one.assign(assignment(0, params, [1]))
    logits = np.zeros((1, 4), np.float32)
    assert ours.step(logits, [0], [1]).tokens == theirs.step(logits, [0], [1]).tokens == [0]
