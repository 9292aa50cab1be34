"""Packed checkpoints: what the reader makes of each format, against the weights that its packer meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.config import ConfigError
from minisgl.distributed import Shard, ShardRange
from minisgl.weights.checkpoint import load_weights
from minisgl.weights.packed import PackedFolder
from minisgl.weights.quantization import parse_packing
from minisgl.weights.stored import stored_tensors, weight_files
from tests.helpers.packed_checkpoints import FORMATS, Format, pack_checkpoint

pytestmark = pytest.mark.any_cpu

SHAPES = {"model.layers.0.self_attn.q_proj": (64, 128), "model.layers.1.mlp.down_proj": (96, 256)}


def small(tmp_path: Path, form: Format) -> tuple[Path, dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(5)
    full = {f"{name}.weight": torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    full |= {"lm_head.weight": torch.randn(8, 64), "model.norm.weight": torch.ones(64)}
    source = tmp_path / "full"
    source.mkdir()
    save_file(full, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    return tmp_path / "packed", pack_checkpoint(source, tmp_path / "packed", form)


def reader(folder: Path) -> PackedFolder:
    packing = parse_packing(json.loads((folder / "config.json").read_text()))
    assert packing is not None
    return PackedFolder(weight_files(folder), packing)


@pytest.mark.parametrize("name", FORMATS)
def test_unpacked_weights_equal_the_originals(name: str, tmp_path: Path) -> None:
    folder, meant = small(tmp_path, FORMATS[name])
    found = reader(folder)
    assert {f"{layer}.weight" for layer in SHAPES} == set(found.layers)
    assert set(found.others) == {"lm_head.weight", "model.norm.weight"}
    for layer in found.layers:
        # one rounding of a product in float32
        np.testing.assert_allclose(found.full(layer), meant[layer].numpy(), rtol=2**-22, atol=1e-12, err_msg=layer)


def test_each_float8_is_torch_s(tmp_path: Path) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    theirs = every.float()
    save_file({"all": every}, tmp_path / "model.safetensors")
    [stored] = stored_tensors(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(stored.read(), theirs.numpy())


def test_zero_points_wrap_around(tmp_path: Path) -> None:
    """A zero point of 0 is stored as 15 in GPTQ's first format."""
    folder, _ = small(tmp_path, FORMATS["gptq-asym"])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    tensors[f"{name}.qzeros"] = torch.full_like(tensors[f"{name}.qzeros"], -1)
    save_file(tensors, folder / "model.safetensors")
    found = reader(folder).weight(f"{name}.weight")
    assert not isinstance(found, np.ndarray) and not found.zeros.any()


def test_a_rank_gets_its_part(tmp_path: Path) -> None:
    folder, meant = small(tmp_path, FORMATS["gptq-asym"])
    wanted = {name: one.clone().zero_() for name, one in meant.items()}
    rows, columns = (f"{layer}.weight" for layer in SHAPES)
    wanted[rows], wanted[columns] = torch.zeros(32, 128), torch.zeros(96, 128)
    shards = {rows: Shard(0, (ShardRange.of(64, 1, 2),)), columns: Shard(1, (ShardRange.of(256, 1, 2),))}
    packing = parse_packing(json.loads((folder / "config.json").read_text()))
    load_weights(wanted, folder, shards=shards, packing=packing)
    torch.testing.assert_close(wanted[rows], meant[rows][32:], rtol=2**-22, atol=1e-12)
    torch.testing.assert_close(wanted[columns], meant[columns][:, 128:], rtol=2**-22, atol=1e-12)


def damage(tensors: dict[str, torch.Tensor], name: str, change: Any) -> None:
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()


@pytest.mark.parametrize(
    ("form", "part", "change", "reason"),
    [
        ("awq", "qzeros", lambda x: None, "qzeros is missing"),
        ("awq", "scales", lambda x: x[:, :-1], "integers with scales"),
        ("awq", "scales", lambda x: x[:-1], "scales"),
        ("gptq-sym", "g_idx", lambda x: x + 1, "a group of"),
        ("gptq-sym", "g_idx", lambda x: x[:-1], "a group of"),
        ("gptq-sym", "qweight", lambda x: x[None], "two dimensions"),
        ("gptq-asym", "qzeros", lambda x: x[:-1], "zero points do not fit"),
        ("gptq-asym", "scales", lambda x: x * torch.nan, "not finite"),
        ("packed-sym", "weight_shape", lambda x: x + 9, "weight_shape says"),
        ("packed-sym", "weight_scale", lambda x: x[:, :-1], "are not 3 groups"),
        ("packed-asym", "weight_zero_point", lambda x: x[:-1], "integers with scales"),
        ("int8", "weight_scale", lambda x: None, "weight_scale is missing"),
        ("fp8-blocks", "weight_scale_inv", lambda x: x[:-1], "neither one"),
        ("fp8-blocks", "weight_scale_inv", lambda x: None, "needs weight_scale"),
        ("float8-channel", "weight_scale", lambda x: x * torch.inf, "not finite"),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_layer(
    form: str, part: str, change: Any, reason: str, tmp_path: Path
) -> None:
    folder, _ = small(tmp_path, FORMATS[form])
    tensors = load_file(folder / "model.safetensors")
    damage(tensors, f"model.layers.0.self_attn.q_proj.{part}", change)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"model.layers.0.self_attn.q_proj.weight.*{reason}"):
        found = reader(folder)
        for layer in found.layers:
            found.full(layer)


def test_a_checkpoint_without_packed_layers_is_refused(tmp_path: Path) -> None:
    folder, _ = small(tmp_path, FORMATS["awq"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = FORMATS["gptq-sym"].config
    save_file({"lm_head.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantization_config: gptq: no layer"):
        reader(folder)
