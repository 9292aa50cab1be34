"""Penalties, bias, min_p, min_tokens, seeds and prompt log probabilities on the torch engine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from minisgl.attention import KVPool, LayerAttention, TorchSdpa
from minisgl.config import EngineConfig
from minisgl.engine.api import EngineInfo, SlotAssignment
from minisgl.engine.device import InlineDevice
from minisgl.engine.sampler import LogitsProcessors
from minisgl.engine.torch_engine import TorchEngine
from minisgl.message import FromEngine, PromptLogprobs, StepTokens
from minisgl.runner.build import control_plane_config
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from tests.engine.test_torch_engine import VOCAB, Reference, load, reference
from tests.helpers.engines import Collector
from tests.helpers.samplers import SAMPLERS, Sampler, SamplingRows, assignment, draw

__all__ = ["reference"]
CPU = torch.device("cpu")


class FakeModel:
    """Logits are a fixed random function of (token, position): the same alone and in any batch, bit for bit."""

    def forward(self, input_ids: Tensor, positions: Tensor, attend: object) -> Tensor:
        return torch.stack((input_ids, positions), 1).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.stack([self.row(int(token), int(position)) for token, position in hidden.tolist()])

    @staticmethod
    def row(token: int, position: int) -> Tensor:
        generator = torch.Generator().manual_seed(token * 100_003 + position)
        return torch.randn(VOCAB, generator=generator)


def fake_engine(num_pages: int = 256, page_size: int = 4, eos_ids: tuple[int, ...] = ()) -> Collector:
    info = EngineInfo("torch", None, VOCAB, 256, eos_ids, num_pages, page_size, "cpu", "float32")
    pool = KVPool(
        [LayerAttention(1, 1, 4, 4)], num_pages=num_pages, page_size=page_size, dtype=torch.float32, device=CPU
    )
    attention = TorchSdpa(pool, torch.float32, CPU)
    config = EngineConfig(max_running_requests=32, page_size=page_size)
    limits = control_plane_config(config, info).limits()
    engine = TorchEngine(FakeModel(), info, pool, attention, InlineDevice(), limits)  # type: ignore[arg-type]
    return Collector(engine, config)


def expected_greedy(prompt: list[int], params: SamplingParams) -> list[int]:
    """The definitions, token by token, without batch or slots."""
    tokens = list(prompt)
    for _ in range(params.max_tokens or 0):
        logits = FakeModel.row(tokens[-1], len(tokens) - 1).tolist()
        output = Counter(tokens[len(prompt) :])
        for token in set(tokens):
            logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
        for token, count in output.items():
            logits[token] -= params.frequency_penalty * count + params.presence_penalty
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if params.allowed_token_ids:
            logits = [x if i in params.allowed_token_ids else -math.inf for i, x in enumerate(logits)]
        kept, output_ids = list(logits), tokens[len(prompt) :]
        for *before, last in params.bad_token_ids:
            if output_ids[len(output_ids) - len(before) :] == before:
                logits[last] = -math.inf
        if max(logits) == -math.inf:
            logits = kept
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]


CASES = {
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": 1.7},
    "negative": {"frequency_penalty": -0.5, "presence_penalty": -0.3},
    "repetition": {"repetition_penalty": 1.6},
    "bias": {"logit_bias": {3: 4.0, 5: -100.0, 7: 3.5}},
    "allowed": {"allowed_token_ids": (3, 9, 17, 40)},
    "bad": {"bad_token_ids": tuple((i,) if i % 3 else (i, i + 1, i) for i in range(0, VOCAB - 1))},
    "nothing left": {"allowed_token_ids": (5, 6, 7), "bad_token_ids": ((5, 6), (6, 5), (5, 5), (7,), (6, 6, 6))},
    "all": {
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": {3: 3.0, 9: 3.0},
        "bad_token_ids": ((3, 9), (9, 9, 9)),
    },
}


@pytest.mark.parametrize("num_pages", [256, 60])
def test_penalties_follow_their_definitions(num_pages: int) -> None:
    """All at once under overlap; in the small pool they are retracted, and their counts begin again."""
    fake = fake_engine(num_pages)
    if num_pages == 60:
        fake.plane.reserve_ratio = 0  # type: ignore[attr-defined]
    requests = {}
    for i, changes in enumerate([*CASES.values(), {}]):
        params = SamplingParams(temperature=0, seed=0, max_tokens=40, **changes)  # type: ignore[arg-type]
        requests[i] = ([10 + i, 3, 5, 3, 20 + i], params)
    fake.run(requests)
    fake.close()
    assert (fake.plane.stats().num_retracted_total > 0) == (num_pages == 60)
    for i, (prompt, params) in requests.items():
        assert fake.tokens[i] == expected_greedy(prompt, params), [*CASES, "none"][i]
    plain = expected_greedy(requests[0][0], requests[len(CASES)][1])
    assert all(expected_greedy(requests[0][0], requests[i][1]) != plain for i in range(len(CASES)))


@pytest.mark.parametrize("kind", SAMPLERS)
def test_changes_follow_their_definitions_token_by_token(kind: str) -> None:
    """In slots that are assigned anew halfway through."""
    sampler = SAMPLERS[kind](len(CASES), VOCAB)
    prompt = [10, 3, 5, 3, 20]
    asks = [SamplingParams(temperature=0, seed=0, max_tokens=40, **one) for one in CASES.values()]  # type: ignore[arg-type]
    outputs: list[list[int]] = [[] for _ in asks]
    slots = list(range(len(asks)))
    for step in range(40):
        if step % 13 == 0:
            for slot, params in enumerate(asks):
                sampler.assign(assignment(slot, params, prompt, outputs[slot]))
        position = len(prompt) + step
        rows = [FakeModel.row((output or prompt)[-1], position - 1).numpy() for output in outputs]
        for output, token in zip(
            outputs, sampler.step(np.stack(rows), slots, [position] * len(slots)).tokens, strict=True
        ):
            output.append(token)
    for name, params, output in zip(CASES, asks, outputs, strict=True):
        assert output == expected_greedy(prompt, params), name


def test_seeded_tokens_are_the_same_alone_and_among_31_others() -> None:
    params = SamplingParams(
        temperature=1.1, top_p=0.9, top_k=40, min_p=0.02, seed=77, max_tokens=50, frequency_penalty=0.5
    )
    alone = fake_engine()
    alone.run({0: ([4, 8], params)})
    alone.close()
    crowd = fake_engine()
    others = {
        i: ([4, i], SamplingParams(seed=i, temperature=0.1 * i, top_k=i, max_tokens=20 + i)) for i in range(1, 32)
    }
    crowd.run({0: ([4, 8], params), **others})
    crowd.close()
    assert crowd.tokens[0] == alone.tokens[0] and len(set(alone.tokens[0])) > 10


def test_nothing_ends_a_request_before_min_tokens() -> None:
    """The end is by far the likeliest token, from eos and from stop_token_ids alike."""
    fake = fake_engine(eos_ids=(11,))
    bias = {11: 90.0, 12: 80.0}
    fake.run(
        {
            0: ([1], SamplingParams(temperature=0, seed=0, max_tokens=30, min_tokens=7, logit_bias=bias)),
            1: (
                [2],
                SamplingParams(
                    temperature=0, seed=0, max_tokens=9, min_tokens=5, logit_bias=bias, stop_token_ids=(12,)
                ),
            ),
            2: ([3], SamplingParams(temperature=0, seed=0, max_tokens=9, ignore_eos=True, logit_bias=bias)),
        }
    )
    fake.close()
    assert fake.tokens[0] == [12] * 7 + [11] and fake.reasons[0] is FinishReason.STOP
    assert len(fake.tokens[1]) == 6 and fake.tokens[1][-1] == 11 and not {11, 12} & set(fake.tokens[1][:-1])
    assert fake.tokens[2] == [11] * 9 and fake.reasons[2] is FinishReason.LENGTH


def test_top_p_of_zero_is_greedy_among_sampled_rows() -> None:
    fake = fake_engine()
    fake.run(
        {
            0: ([1], SamplingParams(temperature=1.5, top_p=0.0, seed=1, max_tokens=20).check()),
            1: ([1], SamplingParams(temperature=1.5, top_p=0.9, seed=1, max_tokens=20)),
        }
    )
    fake.close()
    assert fake.tokens[0] == expected_greedy([1], SamplingParams(max_tokens=20)) != fake.tokens[1]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_slot_forgets_the_request_before(kind: str) -> None:
    sampler = SAMPLERS[kind](1, VOCAB)
    logits = np.random.default_rng(0).standard_normal((1, VOCAB), np.float32)
    asks = SamplingParams(seed=0, max_tokens=1, frequency_penalty=1.0)
    sampler.assign(assignment(0, asks, [1], [2, 2]))
    changed = sampler.step(logits, [0], [3]).changed
    assert logits[0, 2] - changed[0, 2] == pytest.approx(2.0)  # generated twice before it was assigned again
    sampler.assign(assignment(0, SamplingParams(seed=0, max_tokens=1), [1], [2, 2]))
    assert sampler.step(logits, [0], [3]).changed.tobytes() == logits.tobytes()


def test_rows_without_changes_are_not_copied() -> None:
    changes = LogitsProcessors(VOCAB, (), CPU)
    changes.assign(assignment(0, SamplingParams(seed=0, max_tokens=1), [1], [2, 2]))
    logits = torch.randn(1, VOCAB)
    assert changes.apply(logits, [0], [3]) is logits


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sequence_goes_on_where_it_was_when_a_slot_is_bound_again(kind: str) -> None:
    """As after a retraction or a failover: of the sequence so far only the output counts."""
    asks = SamplingParams(seed=0, max_tokens=9, bad_token_ids=((4, 5, 6), (5, 7), (8,)))
    logits = np.random.default_rng(0).standard_normal((1, VOCAB), np.float32)

    def banned(sampler: Sampler) -> set[int]:
        return set(np.isneginf(sampler.step(logits, [0], [9]).changed[0]).nonzero()[0].tolist())

    for prompt, output, expected in (
        ([4, 5], [], {8}),
        ([4], [5], {7, 8}),
        ([1], [4, 5], {6, 7, 8}),
        ([1], [4, 5, 9], {8}),
    ):
        whole, grown = SAMPLERS[kind](1, VOCAB), SAMPLERS[kind](1, VOCAB)
        whole.assign(assignment(0, asks, prompt, output))
        grown.assign(assignment(0, asks, prompt))
        for token in output:
            grown.record(0, token)
        assert banned(whole) == banned(grown) == expected


def test_what_is_sampled_is_allowed_and_not_bad() -> None:
    allowed, bad = tuple(range(10, 20)), ((11,), (12, 13), (14, 14, 14))
    fake = fake_engine(eos_ids=(15,))
    fake.run(
        {
            i: (
                [12],
                SamplingParams(
                    temperature=2.0,
                    seed=i,
                    max_tokens=60,
                    min_tokens=60,
                    allowed_token_ids=allowed,
                    bad_token_ids=bad,
                    logit_bias={12: 2.0, 13: 2.0, 14: 2.0},
                ),
            )
            for i in range(8)
        }
    )
    fake.close()
    for tokens in fake.tokens.values():
        assert len(tokens) == 60 and set(tokens) <= {10, 12, 13, 14, 16, 17, 18, 19}
        assert all(list(one) != tokens[i : i + len(one)] for one in bad for i in range(60))
    assert {13, 14} <= {token for tokens in fake.tokens.values() for token in tokens}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_repetition_penalty_and_min_p_are_those_of_transformers(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(1, VOCAB, generator=generator)
    tokens = torch.randint(0, VOCAB, (1, 30), generator=generator)
    sampler = SAMPLERS[kind](1, VOCAB)
    asks = SamplingParams(seed=0, max_tokens=1, repetition_penalty=1.7)
    sampler.assign(SlotAssignment(0, 0, asks, tokens[0].numpy().astype(np.int32), 12))
    ours = torch.from_numpy(sampler.step(logits.numpy(), [0], [30]).changed)
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])(tokens, logits.clone())  # type: ignore[arg-type]
    torch.testing.assert_close(ours, theirs)

    allowed = set(MinPLogitsWarper(0.2)(tokens, logits.clone()).isfinite()[0].nonzero().flatten().tolist())  # type: ignore[arg-type]
    count = 4000
    rows = SamplingRows(
        torch.ones(count),
        torch.full((count,), -1),
        torch.ones(count),
        torch.full((count,), 0.2),
        torch.zeros(count, dtype=torch.int64),
        torch.arange(count),
    )
    assert set(draw(kind, logits.expand(count, -1), rows).tolist()) == allowed and len(allowed) > 1


@pytest.mark.parametrize("budget", [8, 512])
def test_prompt_logprobs_are_those_of_the_model(reference: Reference, budget: int) -> None:
    """Whole, in chunks, and where the prompt is in the cache already; nobody else gets any."""
    folder, model = reference
    engine, config = load(folder, num_pages=64, page_size=4, max_prefill_length=budget)
    found: dict[int, dict[int, PromptLogprobs]] = {}

    class Keeping(Collector):
        def deliver(self, messages: Sequence[FromEngine]) -> None:
            super().deliver(messages)
            for message in messages:
                assert isinstance(message, StepTokens)
                for chunk in message.prompt_logprobs:
                    found.setdefault(chunk.req_id, {})[chunk.first] = chunk

    collector = Keeping(engine, config)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 37).tolist()
    plain = SamplingParams(temperature=0, seed=0, max_tokens=3)
    asks = SamplingParams(temperature=0, seed=0, max_tokens=3, prompt_logprobs=2)
    collector.run({0: (prompt, plain)})
    collector.run({1: (prompt, asks), 2: (prompt[:20], plain), 3: (prompt[:1], asks)})
    engine.close()
    assert set(found) == {1} and collector.cached[1] == 0 and collector.cached[2] == 16
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    at = 1
    for first, chunk in sorted(found[1].items()):
        assert first == at
        for i, logprob in enumerate(chunk.logprobs):
            row = expected[at - 1]
            assert logprob == pytest.approx(float(row[prompt[at]]), abs=1e-4)
            assert list(chunk.top_logprobs[i]) == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
            assert len(chunk.top_ids[i]) == 2
            at += 1
    assert at == 37
