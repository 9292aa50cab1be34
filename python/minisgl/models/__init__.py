"""Models by the architecture that their config names: what a config says, and what torch computes of it.

Reading files belongs to `weights/`, the steps of an engine to `engine/`. Start with `architectures.py`, a table, and
`decoder.py`; the CPU engine computes the same in `rust/minisgl-cpu/src/model`.
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
