"""Layers that the models are made of: plain torch, no autograd. A whole model belongs to `models/`.

A layer that merges several tensors of a checkpoint (q, k and v; gate and up) says by `checkpoint` which part of its
parameter each of them fills, and by `shards` which part of each it holds if a rank of several holds one only. That is
all that a loader must know. Start with `linear.py`.
"""
