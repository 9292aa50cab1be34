"""Encoders that transformers has no class for, made of its own: the forward is that of its BERT but for what its model
card's code has in other places, whose names of tensors they have.

llama.cpp is asked beside them: tests/weights/test_gguf_folder_encoders.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertModel


def alibi(heads: int, tokens: int) -> Tensor:
    """What ALiBi (arXiv 2108.12409) adds to the scores of an encoder, [heads, tokens, tokens]: slopes are the powers of
    one number for a power of two, with those of twice as many heads between them for other counts."""
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


class JinaBertModel(BertModel):
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


OWN = {one.__name__: one for one in (JinaBertModel,)}
