"""The vision tower of a GGUF model, which is in a file of its own (`mmproj-*.gguf`): its metadata as the fields that
config.json and preprocessor_config.json have for a folder of safetensors.

Invariants: every field that changes the computation is read or refused by its key; a file that does not belong to the
text model is refused before its tensors are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from minisgl.config import ConfigError
from minisgl.weights.gguf_config import Config, Fields, Shapes, check_shapes

_KEY = "clip.vision."
_EPSILON = 1e-6
_QWEN_MARKER, _QWEN_LEAST, _QWEN_MOST = "<|image_pad|>", 1 << 16, 1 << 24  # the file lacks the limits of pixels
_GEMMA_MARKER, *_GEMMA_AROUND = "<image_soft_token>", "<start_of_image>", "<end_of_image>"
_GEMMA_BLOCK = 4  # patches a side of a token, which the file lacks
_LAYERS_OF_BLIND_GEMMA = (18, 26)  # 270M and 1B
_TILES_MARKER, _TILES_AROUND = "<image>", "<fake_token_around_image>"
SEEING: Mapping[str, tuple[str, str]] = {
    "qwen3vl": ("Qwen3VLForConditionalGeneration", "qwen3vl_merger"),
    "qwen3vlmoe": ("Qwen3VLMoeForConditionalGeneration", "qwen3vl_merger"),
    "qwen35": ("Qwen3_5ForConditionalGeneration", "qwen3vl_merger"),
    "qwen35moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3vl_merger"),
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3"),
    "llama": ("SmolVLMForConditionalGeneration", "idefics3"),
}
"""Architectures of GGUF files that see with a tower: their name in config.json, and the tower's type."""


class _Described(NamedTuple):
    """A tower's metadata as fields of config.json and of preprocessor_config.json. `tokens`: the token that stands for
    an image, and those that the processor writes around it."""

    config: dict[str, Any]
    processor: dict[str, Any]
    tokens: tuple[str, ...]


def may_see(metadata: Mapping[str, Any], config: Config) -> bool:
    """Return True if a text model's GGUF file may have a vision tower in a file of its own."""
    match metadata["general.architecture"]:
        case "gemma3":
            return config["num_hidden_layers"] not in _LAYERS_OF_BLIND_GEMMA
        case "llama":
            return _TILES_AROUND in (metadata.get("tokenizer.ggml.tokens") or ())
        case architecture:
            return architecture in SEEING


def add_marker(metadata: dict[str, Any]) -> None:
    """Append the token that stands for an image to the metadata of a Gemma 3 that lacks it. It has no embedding:
    converters leave it out if config.json does not name the size of the vocabulary."""
    further = {"tokens": _GEMMA_MARKER, "token_type": 3, "scores": 0.0}
    lists = {name: metadata.get(f"tokenizer.ggml.{name}") for name in further}
    if metadata["general.architecture"] == "gemma3" and _GEMMA_MARKER not in (lists["tokens"] or ()):
        for name, values in lists.items():
            if isinstance(values, list):
                values.append(further[name])


def tower_files(text: Fields, config: Config, clip: Fields, shapes: Shapes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `config` of a text model with that of its tower, and its preprocessor_config.json. `text`, `clip`: the
    metadata of both files; `shapes`: those of the tower's tensors. Raises `ConfigError`."""
    if text.architecture not in SEEING:
        raise ConfigError(f"images: the architecture {text.architecture!r} has no tower here: only {', '.join(SEEING)}")
    named, kind = SEEING[text.architecture]
    key = f"{_KEY}projector_type" if clip.has(f"{_KEY}projector_type") else "clip.projector_type"
    if (found := clip.text(key)) != kind:
        raise ConfigError(f"{key}: {found!r}: must be {kind!r} for the architecture {text.architecture!r}")
    described = _READERS[kind](text, config, clip, shapes)
    tokens = text.texts("tokenizer.ggml.tokens")
    for token in described.tokens:
        if token not in tokens:
            raise ConfigError(f"tokenizer.ggml.tokens: has no {token}, which stands for an image or around one")
    seeing = {"architectures": [named], "image_token_id": tokens.index(described.tokens[0])}
    normed = {name: clip.reals(f"{_KEY}{name}") for name in ("image_mean", "image_std")}
    return {**config, **seeing, **described.config}, {**normed, **described.processor}


class _Encoder(NamedTuple):
    """Sizes of a tower's layers, as in its metadata."""

    layers: int
    hidden: int
    heads: int
    inner: int
    patch: int


def _encoder(config: Config, clip: Fields) -> _Encoder:
    """Return the sizes of a tower whose output is as wide as the text model. Raises `ConfigError`."""
    keys = ("block_count", "embedding_length", "attention.head_count", "feed_forward_length", "patch_size")
    sizes = _Encoder(*(clip.positive(_KEY + key) for key in keys))
    if (out := clip.positive(f"{_KEY}projection_dim")) != config["hidden_size"]:
        raise ConfigError(f"{_KEY}projection_dim: {out}: must be {config['hidden_size']}, as the text model's size")
    if not clip.flag("clip.use_gelu", False) or clip.flag("clip.use_silu", False):
        raise ConfigError("clip.use_gelu: must be true, and clip.use_silu false or missing")
    return sizes


def _sections(text: Fields) -> dict[str, Any]:
    """Return the RoPE pairs of each axis (time, row, column); a fourth section is empty."""
    key = text.own("rope.dimension_sections")
    sections = text.wholes(key)
    if len(sections) not in (3, 4) or any(sections[3:]):
        raise ConfigError(f"{key}: {sections}: must be those of three axes")
    return {"mrope_section": sections[:3], "mrope_interleaved": True}


def _qwen3(text: Fields, config: Config, clip: Fields, shapes: Shapes) -> _Described:
    """Return the tower of Qwen3-VL and Qwen3.5."""
    layers, hidden, heads, inner, patch = _encoder(config, clip)
    merge, out = clip.positive(f"{_KEY}spatial_merge_size", 2), config["hidden_size"]
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
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": len(frames),
        "size": {
            "shortest_edge": clip.positive(f"{_KEY}image_min_pixels", _QWEN_LEAST),
            "longest_edge": clip.positive(f"{_KEY}image_max_pixels", _QWEN_MOST),
        },
    }
    rope = {"rope_type": "default", **config.get("rope_scaling", {}), **_sections(text)}
    return _Described({"vision_config": vision, "rope_scaling": rope}, processor, (_QWEN_MARKER,))


def _gemma3(text: Fields, config: Config, clip: Fields, shapes: Shapes) -> _Described:
    """Return the tower of Gemma 3. The first files that were published have the names of an MLP's two matrices
    exchanged, which their shapes show."""
    layers, hidden, heads, inner, patch = _encoder(config, clip)
    pixels, block = (
        clip.positive(f"{_KEY}image_size"),
        clip.positive(key := f"{_KEY}projector.scale_factor", _GEMMA_BLOCK),
    )
    if pixels % patch:
        raise ConfigError(f"{_KEY}image_size: {pixels}: must be a multiple of the patch_size {patch}")
    if (side := pixels // patch) % block:
        raise ConfigError(f"{key}: {block}: must divide {side}, the patches in a row of an image")
    exchanged = shapes.get("v.blk.0.ffn_up.weight") == (hidden, inner) != (inner, hidden)
    last = f"v.blk.{layers - 1}.ffn_{'down' if exchanged else 'up'}.weight"
    of_projector = {"mm.soft_emb_norm.weight": (hidden,), "mm.input_projection.weight": (hidden, config["hidden_size"])}
    of_input = {"v.patch_embd.weight": (hidden, 3, patch, patch), "v.position_embd.weight": (side**2, hidden)}
    check_shapes(shapes, {**of_input, last: (inner, hidden), **of_projector})
    vision = {**_siglip(_Encoder(layers, hidden, heads, inner, patch), clip), "gguf_mlp_exchanged": exchanged}
    processor = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": pixels, "width": pixels}}
    fields = {"vision_config": vision, "mm_tokens_per_image": (side // block) ** 2}
    return _Described(fields, processor, (_GEMMA_MARKER, *_GEMMA_AROUND))


def _idefics3(text: Fields, config: Config, clip: Fields, shapes: Shapes) -> _Described:
    """Return the tower of SmolVLM."""
    sizes = layers, hidden, _, inner, patch = _encoder(config, clip)
    pixels, merge = clip.positive(f"{_KEY}image_size"), clip.positive(f"{_KEY}projector.scale_factor")
    joined = {"mm.model.fc.weight": (config["hidden_size"], hidden * merge**2)}
    of_input = {
        "v.patch_embd.weight": (hidden, 3, patch, patch),
        "v.position_embd.weight": ((pixels // patch) ** 2, hidden),
    }
    check_shapes(shapes, {**of_input, f"v.blk.{layers - 1}.ffn_up.weight": (inner, hidden), **joined})
    processor = {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": clip.positive(f"{_KEY}preproc_image_size")},
        "max_image_size": {"longest_edge": pixels},
    }
    fields = {"vision_config": _siglip(sizes, clip), "scale_factor": merge}
    return _Described(fields, processor, (_TILES_MARKER, _TILES_AROUND))


def _siglip(sizes: _Encoder, clip: Fields) -> dict[str, Any]:
    return {
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "patch_size": sizes.patch,
        "image_size": clip.positive(f"{_KEY}image_size"),
        "layer_norm_eps": clip.real(f"{_KEY}attention.layer_norm_epsilon", _EPSILON),
    }


_READERS: Mapping[str, Callable[[Fields, Config, Fields, Shapes], _Described]] = {
    "qwen3vl_merger": _qwen3,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
}
