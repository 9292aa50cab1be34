"""What a config.json may say of packed weights, and what is refused by field, value and reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from minisgl.config import ConfigError
from minisgl.weights.quantization import Packing, parse_packing
from tests.helpers.packed_checkpoints import FORMATS


def test_full_weights_are_no_packing() -> None:
    assert parse_packing({}) is None
    assert parse_packing({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        ("awq", Packing("awq", "awq", 4)),
        ("gptq-sym", Packing("gptq", "gptq", 4, zero_offset=1)),
        ("gptq-v2", Packing("gptq", "gptq", 4)),
        ("gptq-8-asym", Packing("gptq", "gptq", 8, zero_offset=1)),
        ("packed-8", Packing("compressed-tensors", "packed", 8)),
        ("int8", Packing("compressed-tensors", "int8", 8, rounds_activations=True)),
        ("float8-channel", Packing("compressed-tensors", "float8", 8)),
        ("fp8-blocks", Packing("fp8", "float8", 8, block=(48, 40), rounds_activations=True)),
    ],
)
def test_supported_packings_are_parsed(name: str, packing: Packing) -> None:
    assert parse_packing({"quantization_config": FORMATS[name].config}) == packing


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(FORMATS[name].config), **fields}


def of_weights(name: str, **fields: Any) -> dict[str, Any]:
    config = changed(name)
    config["config_groups"]["group_0"]["weights"].update(fields)
    return config


def two_groups() -> dict[str, Any]:
    config = of_weights("int8")
    config["config_groups"]["group_1"] = copy.deepcopy(config["config_groups"]["group_0"])
    config["config_groups"]["group_1"]["weights"]["num_bits"] = 4
    return config


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method: 'bitsandbytes': must be one of awq, gptq, compressed-"),
        ({"quant_method": "quanto"}, "quant_method: 'quanto': must be one of"),
        ({"bits": 4}, "quant_method: None: is missing"),
        ("awq", "quant_method: None: is missing"),
        (changed("awq", version="gemv"), "version: 'gemv': must be gemm"),
        (changed("awq", bits=8), "bits: 8: must be 4"),
        (changed("awq", zero_point=False), "zero_point: False: must be True"),
        (changed("gptq-sym", bits=3), "bits: 3: must be 4 or 8"),
        (changed("gptq-sym", checkpoint_format="marlin"), "checkpoint_format: 'marlin': must be gptq or gptq_v2"),
        (changed("gptq-sym", is_marlin_format=True), "is_marlin_format: True"),
        (changed("packed-sym", format="marlin-24"), "format: 'marlin-24': must be pack-quantized"),
        (changed("packed-sym", format="nvfp4-pack-quantized"), "format: 'nvfp4-pack-quantized'"),
        (changed("packed-sym", quantization_status="frozen"), "quantization_status: 'frozen': must be compressed"),
        (
            changed("packed-sym", sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config: 'sparse-24-bitmask'",
        ),
        (changed("packed-sym", transform_config={"config_groups": {}}), "transform_config"),
        (changed("packed-sym", config_groups={}), "config_groups: {}: must give the format of weights"),
        (of_weights("packed-sym", num_bits=3), "num_bits: 3: must be 4 or 8"),
        (of_weights("packed-sym", type="float"), "config_groups: 'float, 4 bits, pack-quantized'"),
        (two_groups(), "config_groups: .*several formats"),
        (changed("fp8-blocks", fmt="e5m2"), "fmt: 'e5m2': must be e4m3"),
        (changed("fp8-blocks", weight_block_size=[128]), r"weight_block_size: \[128\]: must be two numbers"),
    ],
)
def test_unsupported_packings_are_refused_by_name(config: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: quantization_config: {reason}"):
        parse_packing({"quantization_config": config})
