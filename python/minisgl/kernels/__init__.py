"""Triton kernels of the torch engines, and the equivalents in plain torch that they are tested against.

The kernels of the CPU engine are in the crate `minisgl-kernels`. Start with `ops.py`.
"""
