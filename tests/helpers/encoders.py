"""Tiny random encoders made by transformers, and what transformers makes of token ids with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.helpers.models import randomised

_TINY = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "initializer_range": 0.15,
}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "bert-masked": ("BertForMaskedLM", {"type_vocab_size": 1, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "roberta": ("RobertaModel", {}),
    "xlm-roberta-masked": ("XLMRobertaForMaskedLM", {"pad_token_id": 5}),
    "nomic-bert": ("NomicBertModel", {}),
    "modernbert": ("ModernBertModel", {"local_attention": 10, **_IDS}),
    "modernbert-masked": (
        "ModernBertForMaskedLM",
        {"local_attention": 7, "norm_bias": True, "attention_bias": True, "num_hidden_layers": 4, **_IDS},
    ),
    "mpnet": ("MPNetModel", {"max_position_embeddings": 300}),
    "mpnet-masked": ("MPNetForMaskedLM", {}),
    "embedding-gemma": (
        "Gemma3TextModel",
        {
            "use_bidirectional_attention": True,
            "sliding_window": 12,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
}


CROSS_ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", {"num_labels": 1}),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", {"num_labels": 1, "pad_token_id": 5}),
    "roberta-classes": ("RobertaForSequenceClassification", {"num_labels": 3}),
    "mpnet": ("MPNetForSequenceClassification", {"num_labels": 1}),
    "modernbert": (
        "ModernBertForSequenceClassification",
        {"num_labels": 1, "local_attention": 10, "classifier_pooling": "mean", **_IDS},
    ),
    "modernbert-cls": (
        "ModernBertForSequenceClassification",
        {"num_labels": 1, "classifier_bias": True, "norm_bias": True, **_IDS},
    ),
}


def tiny_encoder(name: str, **changes: Any) -> Any:
    """In float32, eval mode, every parameter random. `changes` are of its config."""
    return _tiny(*ENCODERS[name], **changes)


def tiny_cross_encoder(name: str) -> Any:
    return _tiny(*CROSS_ENCODERS[name])


def _tiny(architecture: str, extra: Mapping[str, Any], **changes: Any) -> Any:
    import transformers

    model_class = getattr(transformers, architecture)
    torch.manual_seed(7)
    return randomised(model_class(model_class.config_class(**{**_TINY, **extra, **changes})))


def hidden_states(model: Any, ids: Sequence[int]) -> Tensor:
    """[tokens, hidden] of the model without its head."""
    with torch.inference_mode():
        found: Tensor = model.base_model(torch.tensor([list(ids)])).last_hidden_state[0]
    return found


def pooled(hidden: Tensor, pooling: str) -> Tensor:
    return {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling]
