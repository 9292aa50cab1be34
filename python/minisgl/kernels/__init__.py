"""Kernels in Triton for the torch engines, and the plain torch that they are compared with.

Those of the CPU engine are the crate `minisgl-kernels`. Start with `ops.py`.
"""
