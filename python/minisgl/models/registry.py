"""From a config to the model that it describes."""

from __future__ import annotations

import torch

from minisgl.distributed import ALONE, Group
from minisgl.models.architectures import find_variant
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int | None = None,
    group: Group = ALONE,
) -> Decoder:
    """An uninitialised model. `max_position` limits the rotary tables to what the context needs.
    Raises `ConfigError` for an unknown architecture."""
    return Decoder(
        config, find_variant(config.architecture), dtype=dtype, device=device, max_position=max_position, group=group
    )
