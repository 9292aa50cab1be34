"""Vision towers: how a model's config.json describes its tower, and the names of the tower's tensors.

A tower is an encoder of patches. It is a `ModelConfig` without a vocabulary, which the CPU engine computes with the
operations of text models. Mergers make tokens of its output.

Invariants: every field that changes the computation is read or refused; only families in `FAMILIES` see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from minisgl.config import ConfigError
from minisgl.models.architectures import Heads, Patches
from minisgl.models.config import ModelConfig, computed
from minisgl.models.rope import RopeConfig, inverse_frequencies

Raw = Mapping[str, Any]
_PREFIXES = ("model.visual.", "visual.")
_NAMES = {
    "patches": "patch_embed.proj",
    "positions": "pos_embed",
    "attention_norm": "blocks.{layer}.norm1",
    "qkv": "blocks.{layer}.attn.qkv",
    "out": "blocks.{layer}.attn.proj",
    "mlp_norm": "blocks.{layer}.norm2",
    "up": "blocks.{layer}.mlp.linear_fc1",
    "down": "blocks.{layer}.mlp.linear_fc2",
    "merger_norm": "merger.norm",
    "merger_up": "merger.linear_fc1",
    "merger_down": "merger.linear_fc2",
    "deep_merger_norm": "deepstack_merger_list.{layer}.norm",
    "deep_merger_up": "deepstack_merger_list.{layer}.linear_fc1",
    "deep_merger_down": "deepstack_merger_list.{layer}.linear_fc2",
}
_GGUF_NAMES = {
    "patches": "v.patch_embd",
    "positions": "v.position_embd",
    "attention_norm": "v.blk.{layer}.ln1",
    "qkv": "v.blk.{layer}.attn_qkv",
    "out": "v.blk.{layer}.attn_out",
    "mlp_norm": "v.blk.{layer}.ln2",
    "up": "v.blk.{layer}.ffn_up",
    "down": "v.blk.{layer}.ffn_down",
    "merger_norm": "v.post_ln",
    "merger_up": "mm.0",
    "merger_down": "mm.2",
    "deep_merger_norm": "v.deepstack.{tap}.norm",
    "deep_merger_up": "v.deepstack.{tap}.fc1",
    "deep_merger_down": "v.deepstack.{tap}.fc2",
}


@dataclass(frozen=True, slots=True)
class Tower:
    """The vision tower of a model. `layers` describes its encoder, `theta` is its RoPE base. A position has two axes,
    so half of a head's pairs rotate by the row of a patch and half by its column."""

    layers: ModelConfig
    theta: float
    out_size: int

    @property
    def patches(self) -> Patches:
        assert self.layers.patches is not None
        return self.layers.patches

    @property
    def patch_bytes(self) -> int:
        """The pixel values of a patch."""
        return 3 * self.patches.size**2

    def settings(self) -> dict[str, Any]:
        """Return the description that the CPU engine reads, without weights and pixel values."""
        half = inverse_frequencies(RopeConfig(self.theta), self.layers.head_dim // 2, 1).tolist()
        names = {part: [*(prefix + name for prefix in _PREFIXES), _GGUF_NAMES[part]] for part, name in _NAMES.items()}
        flags = ("interleaved", "gate_up_in_turns", "grouped", "tiled", "transposed")
        return {
            "model": computed(self.layers, 1) | {"inverse_frequencies": [half + half]},
            "names": {"names": names, "buffers": (), **dict.fromkeys(flags, False)},
            "out_size": self.out_size,
        }


def find_tower(raw: Raw, model: ModelConfig) -> Tower | None:
    """Return the vision tower that config.json describes, None if its family has none that we know. Raises
    `ConfigError` if it is impossible."""
    describe = FAMILIES.get(model.architecture)
    vision = raw.get("vision_config")
    if describe is None or not isinstance(vision, Mapping):
        return None
    try:
        return describe(vision, model)
    except KeyError as error:
        raise ConfigError(f"config.json: vision_config: {error.args[0]}: missing") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json: vision_config: {error}") from error


def with_images(model: ModelConfig, raw: Raw, tower: Tower) -> ModelConfig:
    """Return the text model's description with what it does to images. Raises `ConfigError`."""
    text = raw.get("text_config") or raw
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    pairs = model.rotary_dims[0] // 2
    sections = [int(size) for size in rope.get("mrope_section") or (24, 20, 20)]
    if len(model.ropes) != 1 or len(sections) != 3 or sum(sections) != pairs or rope.get("mrope_interleaved") is False:
        raise ConfigError(f"config.json: mrope_section: {sections}: must be three numbers with the sum {pairs}")
    # the axes take turns until a section is used up; the rest are of the time
    axes = tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(pairs))
    return replace(model, rope_axes=axes, deep_features=len(tower.patches.taps))


def _qwen3_vl(vision: Raw, model: ModelConfig) -> Tower:
    """Return the tower of Qwen3-VL and Qwen3.5: pre-norm layers, learned positions for a square that is resampled."""
    for name, only in (("hidden_act", "gelu_pytorch_tanh"), ("in_channels", 3)):
        if (value := vision.get(name, only)) != only:
            raise ConfigError(f"config.json: vision_config: {name}: {value!r} is not supported: only {only!r}")
    layers, hidden, heads = int(vision["depth"]), int(vision["hidden_size"]), int(vision["num_heads"])
    out_size, positions = int(vision["out_hidden_size"]), int(vision["num_position_embeddings"])
    if min(layers, hidden, heads) < 1 or hidden % (4 * heads):
        raise ConfigError(f"config.json: vision_config: num_heads: {heads}: must divide hidden_size {hidden} by fours")
    if out_size != model.hidden_size:
        raise ConfigError(f"config.json: vision_config: out_hidden_size: {out_size}: must be {model.hidden_size}")
    if positions < 1 or (side := math.isqrt(positions)) ** 2 != positions:
        raise ConfigError(f"config.json: vision_config: num_position_embeddings: {positions}: must be a square")
    head_dim, rope = hidden // heads, vision.get("rope_parameters") or {}
    if (kind := rope.get("rope_type", "axial")) != "axial":
        raise ConfigError(f"config.json: vision_config: rope_type: {kind!r} is not supported: only 'axial'")
    patches = Patches(
        size=int(vision["patch_size"]),
        frames=int(vision.get("temporal_patch_size", 2)),
        merge=int(vision.get("spatial_merge_size", 2)),
        side=side,
        taps=tuple(int(layer) for layer in vision.get("deepstack_visual_indexes") or ()),
    )
    encoder = ModelConfig(
        architecture=model.architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        vocab_size=1,
        norm_eps=1e-6,
        ropes=(RopeConfig(float(rope.get("rope_theta", 10_000.0))),),
        rotary=(0,) * layers,
        max_position=1,
        tie_word_embeddings=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        windows=(None,) * layers,
        attention_scale=float(head_dim**-0.5),
        packing=None,
        dtype=model.dtype,
        eos_ids=(),
        heads=tuple(Heads(heads, head_dim, layer) for layer in range(layers)),
        intermediate_sizes=(int(vision["intermediate_size"]),) * layers,
        attends=(True,) * layers,
        state_layers=(False,) * layers,
        last_norm=False,
        both_ways=True,
        layer_norm=True,
        norm_bias=True,
        activation="gelu",
        gated=False,
        rope_axes=tuple(1 + axis for axis in (0, 1) for _ in range(head_dim // 4)),
        patches=patches,
    )
    return Tower(encoder, encoder.ropes[0].theta, out_size)


FAMILIES: dict[str, Callable[[Raw, ModelConfig], Tower]] = {
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _qwen3_vl,
    "Qwen3_5ForConditionalGeneration": _qwen3_vl,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_vl,
}
"""Architectures whose towers the CPU engine computes."""
