"""Models that see and read: which config fields and tensors are of their text half.

Invariants: only tensors whose names are known to be of the other half are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from minisgl.config import ConfigError

_TEXT_TYPES = {"Mistral3ForConditionalGeneration": "mistral", "Gemma3ForConditionalGeneration": "gemma3_text"}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {  # transformers' defaults, which Google's files leave out
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    }
}
_OF_THE_WHOLE = ("architectures", "dtype", "torch_dtype", "quantization_config", "eos_token_id")
_OTHER_HALF = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


def has_text_half(architecture: str) -> bool:
    return architecture in _TEXT_TYPES


def text_config(raw: Mapping[str, Any], architecture: str) -> Mapping[str, Any]:
    """The config of the text half as if it were a model of its own. Raises `ConfigError`."""
    text, wanted = raw.get("text_config"), _TEXT_TYPES[architecture]
    if not isinstance(text, Mapping):
        raise ConfigError("config.json: text_config: missing: it says what the text half of this model is")
    if (kind := text.get("model_type", wanted)) != wanted:
        raise ConfigError(f"config.json: text_config: model_type: {kind!r} is not supported: only {wanted}")
    whole = {name: raw[name] for name in _OF_THE_WHOLE if raw.get(name) is not None}
    text = {**_DEFAULTS.get(wanted, {}), **text}
    # the whole model's setting counts: its text half has no head of its own
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {**text, **whole, "tie_word_embeddings": tied}


def own_name(architecture: str, name: str) -> str | None:
    """What a decoder calls a tensor of such a model's checkpoint; None for one that is no part of it."""
    return text_name(name) if has_text_half(architecture) else name


def is_other_half(name: str) -> bool:
    """Whether a tensor is of the half that sees."""
    return _OTHER_HALF.match(name) is not None


def text_name(name: str) -> str | None:
    """What the text half alone would call a tensor of the whole; None for one of the other half. transformers has
    written `language_model.model.` and `language_model.lm_head` (4), and `model.language_model.` and `lm_head` (5)."""
    if is_other_half(name):
        return None
    for prefix, own in (
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.", ""),
    ):
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
