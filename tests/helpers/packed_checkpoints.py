"""Tiny checkpoints with packed linear layers, in each published quantization format, and the weights they mean.

The packers are written from the formats' descriptions, value by value where it is short enough, and share no code with
the reader: AutoAWQ's and AutoGPTQ's layouts, compressed-tensors' `pack_to_int32`, DeepSeek's blocks of float8.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Format:
    """Quantization format. `pack` returns the tensors of a layer's weight (by the ends of their names) and the weight
    they represent. `config`: quantization_config. `layers`: name endings of the packed layers."""

    config: dict[str, Any]
    pack: Callable[[Tensor], tuple[Tensors, Tensor]]
    layers: tuple[str, ...] = LINEAR
    more: Mapping[str, Any] = field(default_factory=dict)


def _nibbles(values: list[int], bits: int) -> int:
    """Pack values into a signed int32, the first value in the lowest bits."""
    word = sum(value << bits * i for i, value in enumerate(values))
    return word - (1 << 32) if word >= 1 << 31 else word


def _along_columns(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack [a, b] to [a, b * bits / 32]; field i of a word holds its column `order[i]`."""
    count = 32 // bits
    order = order or tuple(range(count))
    rows = []
    for given in values.tolist():
        row = given + [0] * (-len(given) % count)
        rows.append([_nibbles([row[at + i] for i in order], bits) for at in range(0, len(row), count)])
    return torch.tensor(rows, dtype=torch.int32)


def _rounded(weight: Tensor, group: int, bits: int, symmetric: bool, index: Tensor | None = None) -> tuple[Tensor, ...]:
    """Quantize a weight: return integers [out, in], scales and zero points [out, groups], each input's group."""
    out, columns = weight.shape
    group = columns if group < 0 else group
    index = torch.arange(columns) // group if index is None else index
    scales, zeros = torch.empty(out, columns // group), torch.empty(out, columns // group)
    for g in range(columns // group):
        part, most = weight[:, index == g], 2**bits - 1
        if symmetric:
            scales[:, g] = part.abs().amax(1) * 2 / most
            zeros[:, g] = 2 ** (bits - 1)
        else:
            least = part.amin(1).clamp(max=0)
            scales[:, g] = (part.amax(1).clamp(min=0) - least) / most
            zeros[:, g] = (-least / scales[:, g]).round().clamp(0, most)
    scales = scales.half().float()
    integers = (weight / scales[:, index] + zeros[:, index]).round().clamp(0, 2**bits - 1)
    return integers.int(), scales, zeros.int(), index


def _means(integers: Tensor, scales: Tensor, zeros: Tensor, index: Tensor) -> Tensor:
    return (integers - zeros[:, index]).double().mul(scales[:, index].double()).float()


def awq(group: int) -> Format:
    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        integers, scales, zeros, index = _rounded(weight, group, 4, symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": _along_columns(integers.T, 4, order),
            "qzeros": _along_columns(zeros.T, 4, order),
            "scales": scales.T.contiguous().half(),
        }, _means(integers, scales, zeros, index)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Format({**config, "modules_to_not_convert": ["lm_head"]}, pack)


def gptq(bits: int, group: int, *, symmetric: bool, act_order: bool = False, version: int = 1) -> Format:
    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        columns = weight.shape[1]
        index = None
        if act_order:
            mixed = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
            index = mixed // (columns if group < 0 else group)
        integers, scales, zeros, index = _rounded(weight, group, bits, symmetric, index)
        stored = (zeros - (1 if version == 1 else 0)) % 2**bits
        return {
            "qweight": _along_columns(integers, bits).T.contiguous(),
            "qzeros": _along_columns(stored.T, bits),
            "scales": scales.T.contiguous().half(),
            "g_idx": index.int(),
        }, _means(integers, scales, zeros, index)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": act_order}
    return Format({**config, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, pack)


def _compressed(kept: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": kept,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def packed(bits: int, group: int, *, symmetric: bool, act_order: bool = False) -> Format:
    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        columns = weight.shape[1]
        mixed = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) // group
        integers, scales, zeros, index = _rounded(weight, group, bits, symmetric, mixed if act_order else None)
        tensors = {
            "weight_packed": _along_columns(integers, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _along_columns(zeros.T, bits).T.contiguous()
        if act_order:
            tensors["weight_g_idx"] = index.int()
        return tensors, _means(integers, scales.bfloat16().float(), zeros, index)

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    return Format(_compressed("pack-quantized", weights), pack)


def int8(*, symmetric: bool) -> Format:
    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        integers, scales, zeros, index = _rounded(weight, -1, 8, symmetric)
        tensors = {"weight": (integers - 128).to(torch.int8), "weight_scale": scales.bfloat16()}
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, _means(integers, scales.bfloat16().float(), zeros, index)

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    rounded = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    return Format(_compressed("int-quantized", weights, input_activations=rounded), pack)


def _float8(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return stored, stored.float() * scale


def float8(strategy: str) -> Format:
    """Return compressed-tensors' float8 format with strategy `tensor` or `channel`."""

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        scale = (weight.abs().amax() if strategy == "tensor" else weight.abs().amax(1, keepdim=True)) / 448
        scale = scale.bfloat16()
        stored, means = _float8(weight, scale.float())
        named = scale.reshape(1) if strategy == "tensor" else scale
        return {"weight": stored, "weight_scale": named, "input_scale": torch.ones(1)}, means

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    return Format(_compressed("float-quantized", weights), pack)


def fp8_blocks(rows: int, columns: int, *, compressed: bool = False) -> Format:
    """Return DeepSeek's float8 block format, or compressed-tensors', with small blocks; the last ones are partial."""

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        down, right = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scale = torch.empty(down, right)
        full = torch.empty(weight.shape)
        for i in range(down):
            for j in range(right):
                part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scale[i, j] = part.abs().amax() / 448
                full[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = scale[i, j]
        stored, means = _float8(weight, full)
        return {"weight": stored, "weight_scale" if compressed else "weight_scale_inv": scale}, means

    if compressed:
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [rows, columns]}
        return Format(_compressed("float-quantized", weights), pack)
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [rows, columns],
        "activation_scheme": "dynamic",
    }
    return Format({**config, "modules_to_not_convert": ["lm_head"]}, pack)


FORMATS: dict[str, Format] = {
    "awq": awq(32),
    "gptq-sym": gptq(4, 32, symmetric=True),
    "gptq-asym": gptq(4, 32, symmetric=False),
    "gptq-v2": gptq(4, 64, symmetric=False, version=2),
    "gptq-desc-act": gptq(4, 32, symmetric=True, act_order=True),
    "gptq-8-one-group": gptq(8, -1, symmetric=True),
    "gptq-8-asym": gptq(8, 32, symmetric=False),
    "packed-sym": packed(4, 32, symmetric=True),
    "packed-asym": packed(4, 64, symmetric=False),
    "packed-8": packed(8, 32, symmetric=True),
    "packed-act-order": packed(4, 32, symmetric=True, act_order=True),
    "int8": int8(symmetric=True),
    "int8-asym": int8(symmetric=False),
    "float8-tensor": float8("tensor"),
    "float8-channel": float8("channel"),
    "float8-blocks": fp8_blocks(48, 40, compressed=True),
    "fp8-blocks": fp8_blocks(48, 40),
}


def pack_checkpoint(full: Path, folder: Path, form: Format) -> dict[str, Tensor]:
    """Write the checkpoint `full`, packed, to `folder`. The first layer's `down_proj` stays unpacked, as ignore lists
    allow. Return all weights that it represents."""
    tensors, means = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(full / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith(form.layers) or name == module or module.endswith("layers.0.mlp.down_proj"):
            tensors[name] = means[name] = tensor
            continue
        parts, means[name] = form.pack(tensor.float())
        tensors |= {f"{module}.{part}": one.contiguous() for part, one in parts.items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((full / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    assert len(tensors) != len(means) or any(a.dtype != means[b].dtype for b, a in tensors.items())
    return means
