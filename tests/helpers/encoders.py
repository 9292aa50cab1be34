"""Tiny encoders of the table in tests/helpers/variants.py, the hidden states that transformers computes with them, and
the files that sentence-transformers adds to them.

JinaBERT and NomicBERT with experts are not among transformers' models: here they are its BERT and NomicBERT, except
where the models' code differs; tensors have the names of that code. A comparison with llama.cpp is in
tests/weights/test_gguf_folder_encoders.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.helpers.models import made
from tests.helpers.variants import CROSS_ENCODERS, ENCODERS, TINY_ENCODER

SCORED = "1_LogitScore"


def tiny_encoder(name: str, **changes: Any) -> Any:
    """Return a tiny encoder of the table; `changes` are settings of its config."""
    return made(ENCODERS[name], TINY_ENCODER, own=_OWN.get(name), **changes)


def tiny_cross_encoder(name: str, **changes: Any) -> Any:
    return made(CROSS_ENCODERS[name], TINY_ENCODER, **changes)


def judging(folder: Path, **ids: int | None) -> Path:
    """Add the files that mark a language model as a sentence-transformers cross-encoder, judging by two tokens."""
    names = {"": "base.modules.transformer.Transformer", SCORED: "cross_encoder.modules.logit_score.LogitScore"}
    modules = [{"path": path, "type": f"sentence_transformers.{name}"} for path, name in names.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / SCORED).mkdir(exist_ok=True)
    (folder / SCORED / "config.json").write_text(json.dumps(ids))
    return folder


def with_dense(folder: Path, activations: Sequence[str], sizes: Sequence[int], *, bias: bool = True) -> list[Tensor]:
    """Add sentence-transformers' dense layers after the pooling; return their weights. `bias`: of the first."""
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    modules.append({"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    weights = []
    for i, (name, size, inputs) in enumerate(zip(activations, sizes, (64, *sizes), strict=False)):
        own = folder / f"{i + 2}_Dense"
        own.mkdir()
        config = {"in_features": inputs, "out_features": size, "activation_function": name}
        (own / "config.json").write_text(json.dumps(config))
        weights.append(torch.randn(size, inputs, generator=torch.Generator().manual_seed(i)) / 8)
        tensors = {"linear.weight": weights[-1]} | (
            {"linear.bias": torch.arange(size) / 9.0} if bias and i == 0 else {}
        )
        save_file(tensors, own / "model.safetensors")
        modules.append({"path": own.name, "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    return weights


def hidden_states(model: Any, ids: Sequence[int]) -> Tensor:
    """Return the hidden states [tokens, hidden] of the model without its head."""
    with torch.inference_mode():
        states: Tensor = model.base_model(torch.tensor([list(ids)])).last_hidden_state[0]
    return states


def pooled(hidden: Tensor, pooling: str) -> Tensor:
    return {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling]


def alibi(heads: int, tokens: int) -> Tensor:
    """Return the bias that ALiBi (arXiv 2108.12409) adds to an encoder's scores, [heads, tokens, tokens]. For a power
    of two the slopes are powers of one base; otherwise those of twice as many heads are interleaved."""
    whole = 2 ** (heads.bit_length() - 1)
    first = torch.tensor([2.0 ** (-8 / whole)])
    between = first.sqrt() ** torch.arange(1, 2 * whole, 2)
    slopes = torch.cat([first ** torch.arange(1, whole + 1), between[: heads - whole]])
    places = torch.arange(tokens)
    return -slopes[:, None, None] * (places[:, None] - places).abs()


class _NoPositions(nn.Module):
    def forward(self, _: Tensor) -> float:
        return 0.0


class _Gated(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.wo = nn.Linear(config.intermediate_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gated_layers(hidden).chunk(2, -1)
        found: Tensor = self.layernorm(self.wo(nn.functional.gelu(gate) * up) + hidden)
        return found


class JinaBertModel(transformers.BertModel):
    """JinaBERT v2: BERT with ALiBi for positions and a gated MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.embeddings.position_embeddings = _NoPositions()
        for layer in self.encoder.layer:
            del layer.intermediate, layer.output
            layer.mlp = _Gated(config)
            layer.feed_forward_chunk = layer.mlp.forward
            for linear in (layer.mlp.gated_layers, layer.mlp.wo):
                nn.init.normal_(linear.weight, 0.0, config.initializer_range)

    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(
            input_ids, attention_mask=alibi(self.config.num_attention_heads, input_ids.shape[1])[None]
        )


class _Experts(nn.Module):
    """Weights of all experts as two matrices, and a bias that is added to the sum of a token's experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.mlp = nn.Module()
        for name in ("w1", "w2"):
            weight = torch.empty(config.num_experts * config.intermediate_size, config.hidden_size)
            self.mlp.register_parameter(name, nn.Parameter(weight))
            nn.init.normal_(weight, 0.0, config.initializer_range)
        self.bias = nn.Parameter(torch.zeros(config.hidden_size))


class _Routed(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num, self.top_k = config.num_experts, config.moe_top_k
        self.router = nn.Module()
        self.router.layer = nn.Linear(config.hidden_size, self.num, bias=False)
        self.experts = _Experts(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute all experts, with weight 0 for those that are not chosen."""
        shares = self.router.layer(hidden).softmax(-1)
        chosen = torch.zeros_like(shares).scatter(-1, shares.topk(self.top_k, -1).indices, 1.0)
        up, down = (one.view(self.num, -1, hidden.shape[-1]) for one in (self.experts.mlp.w1, self.experts.mlp.w2))
        inner = nn.functional.gelu(torch.einsum("bth,efh->btef", hidden, up))
        found: Tensor = torch.einsum("btef,efh,bte->bth", inner, down, shares * chosen) + self.experts.bias
        return found


class _Dense(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.fc2(nn.functional.gelu(self.fc1(hidden)))
        return found


class NomicBertModel(transformers.NomicBertModel):
    """nomic-embed-text-v2-moe: NomicBERT with biases, no gates, and experts in every other layer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for i, layer in enumerate(self.layers):
            layer.mlp = (_Routed if i % config.moe_every_n_layers == 1 else _Dense)(config)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(layer.self_attn, name, nn.Linear(config.hidden_size, config.hidden_size))
            for part in [*layer.self_attn.modules(), *layer.mlp.modules()]:
                if isinstance(part, nn.Linear):
                    nn.init.normal_(part.weight, 0.0, config.initializer_range)


_OWN = {"jina-bert": JinaBertModel, "jina-bert-12": JinaBertModel, "nomic-moe": NomicBertModel}
