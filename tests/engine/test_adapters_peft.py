"""Adapters that peft itself makes and computes, where it is installed (`pip install peft`): files as it writes them,
and log probabilities within 1e-4 of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from minisgl.message import LoadAdapter
from minisgl.sampling_params import SamplingParams
from tests.helpers import models
from tests.helpers.engines import MODEL_ENGINES, Collector, assert_greedy, assert_logprobs, load

peft = pytest.importorskip("peft")
PROMPT = list(range(30, 60))
KINDS: dict[str, dict[str, Any]] = {
    "usual": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"r": 4, "lora_alpha": 9, "target_modules": "all-linear"},
    "rslora": {"r": 5, "lora_alpha": 3, "target_modules": ["o_proj", "down_proj", "up_proj"], "use_rslora": True},
    "some layers": {"r": 2, "lora_alpha": 8, "target_modules": ["k_proj", "gate_proj"], "layers_to_transform": [1]},
    "ranks by layer": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj"], "rank_pattern": {"o_proj": 7}},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora: true: DoRA"),
    "biases": ({"target_modules": ["q_proj"], "bias": "lora_only"}, 'bias: "lora_only"'),
    "B with bias": ({"target_modules": ["q_proj"], "lora_bias": True}, "lora_bias: true"),
    "whole layers": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
    "embeddings": ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
    "head": ({"target_modules": ["lm_head"]}, "lm_head"),
    "alpha by layer": ({"target_modules": ["q_proj", "o_proj"], "alpha_pattern": {"o_proj": 9}}, "alpha_pattern"),
}


def made(config: dict[str, Any], folder: Path, variant: str = "llama-bias-untied") -> Any:
    """peft's model, with random A and B, saved in `folder`."""
    torch.manual_seed(3)
    found = peft.get_peft_model(
        models.tiny_model(variant), peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
    ).eval()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.15)
    found.save_pretrained(folder)
    return found


@pytest.mark.parametrize("engine", MODEL_ENGINES)
def test_outputs_equal_peft(engine: str, tmp_path: Path) -> None:
    folder = models.save(models.tiny_model("llama-bias-untied"), tmp_path / "model")
    found = {number: made(config, tmp_path / str(number)) for number, config in enumerate(KINDS.values(), 1)}
    served, config = load(engine, folder, max_prefill_length=16)
    collector = Collector(served, config)
    collector.loop.step([LoadAdapter(number, "a", str(tmp_path / str(number))) for number in found])
    assert collector.adapters == dict.fromkeys(found, "loaded"), collector.reasons_of_adapters
    asks = SamplingParams(temperature=0, max_tokens=6, seed=0, logprobs=5)
    collector.run({number: (PROMPT, msgspec.structs.replace(asks, adapter=number)) for number in found})
    served.close()
    for number, model in found.items():
        assert_greedy(model, PROMPT, collector.tokens[number])
        assert_logprobs(model, PROMPT, collector.tokens[number], collector.logprobs[number])


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_settings_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    settings, reason = REFUSED[kind]
    made({"r": 2, "lora_alpha": 4, **settings}, tmp_path / "adapter")
    folder = models.save(models.tiny_model("llama-bias-untied"), tmp_path / "model")
    engine, config = load("torch", folder)
    collector = Collector(engine, config)
    collector.loop.step([LoadAdapter(1, "a", str(tmp_path / "adapter"))])
    engine.close()
    assert collector.adapters == {1: "refused"}
    assert reason in collector.reasons_of_adapters[1]
