"""Models by the architecture that their config names."""

from minisgl.models.architectures import ARCHITECTURES
from minisgl.models.config import ModelConfig, MoeConfig, load_config, parse_config
from minisgl.models.decoder import Attend, Decoder
from minisgl.models.registry import build_model
from minisgl.models.text_half import own_name

__all__ = [
    "ARCHITECTURES",
    "Attend",
    "Decoder",
    "ModelConfig",
    "MoeConfig",
    "build_model",
    "load_config",
    "own_name",
    "parse_config",
]
