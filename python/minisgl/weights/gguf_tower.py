"""The vision tower of a GGUF model, which is in a file of its own (`mmproj-*.gguf`): its metadata as the fields that
config.json and preprocessor_config.json have for a folder of safetensors.

Invariants: every field that changes the computation is read or refused by its key; a file that does not belong to the
text model is refused before its tensors are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from minisgl.config import ConfigError
from minisgl.weights.gguf_config import Config, Fields, Shapes, check_shapes

_KEY = "clip.vision."
_EPSILON = 1e-6
_QWEN_MARKER, _QWEN_LEAST, _QWEN_MOST = "<|image_pad|>", 1 << 16, 1 << 24  # the file lacks the limits of pixels
SEEING: Mapping[str, tuple[str, str]] = {
    "qwen3vl": ("Qwen3VLForConditionalGeneration", "qwen3vl_merger"),
    "qwen3vlmoe": ("Qwen3VLMoeForConditionalGeneration", "qwen3vl_merger"),
    "qwen35": ("Qwen3_5ForConditionalGeneration", "qwen3vl_merger"),
    "qwen35moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3vl_merger"),
}
"""Architectures of GGUF files that see with a tower: their name in config.json, and the tower's type."""


def tower_files(text: Fields, config: Config, clip: Fields, shapes: Shapes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `config` of a text model with that of its tower, and its preprocessor_config.json. `text`, `clip`: the
    metadata of both files; `shapes`: those of the tower's tensors. Raises `ConfigError`."""
    if text.architecture not in SEEING:
        raise ConfigError(f"images: the architecture {text.architecture!r} has no tower here: only {', '.join(SEEING)}")
    named, kind = SEEING[text.architecture]
    key = f"{_KEY}projector_type" if clip.has(f"{_KEY}projector_type") else "clip.projector_type"
    if (found := clip.text(key)) != kind:
        raise ConfigError(f"{key}: {found!r}: must be {kind!r} for the architecture {text.architecture!r}")
    vision, marker = _READERS[kind](text, config, clip, shapes)
    tokens = text.texts("tokenizer.ggml.tokens")
    if marker not in tokens:
        raise ConfigError(f"tokenizer.ggml.tokens: has no {marker}, which stands for an image")
    rope = {"rope_type": "default", **config.get("rope_scaling", {}), **_sections(text)}
    seeing = {"architectures": [named], "vision_config": vision, "image_token_id": tokens.index(marker)}
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "image_mean": clip.reals(f"{_KEY}image_mean"),
        "image_std": clip.reals(f"{_KEY}image_std"),
        "size": {
            "shortest_edge": clip.positive(f"{_KEY}image_min_pixels", _QWEN_LEAST),
            "longest_edge": clip.positive(f"{_KEY}image_max_pixels", _QWEN_MOST),
        },
    }
    return {**config, **seeing, "rope_scaling": rope}, processor


def _sections(text: Fields) -> dict[str, Any]:
    """Return the RoPE pairs of each axis (time, row, column); a fourth section is empty."""
    key = text.own("rope.dimension_sections")
    sections = text.wholes(key)
    if len(sections) not in (3, 4) or any(sections[3:]):
        raise ConfigError(f"{key}: {sections}: must be those of three axes")
    return {"mrope_section": sections[:3], "mrope_interleaved": True}


def _qwen3(text: Fields, config: Config, clip: Fields, shapes: Shapes) -> tuple[dict[str, Any], str]:
    """Return the `vision_config` of Qwen3-VL and Qwen3.5, and the token that stands for an image."""
    hidden, heads, layers = (
        clip.positive(_KEY + key) for key in ("embedding_length", "attention.head_count", "block_count")
    )
    patch, merge = clip.positive(f"{_KEY}patch_size"), clip.positive(f"{_KEY}spatial_merge_size", 2)
    inner, out = clip.positive(f"{_KEY}feed_forward_length"), clip.positive(f"{_KEY}projection_dim")
    if out != config["hidden_size"]:
        raise ConfigError(f"{_KEY}projection_dim: {out}: must be {config['hidden_size']}, as the text model's size")
    if not clip.flag("clip.use_gelu", False) or clip.flag("clip.use_silu", False):
        raise ConfigError("clip.use_gelu: must be true, and clip.use_silu false or missing")
    epsilon = clip.real(key := f"{_KEY}attention.layer_norm_epsilon", _EPSILON)
    # converters write the text model's there, but the tower's is always this one
    if not any(math.isclose(epsilon, one, rel_tol=1e-3) for one in (_EPSILON, config["rms_norm_eps"])):
        raise ConfigError(f"{key}: {epsilon:g}: must be {_EPSILON:g}")
    deep = clip.flags(key) if clip.has(key := f"{_KEY}is_deepstack_layers") else []
    taps = [layer for layer, is_deep in enumerate(deep) if is_deep]
    if len(taps) != (wanted := max(text.whole(text.own("n_deepstack_layers"), 0), 0)):
        raise ConfigError(f"{key}: {len(taps)} layers: must be {wanted}, as the text model's n_deepstack_layers")
    positions, joined = shapes.get("v.position_embd.weight", (0,))[0], hidden * merge**2
    frames = dict.fromkeys(("v.patch_embd.weight", "v.patch_embd.weight.1"), (hidden, 3, patch, patch))
    last = {f"v.blk.{layers - 1}.ffn_up.weight": (inner, hidden), "mm.2.weight": (out, joined)}
    check_shapes(shapes, {**frames, "v.position_embd.weight": (positions, hidden), **last})
    vision = {
        "depth": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_heads": heads,
        "patch_size": patch,
        "spatial_merge_size": merge,
        "temporal_patch_size": len(frames),
        "out_hidden_size": out,
        "num_position_embeddings": positions,
        "deepstack_visual_indexes": taps,
    }
    return vision, _QWEN_MARKER


_READERS: Mapping[str, Callable[[Fields, Config, Fields, Shapes], tuple[dict[str, Any], str]]] = {
    "qwen3vl_merger": _qwen3,
}
