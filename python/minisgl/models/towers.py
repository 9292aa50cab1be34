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
_QWEN = {
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
_QWEN_GGUF = {
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
_SIGLIP = {
    "patches": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
    "attention_norm": "encoder.layers.{layer}.layer_norm1",
    "q": "encoder.layers.{layer}.self_attn.q_proj",
    "k": "encoder.layers.{layer}.self_attn.k_proj",
    "v": "encoder.layers.{layer}.self_attn.v_proj",
    "out": "encoder.layers.{layer}.self_attn.out_proj",
    "mlp_norm": "encoder.layers.{layer}.layer_norm2",
    "up": "encoder.layers.{layer}.mlp.fc1",
    "down": "encoder.layers.{layer}.mlp.fc2",
    "norm": "post_layernorm",
}
_SIGLIP_GGUF = {
    **{part: _QWEN_GGUF[part] for part in ("patches", "positions", "attention_norm", "out", "mlp_norm", "up", "down")},
    **{part: f"v.blk.{{layer}}.attn_{part}" for part in ("q", "k", "v")},
    "norm": "v.post_ln",
    "merger_norm": "mm.soft_emb_norm",
    "merger_down": "mm.input_projection",
}
_GEMMA = {"merger_norm": "mm_soft_emb_norm", "merger_down": "mm_input_projection_weight."}  # the dot: the whole name
_IDEFICS3, _IDEFICS3_GGUF = {"merger_down": "modality_projection.proj"}, {"merger_down": "mm.model.fc"}
IDEFICS3 = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}
"""Values that config.json leaves out, as in the published SmolVLM models."""
_OF_THE_WHOLE = ("model.", "")  # prefixes of all names, by transformers' versions


def _named(names: Mapping[str, str], *prefixes: str) -> dict[str, list[str]]:
    return {
        part: [f"{of}{prefix}{name}" for prefix in prefixes for of in _OF_THE_WHOLE] for part, name in names.items()
    }


@dataclass(frozen=True, slots=True)
class Tower:
    """The vision tower of a model. `layers` describes its encoder, `names` its tensors. With RoPE a position has two
    axes, so half of a head's pairs rotate by the row of a patch and half by its column. `both_ways`: the tokens of an
    image attend to each other in both directions in the text model."""

    layers: ModelConfig
    names: Mapping[str, list[str]]
    out_size: int
    both_ways: bool = False

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
        halves = [inverse_frequencies(rope, self.layers.head_dim // 2, 1).tolist() for rope in self.layers.ropes]
        flags = ("interleaved", "gate_up_in_turns", "grouped", "tiled", "transposed")
        return {
            "model": computed(self.layers, 1) | {"inverse_frequencies": [half + half for half in halves]},
            "names": {"names": self.names, "buffers": (), **dict.fromkeys(flags, False)},
            "out_size": self.out_size,
            "both_ways": self.both_ways,
        }


def find_tower(raw: Raw, model: ModelConfig) -> Tower | None:
    """Return the vision tower that config.json describes, None if its family has none that we know. Raises
    `ConfigError` if it is impossible."""
    describe = FAMILIES.get(model.architecture)
    vision = raw.get("vision_config")
    if describe is None or not isinstance(vision, Mapping):
        return None
    try:
        return describe(vision, model, raw)
    except KeyError as error:
        raise ConfigError(f"config.json: vision_config: {error.args[0]}: missing") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json: vision_config: {error}") from error


def with_images(model: ModelConfig, raw: Raw, tower: Tower) -> ModelConfig:
    """Return the text model's description with what it does to images. Raises `ConfigError`."""
    if not tower.layers.ropes:  # then a position of the text model has one axis
        return model
    text = raw.get("text_config") or raw
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    pairs = model.rotary_dims[0] // 2
    sections = [int(size) for size in rope.get("mrope_section") or (24, 20, 20)]
    if len(model.ropes) != 1 or len(sections) != 3 or sum(sections) != pairs or rope.get("mrope_interleaved") is False:
        raise ConfigError(f"config.json: mrope_section: {sections}: must be three numbers with the sum {pairs}")
    # the axes take turns until a section is used up; the rest are of the time
    axes = tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(pairs))
    return replace(model, rope_axes=axes, deep_features=len(tower.patches.taps))


def _qwen3_vl(vision: Raw, model: ModelConfig, _: Raw) -> Tower:
    """Return the tower of Qwen3-VL and Qwen3.5: pre-norm layers, learned positions for a square that is resampled."""
    _only(vision, hidden_act="gelu_pytorch_tanh", in_channels=3)
    layers, hidden, heads = int(vision["depth"]), int(vision["hidden_size"]), int(vision["num_heads"])
    out_size, positions = int(vision["out_hidden_size"]), int(vision["num_position_embeddings"])
    if min(layers, hidden, heads) < 1 or hidden % (4 * heads):
        raise ConfigError(f"config.json: vision_config: num_heads: {heads}: must divide hidden_size {hidden} by fours")
    if out_size != model.hidden_size:
        raise ConfigError(f"config.json: vision_config: out_hidden_size: {out_size}: must be {model.hidden_size}")
    if positions < 1 or (side := math.isqrt(positions)) ** 2 != positions:
        raise ConfigError(f"config.json: vision_config: num_position_embeddings: {positions}: must be a square")
    rope = vision.get("rope_parameters") or {}
    if (kind := rope.get("rope_type", "axial")) != "axial":
        raise ConfigError(f"config.json: vision_config: rope_type: {kind!r} is not supported: only 'axial'")
    patches = Patches(
        size=int(vision["patch_size"]),
        frames=int(vision.get("temporal_patch_size", 2)),
        merge=int(vision.get("spatial_merge_size", 2)),
        side=side,
        taps=tuple(int(layer) for layer in vision.get("deepstack_visual_indexes") or ()),
    )
    encoder = replace(
        _encoder(model, hidden, layers, heads, int(vision["intermediate_size"]), patches),
        ropes=(RopeConfig(float(rope.get("rope_theta", 10_000.0))),),
        rotary=(0,) * layers,
        last_norm=False,
        rope_axes=tuple(1 + axis for axis in (0, 1) for _ in range(hidden // heads // 4)),
    )
    names = _named(_QWEN, "visual.")
    return Tower(encoder, {part: [*names[part], _QWEN_GGUF[part]] for part in names}, out_size)


def _gemma3(vision: Raw, model: ModelConfig, raw: Raw) -> Tower:
    """Return the tower of Gemma 3: SigLIP on squares of one size, whose output is averaged over blocks of patches."""
    encoder, patches = _siglip(vision, model)
    tokens, side = int(raw.get("mm_tokens_per_image", 256)), patches.side
    across = math.isqrt(max(0, tokens))
    if not across or across**2 != tokens or side * patches.size != int(vision["image_size"]) or side % across:
        raise ConfigError(f"config.json: mm_tokens_per_image: {tokens}: must be a square that divides {side} x {side}")
    names = _named(_SIGLIP, "vision_tower.vision_model.", "vision_tower.") | _named(_GEMMA, "multi_modal_projector.")
    in_gguf = dict(_SIGLIP_GGUF)
    if vision.get("gguf_mlp_exchanged"):
        in_gguf["up"], in_gguf["down"] = in_gguf["down"], in_gguf["up"]
    names = {part: [*names[part], in_gguf[part]] for part in names}
    encoder = replace(encoder, patches=replace(patches, merge=side // across))
    return Tower(encoder, names, model.hidden_size, both_ways=True)


def _idefics3(vision: Raw, model: ModelConfig, raw: Raw) -> Tower:
    """Return the tower of Idefics 3 and SmolVLM: SigLIP on tiles of one size, and a matrix of joined blocks of patches.
    Pixels behind the last whole patch are left out. transformers rounds positions in 32 bits, so that in towers of some
    sizes (not 26, 27 and 32 patches, the published ones) a patch has its neighbour's position; here it does not."""
    encoder, patches = _siglip({**IDEFICS3, **vision}, model)
    merge, side = int(raw.get("scale_factor", 2)), patches.side
    if merge < 1 or side < 1 or side % merge:
        raise ConfigError(f"config.json: scale_factor: {merge}: must divide {side}, the patches in a row of a tile")
    encoder = replace(encoder, patches=replace(patches, merge=merge))
    names, in_gguf = _named(_SIGLIP, "vision_model.") | _named(_IDEFICS3, "connector."), _SIGLIP_GGUF | _IDEFICS3_GGUF
    return Tower(encoder, {part: [*names[part], in_gguf[part]] for part in names}, model.hidden_size)


def _siglip(vision: Raw, model: ModelConfig) -> tuple[ModelConfig, Patches]:
    """Return SigLIP's encoder and its patches, each of which is a token."""
    _only(vision, hidden_act="gelu_pytorch_tanh", num_channels=3)
    layers, hidden = int(vision["num_hidden_layers"]), int(vision["hidden_size"])
    heads, size = int(vision["num_attention_heads"]), int(vision["patch_size"])
    if min(layers, hidden, heads, size) < 1 or hidden % heads:
        sizes = f"{layers} layers of {heads} heads and {hidden} values, patches of {size}"
        raise ConfigError(f"config.json: vision_config: {sizes}: must be 1 at least, and heads divide hidden_size")
    patches = Patches(size=size, frames=1, merge=1, side=int(vision["image_size"]) // size, taps=())
    encoder = _encoder(model, hidden, layers, heads, int(vision["intermediate_size"]), patches)
    return replace(encoder, norm_eps=float(vision.get("layer_norm_eps", 1e-6))), patches


def _only(vision: Raw, **supported: Any) -> None:
    """Raise `ConfigError` if a field has another value than the only one that is supported."""
    for name, only in supported.items():
        if (value := vision.get(name, only)) != only:
            raise ConfigError(f"config.json: vision_config: {name}: {value!r} is not supported: only {only!r}")


def _encoder(model: ModelConfig, hidden: int, layers: int, heads: int, inner: int, patches: Patches) -> ModelConfig:
    """Return an encoder with pre-norm layers, biases everywhere, GELU, and no RoPE."""
    head_dim = hidden // heads
    return ModelConfig(
        architecture=model.architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        vocab_size=1,
        norm_eps=1e-6,
        ropes=(),
        rotary=(None,) * layers,
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
        intermediate_sizes=(inner,) * layers,
        attends=(True,) * layers,
        state_layers=(False,) * layers,
        both_ways=True,
        layer_norm=True,
        norm_bias=True,
        activation="gelu",
        gated=False,
        patches=patches,
    )


FAMILIES: dict[str, Callable[[Raw, ModelConfig, Raw], Tower]] = {
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _qwen3_vl,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Idefics3ForConditionalGeneration": _idefics3,
    "SmolVLMForConditionalGeneration": _idefics3,
    "Qwen3_5ForConditionalGeneration": _qwen3_vl,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_vl,
}
"""Architectures whose towers the CPU engine computes."""
