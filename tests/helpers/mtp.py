"""Tiny checkpoints with an MTP layer (multi-token prediction), which transformers computes as `MtpModel`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models import randomised, save, tiny_model

MTP_VARIANTS = ("glm4-moe", "deepseek3-yarn")


def mtp_model(model: Any) -> Any:
    """Return a random MTP layer for a model; skips the test where transformers has none."""
    modeling = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(modeling, "MtpModel"):
        pytest.skip("this release of transformers has no MtpModel")
    mtp = randomised(modeling.MtpModel(model, 1))
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
        return model.lm_head(last)[0]  # type: ignore[no-any-return]


def mtp_folder(variant: str, folder: Path, **changes: Any) -> tuple[Any, Any, Path]:
    """Return a tiny model, its MTP layer, and a folder with both."""
    model = tiny_model(variant, **changes)
    mtp = mtp_model(model)
    return model, mtp, save_mtp(model, mtp, folder)
