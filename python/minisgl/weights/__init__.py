"""From a model's name to a filled model: where it lies, its safetensors, GGUF import, dummy weights.

What an architecture is belongs to `models/`; the CPU engine reads files itself (`rust/minisgl-cpu/src/files`). Start
with `sources.py`. This file imports nothing: `sources` and `gguf_import` do without torch.
"""
