"""The torch engine under the reference control plane, against transformers; its attention against plain softmax."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from minisgl.attention import AttentionRows, KVPool, TorchSdpa
from minisgl.config import EngineConfig
from minisgl.engine.loading import load_engine
from minisgl.engine.torch_engine import TorchEngine
from minisgl.message import AddRequest, FromEngine, StepTokens
from minisgl.runner.build import build_control_plane
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from tests.helpers_models import save, tiny_model

pytestmark = pytest.mark.any_cpu

VOCAB = 120
ENGINE_VARIANTS = (
    "llama-bias-untied",
    "qwen3-tied",
    "qwen2-window-in-the-last-layers",
    "mistral-window",
    "qwen3-moe-not-everywhere",
)
Reference = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module", params=ENGINE_VARIANTS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A tiny random checkpoint and the model that transformers makes of it."""
    model = tiny_model(
        request.param, vocab_size=VOCAB, max_position_embeddings=512, eos_token_id=None, bos_token_id=None
    )
    return save(model, tmp_path_factory.mktemp(request.param)), model


def load(folder: Path, **settings: object) -> tuple[TorchEngine, EngineConfig]:
    config = EngineConfig(model=str(folder), dtype="float32", **settings)  # type: ignore[arg-type]
    return load_engine(config, lambda text, done=0, total=0: None), config


class Collector:
    """Runs requests through the step loop and keeps what they got."""

    def __init__(self, engine: TorchEngine, config: EngineConfig, *, overlap: bool = True) -> None:
        self.plane = build_control_plane(config, engine.info)
        self.loop = StepLoop(self.plane, engine, self._take, overlap=overlap)
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.cached: dict[int, int] = {}
        self.logprobs: dict[int, list[tuple[float, tuple[int, ...], tuple[float, ...]]]] = {}

    def _take(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            assert isinstance(message, StepTokens)
            bound = np.frombuffer(message.bound_ids, np.int64).tolist()
            self.cached |= dict(zip(bound, np.frombuffer(message.cached_lens, np.int32).tolist(), strict=True))
            ids = np.frombuffer(message.req_ids, np.int64).tolist()
            for one in message.logprobs:
                entry = (one.logprob, one.top_ids, one.top_logprobs)
                self.logprobs.setdefault(ids[one.index], []).append(entry)
            tokens = np.frombuffer(message.tokens, np.int32).tolist()
            for req_id, token, reason in zip(
                ids, tokens, np.frombuffer(message.reasons, np.int32).tolist(), strict=True
            ):
                if token >= 0:
                    self.tokens.setdefault(req_id, []).append(token)
                if reason:
                    self.reasons[req_id] = FinishReason(reason)

    def run(self, requests: dict[int, tuple[list[int], SamplingParams]]) -> None:
        adds = [AddRequest(i, np.array(p, np.int32).tobytes(), params) for i, (p, params) in requests.items()]
        self.loop.step(adds)
        while not self.loop.idle:
            self.loop.step([])
            self.plane.check()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, seed=0)


def assert_greedy(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the reference's first choice, or within 1e-3 of it."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    for row, token in zip(logits, tokens, strict=True):
        assert float(row.max() - row[token]) <= 1e-3, "not a greedy token of the reference"


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("overlap", [True, False])
def test_greedy_tokens_equal_transformers(reference: Reference, page_size: int, overlap: bool) -> None:
    """Mixed lengths, shared prefixes, chunked prefill, a pool that forces eviction and retraction."""
    folder, model = reference
    engine, config = load(
        folder, page_size=page_size, num_pages=240 // page_size, max_prefill_length=24, max_running_requests=5
    )
    generator = np.random.default_rng(page_size)
    shared = generator.integers(0, VOCAB, 40).tolist()
    prompts = [
        shared[: int(generator.integers(0, 40))] + generator.integers(0, VOCAB, n).tolist()
        for n in (1, 3, 17, 60, 5, 31, 2, 9)
    ]
    collector = Collector(engine, config, overlap=overlap)
    collector.plane.reserve_ratio = 0  # type: ignore[attr-defined]  # the estimate expects no output: rows will be retracted
    collector.run({i: (prompt, greedy(40)) for i, prompt in enumerate(prompts)})
    engine.close()
    for i, prompt in enumerate(prompts):
        assert collector.reasons[i] is FinishReason.LENGTH and len(collector.tokens[i]) == 40
        assert_greedy(model, prompt, collector.tokens[i])
    assert collector.plane.stats().num_retracted_total > 0
    assert sum(collector.cached.values()) > 0


def test_seeded_sampling_does_not_see_the_batch(reference: Reference) -> None:
    folder, _ = reference
    engine, config = load(folder, num_pages=200)
    params = SamplingParams(temperature=1.3, top_p=0.95, seed=9, max_tokens=30)
    prompt = list(range(10, 30))
    alone = Collector(engine, config)
    alone.run({0: (prompt, params)})
    others = {i: ([i, i + 1], SamplingParams(seed=i, max_tokens=30)) for i in range(1, 32)}
    crowd = Collector(engine, config)
    crowd.run({0: (prompt, params), **others})
    engine.close()
    assert crowd.tokens[0] == alone.tokens[0]
    assert len({tuple(tokens) for tokens in crowd.tokens.values()}) > 20


def test_logprobs_are_those_of_the_model(reference: Reference) -> None:
    folder, model = reference
    engine, config = load(folder, num_pages=64)
    collector = Collector(engine, config)
    prompt = [5, 6, 7]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=6, logprobs=3)
    collector.run({0: (prompt, params), 1: ([8], greedy(6))})
    engine.close()
    assert 1 not in collector.logprobs and len(collector.logprobs[0]) == 6
    with torch.inference_mode():
        expected = model(torch.tensor([prompt + collector.tokens[0]])).logits[0, 2:-1].log_softmax(-1)
    for row, token, (own, top_ids, top) in zip(expected, collector.tokens[0], collector.logprobs[0], strict=True):
        assert own == pytest.approx(float(row[token]), abs=1e-4)
        assert list(top) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4) and len(top_ids) == 3


def test_a_forward_that_raises_ends_its_step_only(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = reference
    engine, config = load(folder, num_pages=64)
    collector = Collector(engine, config)
    real, calls = engine._model.forward, iter(range(1000))

    def forward(*args: object) -> torch.Tensor:
        if next(calls) == 3:
            raise RuntimeError("out of luck")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._model, "forward", forward)
    collector.run({0: ([1, 2, 3], greedy(20))})
    assert collector.reasons[0] is FinishReason.ERROR and len(collector.tokens[0]) < 20
    collector.run({1: ([1, 2, 3], greedy(20))})
    engine.close()
    assert collector.reasons[1] is FinishReason.LENGTH
    assert_greedy(model, [1, 2, 3], collector.tokens[1])


def test_numbers_that_are_not_finite_are_an_error_and_leave_nothing(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = reference
    engine, config = load(folder, num_pages=8, page_size=4)
    collector = Collector(engine, config)
    store, spoiled = engine._pool.store, iter([True])

    def spoil(layer: int, out_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        store(layer, out_loc, k, v * float("nan") if next(spoiled, False) else v)

    monkeypatch.setattr(engine._pool, "store", spoil)
    collector.run({0: ([1, 2, 3], greedy(5))})
    assert collector.reasons[0] is FinishReason.ERROR
    collector.run({1: ([1, 2, 3], greedy(10))})  # the same pages again, partly filled
    engine.close()
    assert_greedy(model, [1, 2, 3], collector.tokens[1])


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """q [n, heads, d], the last n of k and v [m, kv_heads, d] -> [n, heads, d], by plain softmax."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    behind = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None] - torch.arange(k.shape[0])[None, :]
    hidden = (behind < 0) | (behind >= (window or k.shape[0]))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("windows", [(None, None), (None, 11), (5, 6), (1, 37), (1000, 16)], ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_attention_reads_through_the_page_table(
    page_size: int, heads: tuple[int, int], windows: tuple[int | None, int | None]
) -> None:
    generator = torch.Generator().manual_seed(page_size)
    num_heads, kv_heads, dim, num_pages = *heads, 16, 400
    lens = [3, 160, 40, 1, 7, 64]  # decode rows of very different lengths, then prefill rows
    extends = [1, 1, 1, 1, 7, 20]
    pool = KVPool(
        num_layers=2,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for tensor in (*pool.k, *pool.v):
        tensor.normal_(generator=generator)  # what other requests left behind
    table = torch.full((7, 160 // page_size), num_pages)
    free = torch.randperm(num_pages, generator=generator).tolist()
    keys = [torch.randn(n, kv_heads, dim, generator=generator) for n in lens]
    values = [torch.randn(n, kv_heads, dim, generator=generator) for n in lens]
    locs, out_loc = [], []
    for row, length in enumerate(lens):
        columns = -(-length // page_size)
        table[row, :columns] = torch.tensor([free.pop() for _ in range(columns)])
        at = table[row, torch.arange(length) // page_size] * page_size + torch.arange(length) % page_size
        locs.append(at)
        out_loc.append(at[-extends[row] :])
    backend = TorchSdpa(pool, torch.float32, torch.device("cpu"), windows)
    rows = AttentionRows(
        4,
        np.arange(6, dtype=np.int32),
        np.array(lens, np.int32),
        np.array(extends, np.int32),
        torch.cat(out_loc).numpy().astype(np.int32),
    )
    for layer in range(2):
        for row in range(6):
            past = lens[row] - extends[row]
            pool.store(layer, locs[row][:past], keys[row][:past], values[row][:past])
    backend.prepare(rows, table)
    q = torch.randn(sum(extends), num_heads, dim, generator=generator)
    new_k = torch.cat([k[-n:] for k, n in zip(keys, extends, strict=True)])
    new_v = torch.cat([v[-n:] for v, n in zip(values, extends, strict=True)])
    starts = np.concatenate([[0], np.cumsum(extends)])
    for layer in range(2):
        out = backend.attend(layer, q, new_k, new_v)
        for row in range(6):
            own = slice(starts[row], starts[row + 1])
            expected = dense(q[own], keys[row], values[row], windows[layer])
            torch.testing.assert_close(out[own], expected, atol=1e-5, rtol=1e-5)
