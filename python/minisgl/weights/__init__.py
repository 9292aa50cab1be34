"""From a model's name to a filled model: where it lies, its safetensors, GGUF import, dummy weights."""

from minisgl.weights.checkpoint import dummy_weights, load_weights
from minisgl.weights.sources import find_smollm2, resolve_model

__all__ = ["dummy_weights", "find_smollm2", "load_weights", "resolve_model"]
