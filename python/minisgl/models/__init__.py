"""Models by the architecture that config.json names: parsing of configs, and the model code for torch.

`weights/` reads files, `engine/` runs steps. Start with `architectures.py`, a table, and `decoder.py`; the CPU engine
computes the same models in `rust/minisgl-cpu/src/model`.
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
