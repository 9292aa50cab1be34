"""Which architectures are known. Adding one is a line here, and a variant of the decoder or a class of its own."""

from __future__ import annotations

import torch

from minisgl.config import ConfigError
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder, Variant

ARCHITECTURES: dict[str, Variant] = {
    "LlamaForCausalLM": Variant(),
    "Qwen3ForCausalLM": Variant(qk_norm=True),
}


def build_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, max_position: int | None = None
) -> Decoder:
    """An uninitialised model. `max_position` limits the rotary tables to what the context needs."""
    variant = ARCHITECTURES.get(config.architecture)
    if variant is None:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"config.json: architectures: {config.architecture} is not supported: only {known}")
    return Decoder(config, variant, dtype=dtype, device=device, max_position=max_position)
