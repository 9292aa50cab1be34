"""Tiny random models that see, made by transformers, and prompts with images for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl.prompt_image import PromptImage, digest_of, virtual_ids
from minisgl.step import Int32Array
from tests.helpers.models import randomised, save
from tests.helpers.variants import MODELS

IMAGE_ID, VIDEO_ID, START_ID, END_ID = 127, 126, 125, 124
PATCH, MERGE = 4, 2
_TEXT = {
    "initializer_range": 0.15,
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_TOWER = {
    "initializer_range": 0.15,
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
}
_HALF = {
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
_DEEP = {"deepstack_visual_indexes": [0, 2]}
_HEADS_OF_72 = {"hidden_size": 144}  # the size of published towers
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl": ("Qwen3VLForConditionalGeneration", {}, _DEEP),
    "qwen3-vl-moe": ("Qwen3VLMoeForConditionalGeneration", _EXPERTS, _DEEP),
    "qwen3.5": ("Qwen3_5ForConditionalGeneration", MODELS["qwen3.5-that-sees"].config | _HALF, _HEADS_OF_72),
    "qwen3.5-moe": ("Qwen3_5MoeForConditionalGeneration", MODELS["qwen3.5-moe-that-sees"].config | _HALF, {}),
}
"""Families with their class in transformers, and what differs from `_TEXT` and `_TOWER`."""
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
    "size": {"shortest_edge": 64, "longest_edge": 65536},
}


_GEMMA_TEXT = _TEXT | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": 9,  # less than an image
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
IN_TILES = ("idefics3", "smolvlm")
_SIGLIP = {
    "initializer_range": 0.15,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": PATCH,
    "image_size": 8 * PATCH,
    "vision_use_head": False,
}


def gemma(*, tower: Mapping[str, Any] | None = None, **text: Any) -> Any:
    """Return a tiny Gemma 3, in float32, whose images have 8 x 8 patches and 16 tokens. `tower`, `text`: settings."""
    import transformers

    config = transformers.Gemma3Config(
        text_config=_GEMMA_TEXT | text,
        vision_config={**_SIGLIP, **(tower or {})},
        mm_tokens_per_image=16,
        image_token_id=IMAGE_ID,
        boi_token_index=START_ID,
        eoi_token_index=END_ID,
    )
    torch.manual_seed(7)
    model = randomised(transformers.Gemma3ForConditionalGeneration(config))
    with torch.no_grad():  # transformers makes it zero
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(0.0, 0.5)
    return model


def idefics3(
    architecture: str = "SmolVLMForConditionalGeneration", *, tower: Mapping[str, Any] | None = None, **text: Any
) -> Any:
    """Return a tiny Idefics 3 or SmolVLM, in float32, whose tiles have 8 x 8 patches and 16 tokens. `tower`, `text`:
    settings."""
    import transformers

    kind = getattr(transformers, architecture)
    rope = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
    config = kind.config_class(
        text_config=_TEXT | rope | text,
        vision_config={**{name: one for name, one in _SIGLIP.items() if name != "vision_use_head"}, **(tower or {})},
        scale_factor=MERGE,
        image_token_id=IMAGE_ID,
    )
    torch.manual_seed(7)
    return randomised(kind(config))


def seer(family: str = "qwen3-vl", *, tower: Mapping[str, Any] | None = None, **text: Any) -> Any:
    """Return a tiny model that sees, in float32. `tower`, `text`: further settings of its tower and its text model."""
    import transformers

    architecture, of_text, of_tower = FAMILIES[family]
    kind = getattr(transformers, architecture)
    config = kind.config_class(
        text_config=_TEXT | of_text | text,
        vision_config=_TOWER | of_tower | (tower or {}),
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        vision_start_token_id=START_ID,
        vision_end_token_id=END_ID,
    )
    torch.manual_seed(7)
    return randomised(kind(config))


def saved(model: Any, folder: Path) -> Path:
    """Save a model with its image processor."""
    save(model, folder)
    processor: dict[str, Any] = PROCESSOR
    if model.config.model_type == "gemma3":
        side = model.config.vision_config.image_size
        own = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": side, "width": side}}
        processor = own | {name: processor[name] for name in ("image_mean", "image_std")}
    elif model.config.model_type in IN_TILES:
        tile = model.config.vision_config.image_size
        own = {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 3 * tile}}
        own["max_image_size"] = {"longest_edge": tile}
        processor = own | {name: processor[name] for name in ("image_mean", "image_std")}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return folder


def random_image(rows: int, columns: int, seed: int = 0) -> PromptImage:
    """Return an image of `rows` x `columns` patches, whose place in a prompt is still open."""
    rng = np.random.default_rng((rows, columns, seed))
    pixels = rng.integers(0, 256, rows * columns * 3 * PATCH**2, np.uint8).tobytes()
    grid = (rows, columns)
    return PromptImage(digest_of("tiny", grid, pixels), 0, rows * columns // MERGE**2, grid, pixels)


def prompt_of(parts: Sequence[int | PromptImage], seed: int = 0) -> tuple[Int32Array, tuple[PromptImage, ...]]:
    """Return the ids of a prompt and its images. `parts`: images, and counts of random tokens between them."""
    rng, ids, images = np.random.default_rng(seed), list[Int32Array](), list[PromptImage]()
    for part in parts:
        if isinstance(part, PromptImage):
            start = sum(map(len, ids))
            images.append(PromptImage(part.digest, start, part.num_tokens, part.grid, part.pixels))
            ids.append(virtual_ids(part.digest, part.num_tokens))
        else:
            ids.append(rng.integers(3, 120, part, np.int32))
    return np.concatenate(ids).astype(np.int32), tuple(images)


def their_logits(model: Any, ids: Int32Array, images: Sequence[PromptImage]) -> torch.Tensor:
    """Return transformers' logits at each position. Pixels are rescaled and normalised as its processors do it."""
    seen = torch.from_numpy(np.where(ids >= 1 << 30, IMAGE_ID, ids).astype(np.int64))[None]
    mean, std = (np.array(PROCESSOR[name], np.float32)[:, None, None, None] for name in ("image_mean", "image_std"))
    values = list[Any]()
    for image in images:
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(-1, 3, 1, PATCH, PATCH)
        one = ((pixels.astype(np.float64) * (1 / 255)).astype(np.float32) - mean) / std
        if model.config.model_type in ("gemma3", *IN_TILES):
            blocks = one.reshape(image.grid[0] // MERGE, image.grid[1] // MERGE, MERGE, MERGE, 3, PATCH, PATCH)
            values.append(blocks.transpose(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, image.grid[0] * PATCH, -1))
        else:
            values.append(np.repeat(one, 2, axis=2).reshape(len(pixels), -1))
    given: dict[str, Any] = {}
    if images and model.config.model_type == "gemma3":
        given = {"pixel_values": torch.from_numpy(np.concatenate(values))}
    elif images and model.config.model_type in IN_TILES:
        given = {"pixel_values": torch.from_numpy(np.concatenate(values))[None]}
    elif images:
        grids = [(1, *image.grid) for image in images]
        given = {"pixel_values": torch.from_numpy(np.concatenate(values)), "image_grid_thw": torch.tensor(grids)}
    with torch.inference_mode():
        name = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
        kinds = {} if model.config.model_type in IN_TILES else {name: (seen == IMAGE_ID).int()}
        found: torch.Tensor = model(input_ids=seen, **kinds, **given).logits[0]
    return found
