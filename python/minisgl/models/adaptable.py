"""The linear layers of a model that a LoRA adapter may change, and their sizes.

Invariants: an adapter for any other layer is an error that names the layer and the reason.
"""

from __future__ import annotations

from minisgl.models.config import ModelConfig, tensor_names


def adapter_layers(config: ModelConfig) -> dict[str, tuple[int, str]]:
    """Return (layer index, part name of `tensor_names`) for each linear layer that an adapter may change, by name such
    as "model.layers.0.self_attn.q_proj": attention other than MLA, and MLPs other than routed experts."""
    names = tensor_names(config)["checkpoint"]
    layers: dict[str, tuple[int, str]] = {}
    as_is = config.latent is None and not config.attention_gates
    attention = ("q", "k", "v", "qkv", "out") if as_is else ()
    for layer in range(config.num_layers):
        dense = config.moe is None or layer not in config.moe.layers
        mlp = ("gate", "up", "gate_up", "down") if config.gated else ("up", "down")
        heads = config.heads[layer]
        missing = {"k", "v"} if heads.kv_of != layer else {"v"} if heads.values_are_keys else set()
        if not config.attends[layer]:
            missing = set(attention)
        if config.intermediate_sizes[layer] == 0:
            missing = missing | set(mlp)
        for part in (*attention, *(mlp if dense else ())):
            if part in names and part not in missing:
                layers[names[part][0].format(layer=layer)] = layer, part
    return layers


def adaptable_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (input size, output size) of each linear layer that an adapter may change, by name."""
    size, layer_sizes = config.hidden_size, dict[str, tuple[int, int]]()
    for name, (layer, part) in adapter_layers(config).items():
        heads, inner = config.heads[layer], config.intermediate_sizes[layer]
        q, kv = config.num_heads * heads.head_dim, heads.kv_heads * heads.head_dim
        sizes = {"q": (size, q), "k": (size, kv), "v": (size, kv), "qkv": (size, q + 2 * kv), "out": (q, size)}
        sizes |= {"gate": (size, inner), "up": (size, inner), "gate_up": (size, 2 * inner), "down": (inner, size)}
        layer_sizes[name] = sizes[part]
    return layer_sizes


def unsupported_reason(config: ModelConfig, name: str) -> str:
    """Return the reason why an adapter cannot change the layer `name`."""
    if config.moe is not None and ".mlp." in name:
        return "adapters of routed experts and of their router are not supported"
    if config.latent is not None and ".self_attn." in name:
        return "adapters of MLA are not supported"
    if config.attention_gates and ".self_attn." in name:
        return "adapters of attention with output gates are not supported"
    if name.endswith(("embed_tokens", "lm_head")):
        return "adapters of embeddings and of the head are not supported"
    if config.state is not None and (".conv." in name or ".mamba." in name or ".linear_attn." in name):
        return "adapters of layers with a recurrent state are not supported"
    return "the model has no such linear layer"
