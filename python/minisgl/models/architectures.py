"""Which architectures are known, and what sets them apart beyond the numbers in their config.

Models that see and read: which config fields and tensors are of their text half.

Invariants: an architecture that is not in the table is refused before anything else of its config is read. Only tensors
whose names are known to belong to the vision part are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from minisgl.config import ConfigError, Unsupported

Bias = Literal["config", "qkv", "none"]
"""Biases of attention: on all four projections if the config's `attention_bias` says so; on q, k and v; none."""
Window = Literal["refused", "always", "layers", "switched", "pattern"]
"""Which layers attend to the last `sliding_window` tokens only: none, a config that asks for it is refused; all, if it
is set; with `use_sliding_window` those from `max_window_layers` on, or what `layer_types` says; with it all; what
`layer_types` says, or all but each `sliding_window_pattern`-th."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What differs between architectures beyond their config."""

    qk_norm: bool = False  # RMSNorm over each head of q and k, before rotation
    bias: Bias = "config"
    mlp_bias: bool = False  # whether the config's `mlp_bias` is one of its fields
    window: Window = "refused"
    unrotated: bool = False  # some layers rotate neither q nor k: those that the config's `no_rope_layers` says
    experts: bool = False  # layers of the config's choice have routed experts
    gemma: bool = False
    """As Gemma 3 (arXiv 2503.19786): norms behind attention and MLP, too, all with weights that lack 1; embeddings
    times the root of their size; GELU; scores scaled by `query_pre_attn_scalar`; layers with a window rotate by a table
    of their own; the head is the table of embeddings unless the config says otherwise."""


ARCHITECTURES: dict[str, Variant] = {
    "LlamaForCausalLM": Variant(mlp_bias=True),
    "MistralForCausalLM": Variant(bias="none", window="always"),
    "Mistral3ForConditionalGeneration": Variant(bias="none", window="always"),  # its text half
    "Qwen2ForCausalLM": Variant(bias="qkv", window="layers"),
    "Qwen3ForCausalLM": Variant(qk_norm=True, window="layers"),
    "SmolLM3ForCausalLM": Variant(mlp_bias=True, window="layers", unrotated=True),
    "Qwen3MoeForCausalLM": Variant(qk_norm=True, window="switched", experts=True),
    "Gemma3ForCausalLM": Variant(qk_norm=True, window="pattern", gemma=True),
    "Gemma3ForConditionalGeneration": Variant(qk_norm=True, window="pattern", gemma=True),  # its text half
}


_CHUNKS = "attention within chunks of the text, which no engine here has"
_STATES = "layers that keep a state of their own (linear attention), which no KV page holds"
_NOWHERE = {
    "Llama4ForCausalLM": _CHUNKS,
    "Llama4ForConditionalGeneration": _CHUNKS,
    "Qwen3NextForCausalLM": _STATES,
}  # whom transformers' code cannot serve either


def find_variant(architecture: str) -> Variant:
    """By `architectures[0]` of config.json. Raises `Unsupported`, which lists the known."""
    variant = ARCHITECTURES.get(architecture)
    if variant is None:
        if reason := _NOWHERE.get(architecture):
            raise Unsupported(f"config.json: architectures: {architecture} is not supported: {reason}")
        known = ", ".join(ARCHITECTURES)
        raise Unsupported(
            f"config.json: architectures: {architecture} is not supported: only {known} "
            "(others, by transformers' code: --model-impl transformers)"
        )
    return variant


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
    """Whether a tensor belongs to the vision part of the model."""
    return _OTHER_HALF.match(name) is not None


def text_name(name: str) -> str | None:
    """The name that the text part alone has for a tensor of the whole model; None for one of the vision part.
    transformers has written `language_model.model.` and `language_model.lm_head` (4), and `model.language_model.` and
    `lm_head` (5)."""
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
