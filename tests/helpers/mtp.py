"""Tiny checkpoints with an MTP layer (multi-token prediction), which transformers computes as `MtpModel`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.helpers.gguf import TOKENS, add_sizes, add_vocabulary, finish, name_map
from tests.helpers.models import randomised, save, tiny_model

MTP_VARIANTS = ("glm4-moe", "deepseek3-yarn")
GGUF_CONFIG: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    "vocab_size": len(TOKENS),
}
"""Settings of a model that `write_mtp_gguf` can store."""


def mtp_model(model: Any) -> Any:
    """Return a random MTP layer for a model."""
    from transformers.modeling_layers import MtpModel

    mtp = randomised(MtpModel(model, 1))
    with torch.no_grad():
        for name, parameter in mtp.named_parameters():
            if ".experts." in name or name.endswith("mlp.gate.weight"):  # transformers leaves them as they are
                parameter.normal_(0.0, 0.15)
    return mtp


def save_mtp(model: Any, mtp: Any, folder: Path) -> Path:
    """Save a model and its MTP layer as they are published: the layer follows the last one."""
    save(model, folder)
    stored = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    for name, value in (dict(mtp.named_parameters()) | dict(mtp.named_buffers())).items():
        if not name.startswith("layers.0."):
            continue
        part = name.removeprefix("layers.0.").removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if ".experts." not in part:
            stored[prefix + part] = value
            continue
        for expert, matrix in enumerate(value):
            halves = {"gate_proj": matrix[: len(matrix) // 2], "up_proj": matrix[len(matrix) // 2 :]}
            for own, rows in (halves if part.endswith("gate_up_proj") else {"down_proj": matrix}).items():
                stored[f"{prefix}mlp.experts.{expert}.{own}.weight"] = rows
    stored[f"{prefix}embed_tokens.weight"] = stored["model.embed_tokens.weight"]  # published ones have copies
    stored[f"{prefix}shared_head.head.weight"] = stored["lm_head.weight"]
    save_file({name: value.detach().clone() for name, value in stored.items()}, folder / "model.safetensors")
    return folder


def mtp_logits(model: Any, mtp: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return the MTP layer's logits at each of `ids` but the last: of the token after the next."""
    tokens = torch.tensor([list(ids)])
    with torch.inference_mode():
        hidden = model(tokens, output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(1, len(ids))[None]
        last = mtp.forward_layer(0, hidden[:, :-1], positions, None, input_ids=tokens[:, 1:])
        logits: torch.Tensor = model.lm_head(last)[0]
    return logits


def mtp_folder(variant: str, folder: Path, **changes: Any) -> tuple[Any, Any, Path]:
    """Return a tiny model, its MTP layer, and a folder with both; skips the test where transformers has none."""
    if not hasattr(pytest.importorskip("transformers.modeling_layers"), "MtpModel"):
        pytest.skip(f"transformers {transformers.__version__} has no MtpModel")
    model = tiny_model(variant, **changes)
    mtp = mtp_model(model)
    return model, mtp, save_mtp(model, mtp, folder)


def write_mtp_gguf(model: Any, stored: dict[str, torch.Tensor], file: Path) -> Path:
    """Write the tensors of a Glm4Moe checkpoint with an MTP layer as llama.cpp's converter does, by gguf-py's names."""
    config, layers = model.config, model.config.num_hidden_layers + 1
    writer = gguf.GGUFWriter(file, "glm4moe")
    head_dim = add_sizes(writer, config, 1)
    writer.add_nextn_predict_layers(1)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim // 2)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    add_vocabulary(writer)
    names, experts = name_map(gguf.MODEL_ARCH.GLM4_MOE, layers), dict[str, list[Any]]()
    for name, value in stored.items():
        if ".experts." in name:
            layer, part = name.split(".")[2], name.split(".")[6].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", []).append(
                (int(name.split(".")[5]), value.numpy())
            )
        else:
            own = name.replace("e_score_correction_bias", "e_score_correction.bias")
            writer.add_tensor(names.get_name(own, (".weight", ".bias")), value.numpy())
    for name, matrices in experts.items():
        writer.add_tensor(name, np.stack([matrix for _, matrix in sorted(matrices, key=lambda one: one[0])]))
    return finish(writer, file)
