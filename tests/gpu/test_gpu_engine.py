"""The CUDA engine on its device: against transformers, graphs against eager, overlap, backends, big shapes, noise."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmark.gpu.shapes import write_shape
from minisgl.attention.backend import machine
from minisgl.config import ConfigError, EngineConfig
from minisgl.engine import sampler
from minisgl.engine.cuda_engine import CudaEngine
from minisgl.engine.loading import load_engine
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from tests.engine.test_device_pieces import check_store, check_tables
from tests.engine.test_torch_engine import VOCAB, Collector, greedy
from tests.helpers_models import TIE_WITHIN, VARIANTS, save, tiny_model

TIE_WITHIN_BFLOAT16 = 0.15  # of logits around 5, of which bfloat16 keeps 8 bits
WIDE = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
needs_flashinfer = pytest.mark.skipif(
    not torch.cuda.is_available() or "flashinfer" not in machine(torch.device("cuda")).installed,
    reason="no flashinfer",
)


def checkpoint(variant: str, folder: Path, **changes: Any) -> tuple[Path, Any]:
    model = tiny_model(
        variant, vocab_size=VOCAB, max_position_embeddings=512, eos_token_id=None, bos_token_id=None, **changes
    )
    return save(model, folder), model


def run(folder: Path, wanted: dict[int, Any], *, overlap: bool = True, **settings: Any) -> Collector:
    config = EngineConfig(
        model=str(folder),
        **{"device": "cuda", "num_pages": 200, "max_running_requests": 6, "max_prefill_length": 24, **settings},
    )
    engine = load_engine(config, lambda text, done=0, total=0: print(text))
    assert isinstance(engine, CudaEngine)
    collector = Collector(engine, config, overlap=overlap)
    try:
        collector.run(wanted)
    finally:
        engine.close()
    return collector


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, 40).tolist()
    return [shared[: 5 * i] + rng.integers(0, VOCAB, n).tolist() for i, n in enumerate((1, 3, 17, 60, 5, 31, 2, 9))]


def assert_greedy(model: Any, prompt: list[int], tokens: list[int], within: float) -> None:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    for row, token in zip(logits, tokens, strict=True):
        assert float(row.max() - row[token]) <= within, "not a greedy token of the reference"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_greedy_tokens_equal_transformers(variant: str, dtype: str, tmp_path: Path) -> None:
    folder, model = checkpoint(variant, tmp_path)
    collector = run(folder, {i: (p, greedy(24)) for i, p in enumerate(prompts())}, dtype=dtype)
    within = TIE_WITHIN if dtype == "float32" else TIE_WITHIN_BFLOAT16
    for i, prompt in enumerate(prompts()):
        assert collector.reasons[i] is FinishReason.LENGTH
        assert_greedy(model, prompt, collector.tokens[i], within)


@needs_flashinfer
@pytest.mark.parametrize("variant", ["qwen3-tied", "mistral-window", "qwen2-window-in-the-last-layers"])
@pytest.mark.parametrize("graphs", [0, 4], ids=["eager", "graphs"])
def test_flashinfer_gives_greedy_tokens_of_transformers(variant: str, graphs: int, tmp_path: Path) -> None:
    changes = WIDE if variant == "qwen3-tied" else {"hidden_size": 256}  # heads of 64 either way
    folder, model = checkpoint(variant, tmp_path, **changes)
    wanted = {i: (p, greedy(24)) for i, p in enumerate(prompts())}
    collector = run(folder, wanted, dtype="bfloat16", attention_backend="flashinfer", cuda_graph_max_bs=graphs)
    for i, prompt in enumerate(prompts()):
        assert_greedy(model, prompt, collector.tokens[i], TIE_WITHIN_BFLOAT16)


@needs_flashinfer
@pytest.mark.parametrize("overlap", [True, False])
def test_graph_equals_eager_token_by_token(overlap: bool, tmp_path: Path) -> None:
    """One request at a time, so that both run the same rows; sampled, so that a small difference would show."""
    folder, _ = checkpoint("qwen3-tied", tmp_path, **WIDE)
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=40)
    settings = {"dtype": "bfloat16", "attention_backend": "flashinfer", "overlap": overlap}
    graph = run(folder, {0: (prompts()[3], params)}, cuda_graph_max_bs=4, **settings)
    eager = run(folder, {0: (prompts()[3], params)}, cuda_graph_max_bs=0, **settings)
    assert graph.tokens == eager.tokens


def test_overlap_changes_nothing(tmp_path: Path) -> None:
    folder, _ = checkpoint("llama-bias-untied", tmp_path)
    params = SamplingParams(temperature=0.9, top_k=20, seed=4, max_tokens=30)
    on, off = (run(folder, {0: (prompts()[3], params)}, dtype="float32", overlap=flag) for flag in (True, False))
    assert on.tokens == off.tokens


@needs_flashinfer
def test_launches_do_not_wait_for_the_device(tmp_path: Path) -> None:
    """Any operation that makes the host wait raises, once the engine is warm."""
    folder, _ = checkpoint("qwen3-tied", tmp_path, **WIDE)
    config = EngineConfig(
        model=str(folder), device="cuda", dtype="bfloat16", num_pages=200, max_running_requests=6, max_prefill_length=24
    )
    engine = load_engine(config, lambda text, done=0, total=0: None)
    collector = Collector(engine, config)
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=20)
    collector.run({i: (p, params) for i, p in enumerate(prompts())})
    torch.cuda.set_sync_debug_mode("error")
    try:
        collector.run({100 + i: (p, params) for i, p in enumerate(prompts(1))})
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.close()


def test_noise_and_draws_are_those_of_the_cpu() -> None:
    rng = np.random.default_rng(0)
    seed = torch.from_numpy(rng.integers(-(2**63), 2**63, 4096))
    position = torch.from_numpy(rng.integers(0, 2**31, 4096))
    there = sampler.uniforms(seed.cuda(), position.cuda()).cpu()
    assert torch.equal(there, sampler.uniforms(seed, position))


@pytest.mark.parametrize("seed", range(20))
def test_triton_kernels(seed: int) -> None:
    from minisgl.kernels import kv_store_triton, pages_triton

    check_tables(_OnCuda(pages_triton), seed)
    check_store(_OnCuda(kv_store_triton), seed)


class _OnCuda:
    """A module whose functions are called with copies on the device, written back after."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        def call(*tensors: torch.Tensor) -> None:
            there = [tensor.cuda() for tensor in tensors]
            getattr(self._module, name)(*there)
            for tensor, copy in zip(tensors, there, strict=True):
                if tensor.is_contiguous():
                    tensor.copy_(copy)

        return call


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-8b", "llama-3.1-8b", "qwen3-32b"])
def test_dummy_weights_of_big_shapes(shape: str, tmp_path: Path) -> None:
    folder = write_shape(shape, tmp_path / shape)
    settings = {"load_format": "dummy", "dtype": "bfloat16", "num_pages": 512, "max_seq_len": 2048}
    wanted = {i: (list(range(100 + i)), SamplingParams(temperature=0, max_tokens=8, seed=0)) for i in range(4)}
    collector = run(folder, wanted, **settings)
    assert all(len(tokens) == 8 for tokens in collector.tokens.values())
    gc.collect()
    torch.cuda.empty_cache()


def test_a_pool_that_does_not_fit_names_the_flag(tmp_path: Path) -> None:
    folder, _ = checkpoint("llama-bias-untied", tmp_path)
    with pytest.raises(ConfigError, match="--num-pages"):
        run(folder, {}, num_pages=2**40)
