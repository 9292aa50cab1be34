"""From a model's name to a filled model: where it lies, its safetensors, GGUF import, dummy weights.

Imports nothing: `sources` and `gguf_import` do without torch, and so do processes that need no more.
"""
