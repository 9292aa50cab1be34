"""Which linear layers of a model an adapter may change, and their sizes."""

from __future__ import annotations

from minisgl.models.config import ModelConfig


def adaptable(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) by name, such as "model.layers.0.self_attn.q_proj": all of attention, and MLPs that are not
    routed experts."""
    size, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found: dict[str, tuple[int, int]] = {}
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        for part, sizes in {"q": (size, q), "k": (size, kv), "v": (size, kv), "o": (q, size)}.items():
            found[f"{name}.self_attn.{part}_proj"] = sizes
        if config.moe is None or layer not in config.moe.layers:
            for part, sizes in {"gate": (size, inner), "up": (size, inner), "down": (inner, size)}.items():
                found[f"{name}.mlp.{part}_proj"] = sizes
    return found


def why_not(config: ModelConfig, name: str) -> str:
    """Of a layer that is not in `adaptable`."""
    if config.moe is not None and ".mlp." in name:
        return "adapters of routed experts and of their router are not computed"
    if name.endswith(("embed_tokens", "lm_head")):
        return "adapters of embeddings and of the head are not computed"
    return "the model has no such linear layer"
