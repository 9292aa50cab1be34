"""Attention of classes that transformers has from before its registry of attention functions: the same projections
and rotation, with the scores asked of the registry.

Invariants: a module keeps its weights and everything else that it has; with an attention that is not registered it is
as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb


def adapt(model: Any) -> None:
    """Replace the attention of `model` where that is needed."""
    for module in model.modules():
        if isinstance(module, FalconAttention):
            module.forward = partial(_falcon, module, module.forward)  # type: ignore[method-assign]


def _falcon(
    module: Any,
    own: Callable[..., Any],
    hidden_states: Tensor,
    *,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    **others: Any,
) -> Any:
    """Falcon without ALiBi. A fused projection holds, for each KV head, its query heads, K and V; in the oldest form
    each head has its own three."""
    scores = ALL_ATTENTION_FUNCTIONS.get(module.config._attn_implementation)
    if scores is None:
        return own(hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **others)
    batch, length, _ = hidden_states.shape
    fused = module.query_key_value(hidden_states)
    kv_heads = module.num_kv_heads
    fused = fused.view(batch, length, kv_heads, -1, module.head_dim)
    q, k, v = fused[:, :, :, :-2].flatten(2, 3), fused[:, :, :, -2], fused[:, :, :, -1]
    q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *position_embeddings)
    attended, _ = scores(module, q, k, v.transpose(1, 2), attention_mask)
    return module.dense(attended.reshape(batch, length, -1)), None
