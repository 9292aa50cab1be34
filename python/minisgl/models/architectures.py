"""Which architectures are known, and what sets them apart beyond the numbers in their config.

Keeps true: an architecture that is not in the table is refused before anything else of its config is read.
Doesn't know: how a model is built.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.config import ConfigError


@dataclass(frozen=True, slots=True)
class Variant:
    """What differs between architectures beyond their config."""

    qk_norm: bool = False  # RMSNorm over each head of q and k, before rotation


ARCHITECTURES: dict[str, Variant] = {
    "LlamaForCausalLM": Variant(),
    "Qwen3ForCausalLM": Variant(qk_norm=True),
}


def find_variant(architecture: str) -> Variant:
    """By `architectures[0]` of config.json. Raises `ConfigError`, which lists the known."""
    variant = ARCHITECTURES.get(architecture)
    if variant is None:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"config.json: architectures: {architecture} is not supported: only {known}")
    return variant
