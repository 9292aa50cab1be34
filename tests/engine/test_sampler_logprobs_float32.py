"""Logits are float32, whatever the weights are: what the head gives, what is sampled from, and log probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from minisgl.config import EngineConfig
from minisgl.distributed import Group
from minisgl.engine.loading import load_engine
from minisgl.layers.embedding import Embedding
from minisgl.models import load_config
from minisgl.models.decoder import build_model
from minisgl.sampling_params import SamplingParams
from minisgl.weights.checkpoint import load_weights
from tests.helpers.engines import Collector
from tests.helpers.models import CPU, save, tiny_model
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.any_cpu

VARIANTS = ("llama3-tied", "qwen3-untied")
PROMPTS = [[(7 * i + j) % 131 for i in range(5 + 9 * j)] for j in range(3)]


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logits of several tens, so that a bfloat16 would have steps of an eighth."""
    model = tiny_model(request.param, eos_token_id=None)
    with torch.no_grad():
        model.model.norm.weight.mul_(20.0)
    return save(model, tmp_path_factory.mktemp(request.param))


def head(folder: Path) -> Tensor:
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        tensor: Tensor = file.get_tensor("lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight")
    return tensor.bfloat16()


def assert_exact(logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
    assert logits.dtype is torch.float32
    exact = hidden.double() @ weight.double().T
    assert float(exact.abs().max()) > 8
    torch.testing.assert_close(logits.double(), exact, rtol=2e-6, atol=2e-5)
    assert not torch.equal(logits, logits.bfloat16().float())


def test_engine_samples_from_float32_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"num_pages": 64, "page_size": 4, "max_running_requests": 4, "max_prefill_length": 16}
    config = EngineConfig(model=str(folder), dtype="bfloat16", device="cpu", **settings)
    engine = load_engine(config, lambda text, done=0, total=0: None)
    products: list[tuple[Tensor, Tensor]] = []
    sampled: list[Tensor] = []
    inner = engine.model.logits

    def logits(hidden: Tensor) -> Tensor:
        products.append((hidden, inner(hidden)))
        return products[-1][1]

    draw = engine.sampler.sample

    def sample(logits: Tensor, *rest: Any) -> Tensor:
        sampled.append(logits.clone())
        return draw(logits, *rest)

    monkeypatch.setattr(engine.model, "logits", logits)
    monkeypatch.setattr(engine.sampler, "sample", sample)
    try:
        collector = Collector(engine, config)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, seed=0)
        collector.run({i: (prompt, params) for i, prompt in enumerate(PROMPTS)})
    finally:
        engine.close()
    assert products and sampled
    for hidden, found in products:
        assert_exact(found, hidden, head(folder))
    assert {logits.dtype for logits in sampled} == {torch.float32}
    said = sorted(one[0] for of in collector.logprobs.values() for one in of)
    expected = sorted(torch.cat(sampled).log_softmax(-1).amax(-1).tolist())
    assert said == pytest.approx(expected, abs=1e-5)


def test_ranks_gather_float32_logits(folder: Path, tmp_path: Path) -> None:
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16() * 20

    def part(group: Group) -> Tensor:
        with torch.inference_mode():
            model = build_model(load_config(folder), dtype=torch.bfloat16, device=CPU, group=group)
            load_weights(model.checkpoint(), folder, stacked=model.stacked(), shards=model.shards())
            model.pack()
            return model.logits(hidden)

    first, second = on_ranks(2, tmp_path, part)
    assert_exact(first, hidden, head(folder))
    assert second.dtype is torch.float32 and second.shape == first.shape and not second.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", [False, True])
def test_head_returns_float32_with_and_without_packed_copy(dtype: torch.dtype, packed: bool) -> None:
    """Without: as on a device whose torch multiplies no halves into float32, piece by piece."""
    layer = Embedding("head", 9000, 16, dtype=dtype, device=CPU)
    layer.weight.copy_(torch.randn(9000, 16, generator=torch.Generator().manual_seed(1)) * 10)
    weight = layer.weight.clone()
    if packed:
        layer.pack(read=False)
        assert not layer.weight.numel(), "nobody reads the table: it is dropped"
    hidden = torch.randn(3, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert_exact(layer.logits(hidden), hidden, weight)


def test_embedding_table_is_readable_after_packing() -> None:
    layer = Embedding("tokens", 8, 4, dtype=torch.bfloat16, device=CPU)
    layer.weight.fill_(1.5)
    layer.pack(read=True)
    assert layer(torch.tensor([3])).tolist() == [[1.5] * 4]


def test_the_product_of_a_cuda_head_is_one_call() -> None:
    """What torch says on no device of that call: its type and shape. Older ones don't have it."""
    if "dtype" not in torch.ops.aten.mm.overloads():
        pytest.skip("this torch multiplies no halves into float32")
    x, weight = (torch.empty(*size, dtype=torch.bfloat16, device="meta") for size in ((3, 16), (40, 16)))
    product = torch.ops.aten.mm.dtype(x, weight.t(), torch.float32)
    assert product.dtype is torch.float32 and product.shape == (3, 40)
