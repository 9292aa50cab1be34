"""The torch engine under the reference control plane, against transformers; its attention against plain softmax."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from minisgl.attention import AttentionRows, KVPool, TorchSdpa
from minisgl.config import EngineConfig
from minisgl.engine.loading import load_engine
from minisgl.engine.torch_engine import TorchEngine
from minisgl.step import FinishReason
from tests.helpers.engines import Collector, assert_greedy, greedy
from tests.helpers.models import save, tiny_model

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
