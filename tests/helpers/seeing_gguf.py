"""GGUF files of the tiny models of `vision.py`, as llama.cpp's converter writes them: text model, and vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from tests.helpers.gguf import TOKENS, Edit, Floats, finish, name_map, write_gguf
from tests.helpers.vision import IN_TILES, PROCESSOR, gemma, idefics3, seer

MARKER = TOKENS.index("xyz")
MERGER = {"merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2"}
KINDS = ("F32", "F16", "BF16", "Q8_0")
GEMMA_TEXT: dict[str, Any] = {
    "num_hidden_layers": 7,
    "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
"""Settings of a Gemma 3 that a GGUF file has no keys for."""
_TOWERS = ("visual.", "vision_tower.", "multi_modal_projector.", "vision_model.", "connector.")
_KINDS = {"qwen3_vl": "qwen3vl_merger", "gemma3": "gemma3", "smolvlm": "idefics3"}
_SPECIAL = {
    "qwen3_vl": {MARKER: "<|image_pad|>"},
    "gemma3": {MARKER: "<image_soft_token>", MARKER - 1: "<start_of_image>", MARKER + 2: "<end_of_image>"},
    "smolvlm": {MARKER: "<image>", MARKER - 1: "<fake_token_around_image>"},
}
"""Tokens of images, in place of others of `TOKENS`."""


def seer_of_files(kind: str = "F32", family: str = "qwen3-vl", **tower: Any) -> Any:
    """Return a model whose tower's matrices have values that a GGUF file stores exactly in `kind`."""
    text: dict[str, Any] = {"vocab_size": len(TOKENS), "max_position_embeddings": 4096}
    if family == "gemma3":
        model = gemma(tower={"hidden_size": 64, "intermediate_size": 96, **tower}, **GEMMA_TEXT, **text)
    elif family == "smolvlm":
        model = idefics3(tower={"hidden_size": 64, "intermediate_size": 96, **tower}, **text)
    else:
        model = seer(tower={"intermediate_size": 64, **tower}, **text)
    for name, weight in model.model.named_parameters():
        if name.startswith(_TOWERS):
            stored = _kind_of(name, weight, kind)
            data = gguf.quantize(weight.detach().numpy(), stored)
            values = np.array(gguf.dequantize(data, stored), np.float32)
            with torch.no_grad():
                weight.copy_(torch.from_numpy(values).reshape(weight.shape))
    return model


def _kind_of(name: str, weight: torch.Tensor, kind: str) -> GGMLQuantizationType:
    if "input_projection" in name:  # of Gemma 3, which the converter writes so in each file
        return GGMLQuantizationType.F16
    is_plain = weight.ndim < 2 or "pos" in name or ("patch_embed" in name and kind == "Q8_0")
    return GGMLQuantizationType["F32" if is_plain else kind]


def write_text(file: Path, model: Any, edit: Edit | None = None) -> Path:
    """Write the text model of a Qwen3-VL, whose token of images is `MARKER`, of a Gemma 3 or of a SmolVLM."""
    tied = {"tie_word_embeddings": model.config.tie_word_embeddings}
    text = SimpleNamespace(**(model.config.text_config.to_dict() | tied))
    names = ((name, name.replace("language_model.", "").replace("text_model.", "")) for name in model.state_dict())
    weights = {own: name for name, own in names if not own.removeprefix("model.").startswith(_TOWERS)}
    weights = {own: model.state_dict()[name] for own, name in weights.items()}
    family = model.config.model_type

    def edited(writer: GGUFWriter) -> None:
        fields = writer.kv_data[0]
        if family == "qwen3_vl":
            writer.add_rope_dimension_sections([*text.rope_parameters["mrope_section"], 0])
            writer.add_uint32("qwen3vl.n_deepstack_layers", len(model.config.vision_config.deepstack_visual_indexes))
        fields["tokenizer.ggml.tokens"].value = [_SPECIAL[family].get(i, one) for i, one in enumerate(TOKENS)]
        for token in _SPECIAL[family]:
            fields["tokenizer.ggml.token_type"].value[token] = 3
        fields["tokenizer.ggml.merges"].value = ["Ġ 4"]
        if edit is not None:
            edit(writer)

    arch = {"qwen3_vl": "qwen3vl", "smolvlm": "llama"}.get(family, family)
    return write_gguf(file, SimpleNamespace(config=text, state_dict=lambda: weights), arch, edit=edited)


def write_tower(file: Path, model: Any, kind: str = "F32", edit: Edit | None = None) -> Path:
    """Write the tower of a Qwen3-VL, a Gemma 3 or a SmolVLM, its matrices as `kind`."""
    vision, writer = model.config.vision_config, GGUFWriter(file, "clip")
    is_siglip = model.config.model_type != "qwen3_vl"
    writer.add_clip_projector_type(_KINDS[model.config.model_type])
    writer.add_vision_projection_dim(model.config.text_config.hidden_size)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(depth := vision.num_hidden_layers if is_siglip else vision.depth)
    writer.add_vision_head_count(vision.num_attention_heads if is_siglip else vision.num_heads)
    writer.add_vision_image_mean(PROCESSOR["image_mean"])
    writer.add_vision_image_std(PROCESSOR["image_std"])
    writer.add_vision_use_gelu(True)
    writer.add_vision_attention_layernorm_eps(vision.layer_norm_eps if is_siglip else 1e-6)
    if model.config.model_type in IN_TILES:
        writer.add_vision_preproc_image_size(3 * vision.image_size)
    if is_siglip:
        writer.add_vision_image_size(vision.image_size)
        writer.add_vision_projector_scale_factor(2)
    else:
        writer.add_vision_spatial_merge_size(vision.spatial_merge_size)
        taps = vision.deepstack_visual_indexes
        writer.add_vision_is_deepstack_layers([layer in taps for layer in range(depth)])
    for name, weight in model.model.state_dict().items():
        if name.startswith(_TOWERS):
            stored = _kind_of(name, weight, kind)
            for own, values in _tensors_of(name, weight.numpy(), vision, depth):
                writer.add_tensor(own, gguf.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
    return finish(writer, file, edit)


def _tensors_of(name: str, values: Floats, vision: Any, depth: int) -> Iterator[tuple[str, Floats]]:
    """Yield the names and values of the GGUF file's tensors for one of transformers' tensors."""
    names = name_map(gguf.MODEL_ARCH.MMPROJ, depth)
    module, _, what = name.replace("_weight", ".weight").replace("tower.", "tower.vision_model.").rpartition(".")
    _, _, merger = module.partition("deepstack_merger_list.")
    if merger:  # which gguf-py names by their own number, the converter by that of a layer
        number, _, part = merger.partition(".")
        own = f"v.deepstack.{vision.deepstack_visual_indexes[int(number)]}.{part.removeprefix('linear_')}"
    else:
        own = MERGER.get(module.removeprefix("visual.")) or names.get_name(module) or names.get_name(f"model.{module}")
    if values.ndim == 5:
        yield from ((f"{own}.weight{end}", values[:, :, at]) for at, end in enumerate(("", ".1")))
    else:
        yield f"{own}.{what}", values + 1 if "soft_emb_norm" in name else values
