"""GGUF files of the tiny models of `vision.py`, as llama.cpp's converter writes them: text model, and vision tower."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from tests.helpers.gguf import TOKENS, Edit, write_gguf
from tests.helpers.vision import PROCESSOR, seer

MARKER = TOKENS.index("xyz")
MERGER = {"merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2"}
KINDS = ("F32", "F16", "BF16", "Q8_0")


def seer_of_files(kind: str = "F32", **tower: Any) -> Any:
    """Return a model whose tower's matrices have values that a GGUF file stores exactly in `kind`."""
    model = seer(vocab_size=len(TOKENS), max_position_embeddings=4096, tower={"intermediate_size": 64, **tower})
    for name, weight in model.model.visual.named_parameters():
        stored = _kind_of(name, weight, kind)
        data = gguf.quantize(weight.detach().numpy(), stored)
        with torch.no_grad():
            weight.copy_(torch.from_numpy(np.array(gguf.dequantize(data, stored), np.float32)).reshape(weight.shape))
    return model


def _kind_of(name: str, weight: torch.Tensor, kind: str) -> GGMLQuantizationType:
    is_plain = weight.ndim < 2 or "pos_embed" in name or ("patch_embed" in name and kind == "Q8_0")
    return GGMLQuantizationType["F32" if is_plain else kind]


def write_text(file: Path, model: Any, edit: Edit | None = None) -> Path:
    """Write the text model of a Qwen3-VL. The token of images is `MARKER`."""
    text = SimpleNamespace(**model.config.text_config.to_dict(), tie_word_embeddings=model.config.tie_word_embeddings)
    weights = {name.replace("language_model.", ""): one for name, one in model.state_dict().items()}
    weights = {name: one for name, one in weights.items() if "visual." not in name}

    def edited(writer: GGUFWriter) -> None:
        sections = [*text.rope_parameters["mrope_section"], 0]
        writer.add_rope_dimension_sections(sections)
        writer.add_uint32("qwen3vl.n_deepstack_layers", len(model.config.vision_config.deepstack_visual_indexes))
        fields = writer.kv_data[0]
        fields["tokenizer.ggml.tokens"].value = ["<|image_pad|>" if one == "xyz" else one for one in TOKENS]
        fields["tokenizer.ggml.token_type"].value[MARKER] = 3
        if edit is not None:
            edit(writer)

    return write_gguf(file, SimpleNamespace(config=text, state_dict=lambda: weights), "qwen3vl", edit=edited)


def write_tower(file: Path, model: Any, kind: str = "F32", edit: Edit | None = None) -> Path:
    """Write the tower of a Qwen3-VL, its matrices as `kind`."""
    vision, writer = model.config.vision_config, GGUFWriter(file, "clip")
    writer.add_clip_projector_type("qwen3vl_merger")
    writer.add_vision_projection_dim(vision.out_hidden_size)
    writer.add_vision_patch_size(vision.patch_size)
    writer.add_vision_embedding_length(vision.hidden_size)
    writer.add_vision_feed_forward_length(vision.intermediate_size)
    writer.add_vision_block_count(vision.depth)
    writer.add_vision_head_count(vision.num_heads)
    writer.add_vision_image_mean(PROCESSOR["image_mean"])
    writer.add_vision_image_std(PROCESSOR["image_std"])
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(vision.spatial_merge_size)
    writer.add_vision_attention_layernorm_eps(1e-6)
    taps = vision.deepstack_visual_indexes
    writer.add_vision_is_deepstack_layers([layer in taps for layer in range(vision.depth)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.depth)
    for name, weight in model.model.visual.state_dict().items():
        module, _, what = name.rpartition(".")
        _, _, merger = module.partition("deepstack_merger_list.")
        if merger:  # which gguf-py names by their own number, the converter by that of a layer
            number, _, part = merger.partition(".")
            module = f"v.deepstack.{taps[int(number)]}.{part.removeprefix('linear_')}"
        else:
            module = MERGER.get(module) or names.get_name(f"visual.{module}")
        stored, values = _kind_of(name, weight, kind), weight.numpy()
        frames = {f"{module}.{what}": values}
        if values.ndim == 5:
            frames = {f"{module}.weight{end}": values[:, :, at] for at, end in enumerate(("", ".1"))}
        for own, frame in frames.items():
            writer.add_tensor(own, gguf.quantize(np.ascontiguousarray(frame), stored), raw_dtype=stored)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
