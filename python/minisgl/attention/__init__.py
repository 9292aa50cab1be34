"""Attention over paged KV: a backend stores the K and V of a step's tokens and attends through the page table.

Weights belong to `layers/`, the pages of a request to the scheduler. Start with `api.py`, then `torch_sdpa.py`, the
reference for the other backends.
"""

from minisgl.attention.api import AttentionBackend, AttentionRows, LayerAttention
from minisgl.attention.kv_pool import KVPool
from minisgl.attention.torch_sdpa import Eager, TorchSdpa

__all__ = ["AttentionBackend", "AttentionRows", "Eager", "KVPool", "LayerAttention", "TorchSdpa"]
