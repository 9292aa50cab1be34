"""Which architectures are known, and what sets them apart beyond the numbers in their config.

Invariants: an architecture that is not in the table is refused before anything else of its config is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minisgl.config import Unsupported

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
