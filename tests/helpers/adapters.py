"""Tiny random LoRA adapters in peft's file format, merged into transformers' weights for comparison: W + scale * B A.

peft itself is no dependency; `tests/engine/test_adapters_peft.py` compares with it where it is installed.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class TinyAdapter:
    """Random adapter, strong enough to change outputs, for the layers whose names end with one of `targets`."""

    def __init__(
        self,
        model: Any,
        seed: int,
        *,
        rank: int = 3,
        alpha: float = 6.0,
        targets: Sequence[str] = ALL,
        rslora: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * 0.15

        self.config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": alpha,
            "use_rslora": rslora,
            "target_modules": sorted(targets),
            "bias": "none",
            "modules_to_save": None,
            "fan_in_fan_out": False,
        }
        self.scale = alpha / (math.sqrt(rank) if rslora else rank)
        self.pairs = {
            name: (random(rank, layer.in_features), random(layer.out_features, rank))
            for name, layer in model.named_modules()
            if name.split(".")[-1] in targets and isinstance(layer, torch.nn.Linear)
        }

    def save(self, folder: Path, *, dtype: torch.dtype = torch.float32, **config: object) -> Path:
        """Write the adapter to a new folder and return it. `config`: further fields of adapter_config.json."""
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.config | config))
        save_file(self.tensors(dtype), folder / "adapter_model.safetensors")
        return folder

    def tensors(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, (a, b) in self.pairs.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
            tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
        return tensors

    def merged(self, model: Any) -> Any:
        """Return a copy of `model` with the adapter merged into its weights."""
        changed = copy.deepcopy(model)
        with torch.no_grad():
            for name, (a, b) in self.pairs.items():
                changed.get_submodule(name).weight += self.scale * (b @ a)
        return changed
