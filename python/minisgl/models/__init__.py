"""Models by the architecture that their config names.

What a config says is here, for whoever computes; what torch computes is in `decoder`.
"""

from minisgl.models.architectures import ARCHITECTURES, MoeConfig, own_name
from minisgl.models.config import ModelConfig, is_native, load_config, parse_config

__all__ = [
    "ARCHITECTURES",
    "ModelConfig",
    "MoeConfig",
    "is_native",
    "load_config",
    "own_name",
    "parse_config",
]
