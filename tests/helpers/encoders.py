"""Tiny random encoders made by transformers, and what transformers makes of token ids with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.helpers.models import randomised

SCORED = "1_LogitScore"
CARD_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
CARD_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
CARD_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""As the model card of Qwen3-Reranker has them."""
_TINY = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "initializer_range": 0.15,
}
NOMIC_MOE = {
    "activation_function": "gelu",
    "moe_every_n_layers": 2,
    "moe_normalize_expert_weights": False,
    "moe_top_k": 2,
    "num_experts": 8,
    "qkv_proj_bias": True,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "type_vocab_size": 1,
    "layer_norm_epsilon": 1e-5,
    "layer_norm_eps": 1e-5,
}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "bert-masked": ("BertForMaskedLM", {"type_vocab_size": 1, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "roberta": ("RobertaModel", {}),
    "xlm-roberta-masked": ("XLMRobertaForMaskedLM", {"pad_token_id": 5}),
    "jina-bert": ("JinaBertModel", {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}),
    "jina-bert-12": (
        "JinaBertModel",
        {
            "position_embedding_type": "alibi",
            "feed_forward_type": "geglu",
            "num_attention_heads": 12,
            "hidden_size": 96,
            "max_position_embeddings": 200,
        },
    ),
    "nomic-bert": ("NomicBertModel", {}),
    "nomic-moe": ("NomicBertModel", {"num_hidden_layers": 4, **NOMIC_MOE}),
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
    "qwen3-classes": (
        "Qwen3ForSequenceClassification",
        {"num_labels": 3, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0},
    ),
    "modernbert-cls": (
        "ModernBertForSequenceClassification",
        {"num_labels": 1, "classifier_bias": True, "norm_bias": True, **_IDS},
    ),
}


def tiny_encoder(name: str, **changes: Any) -> Any:
    """In float32, eval mode, every parameter random. `changes` are of its config."""
    from tests.helpers.own_encoders import OWN  # transformers' classes are imported late

    return _tiny(*ENCODERS[name], OWN.get(name), **changes)


def tiny_cross_encoder(name: str, **changes: Any) -> Any:
    return _tiny(*CROSS_ENCODERS[name], **changes)


def _tiny(architecture: str, extra: Mapping[str, Any], own: Any = None, **changes: Any) -> Any:
    import transformers

    model_class = own or getattr(transformers, architecture)
    torch.manual_seed(7)
    return randomised(model_class(model_class.config_class(**{**_TINY, **extra, **changes})))


def judging(folder: Path, **ids: int | None) -> Path:
    """With the files by which sentence-transformers knows a language model that answers one of two tokens."""
    names = {"": "base.modules.transformer.Transformer", SCORED: "cross_encoder.modules.logit_score.LogitScore"}
    modules = [{"path": path, "type": f"sentence_transformers.{name}"} for path, name in names.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / SCORED).mkdir(exist_ok=True)
    (folder / SCORED / "config.json").write_text(json.dumps(ids))
    return folder


def with_dense(folder: Path, activations: Sequence[str], sizes: Sequence[int], *, bias: bool = True) -> list[Tensor]:
    """With dense layers behind the pooling, as sentence-transformers has them; their weights. `bias`: of the first."""
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    modules.append({"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    weights = []
    for i, (name, size, inputs) in enumerate(zip(activations, sizes, (64, *sizes), strict=False)):
        own = folder / f"{i + 2}_Dense"
        own.mkdir()
        said = {"in_features": inputs, "out_features": size, "activation_function": name}
        (own / "config.json").write_text(json.dumps(said))
        weights.append(torch.randn(size, inputs, generator=torch.Generator().manual_seed(i)) / 8)
        tensors = {"linear.weight": weights[-1]} | (
            {"linear.bias": torch.arange(size) / 9.0} if bias and i == 0 else {}
        )
        save_file(tensors, own / "model.safetensors")
        modules.append({"path": own.name, "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    return weights


def hidden_states(model: Any, ids: Sequence[int]) -> Tensor:
    """[tokens, hidden] of the model without its head."""
    with torch.inference_mode():
        found: Tensor = model.base_model(torch.tensor([list(ids)])).last_hidden_state[0]
    return found


def pooled(hidden: Tensor, pooling: str) -> Tensor:
    return {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling]
