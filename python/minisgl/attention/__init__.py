"""Attention over paged KV: a backend stores the K and V of a step's tokens and attends through the page table."""

from minisgl.attention.api import AttentionBackend, AttentionRows, LayerAttention
from minisgl.attention.kv_pool import KVPool
from minisgl.attention.torch_sdpa import Eager, TorchSdpa

__all__ = ["AttentionBackend", "AttentionRows", "Eager", "KVPool", "LayerAttention", "TorchSdpa"]
