"""Layers that the models are made of: plain torch, no autograd.

A layer that merges several tensors of a checkpoint (q, k and v; gate and up) says by `checkpoint` which part of its
parameter each of them fills. That is all a loader must know, and where tensor parallelism will take its shards.
"""

from minisgl.layers.embedding import Embedding
from minisgl.layers.experts import Experts
from minisgl.layers.linear import Linear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import RopeConfig, Rotary

__all__ = ["Embedding", "Experts", "Linear", "RMSNorm", "RopeConfig", "Rotary"]
