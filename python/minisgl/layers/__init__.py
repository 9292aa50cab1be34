"""Layers that models are made of: plain torch, no autograd. `models/` has whole models.

A layer that fuses several tensors of a checkpoint (q, k and v; gate and up) returns by `checkpoint` the part of its
parameter that each of them fills, and by `shards` the part of each that one of several ranks holds. A loader needs
nothing else. Start with `linear.py`.
"""
