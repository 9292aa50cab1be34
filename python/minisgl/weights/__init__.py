"""Loading of weights by a model's name: locating models, safetensors, GGUF import, hubs, dummy weights.

`models/` defines architectures; the CPU engine reads weight files itself (`rust/minisgl-cpu/src/files`). Start with
`sources.py`. This file imports nothing: `sources` and `gguf_import` do not need torch.
"""
