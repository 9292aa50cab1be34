"""Packed checkpoints in both engines that read them, against transformers with the weights that they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from minisgl.config import ConfigError, EngineConfig, Unsupported
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.cpu_loading import load_cpu_engine
from minisgl.engine.loading import load_engine
from minisgl.models.config import load_config
from minisgl.weights.packed_blocks import packed_weights
from minisgl.weights.stored import weight_files
from tests.helpers.models import LOGITS_WITHIN, DenseSequence, load, reference_logits, save, tiny_model
from tests.helpers.packed_checkpoints import FORMATS, pack_checkpoint

pytestmark = pytest.mark.any_cpu

IDS = torch.randint(3, 131, (60,), generator=torch.Generator().manual_seed(3)).tolist()
SIZES = {"intermediate_size": 128}  # whole groups of 32 and 64
HALF = 2.0**-11  # what half precision loses of a number, at most


def quiet(text: str, done: int = 0, total: int = 0) -> None:
    pass


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))


def packed(tmp_path: Path, form: str, variant: str = "qwen2-tied", **sizes: int) -> tuple[Path, Any]:
    """The folder, and transformers' model of what it means."""
    reference = tiny_model(variant, **{**SIZES, **sizes})
    means = pack_checkpoint(save(reference, tmp_path / "full"), tmp_path / "packed", FORMATS[form])
    return tmp_path / "packed", with_weights(reference, tmp_path, means)


def with_weights(reference: Any, tmp_path: Path, weights: dict[str, torch.Tensor]) -> Any:
    from safetensors.torch import save_file

    folder = tmp_path / "meant"
    folder.mkdir(exist_ok=True)
    save_file({name: one.contiguous() for name, one in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text((tmp_path / "full" / "config.json").read_text())
    return type(reference).from_pretrained(folder, dtype=torch.float32).eval()


def cpu_logits(engine: CpuEngine, ids: list[int]) -> torch.Tensor:
    found = np.frombuffer(engine.rust.prompt_logits(np.array(ids, np.int32)), np.float32)
    engine.close()
    return torch.from_numpy(found.reshape(len(ids), -1).copy())


def cpu_engine(folder: Path, **settings: Any) -> CpuEngine:
    return load_cpu_engine(EngineConfig(model=str(folder), num_pages=64, kv_dtype="f32", **settings), quiet)


@pytest.mark.parametrize("form", FORMATS)
def test_torch_s_logits_are_those_of_the_weights_that_are_meant(form: str, tmp_path: Path) -> None:
    folder, reference = packed(tmp_path, form)
    ours = DenseSequence(load(folder)).extend(IDS)
    torch.testing.assert_close(ours, reference_logits(reference, IDS), rtol=0, atol=LOGITS_WITHIN)


def blocks(folder: Path) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Kinds and numbers of the tensors in the file that the CPU engine reads."""
    packing = load_config(folder).packing
    assert packing is not None
    reader = gguf.GGUFReader(packed_weights(weight_files(folder), packing, quiet))
    return {
        one.name: (one.tensor_type.name, gguf.dequantize(one.data, one.tensor_type).reshape(one.shape[::-1].tolist()))
        for one in reader.tensors
    }


KINDS = {
    "awq": "Q4_1",
    "gptq-sym": "Q4_0",
    "gptq-asym": "Q4_1",
    "gptq-v2": "Q4_1",
    "gptq-desc-act": "Q8_0",
    "gptq-8-one-group": "Q8_0",
    "gptq-8-asym": "Q8_0",
    "packed-sym": "Q4_0",
    "packed-asym": "Q4_1",
    "packed-8": "Q8_0",
    "packed-act-order": "Q8_0",
    "int8": "Q8_0",
    "int8-asym": "Q8_0",
    "float8-tensor": "Q8_0",
    "float8-channel": "Q8_0",
    "float8-blocks": "Q8_0",
    "fp8-blocks": "Q8_0",
}
ROUNDED_ANEW = (
    "gptq-desc-act",
    "gptq-8-asym",
    "packed-act-order",
    "int8-asym",
    "float8-tensor",
    "float8-channel",
    "float8-blocks",
    "fp8-blocks",
)


@pytest.mark.parametrize("form", FORMATS)
def test_block_rounding_stays_below_bound(form: str, tmp_path: Path) -> None:
    folder, reference = packed(tmp_path, form)
    kept, meant = blocks(folder), reference.state_dict()
    for name, (kind, found) in kept.items():
        wanted = meant[name].numpy()
        if wanted.ndim == 1 or "embed" in name or name.endswith("layers.0.mlp.down_proj.weight"):
            assert kind == "F32" and (found == wanted).all(), name
            continue
        assert kind == KINDS[form], name
        largest = np.abs(wanted.reshape(len(wanted), -1, 32)).max(2).repeat(32, 1)
        bound = {"Q4_0": HALF, "Q4_1": 2 * HALF, "Q8_0": HALF}[kind] * largest
        if form in ROUNDED_ANEW:
            bound = bound + largest / 254
        assert (np.abs(found - wanted) <= bound * 1.001 + 2.0**-24).all(), name
    in_blocks = with_weights(reference, tmp_path, {n: torch.from_numpy(x.copy()) for n, (_, x) in kept.items()})
    ours = cpu_logits(cpu_engine(folder), IDS)
    torch.testing.assert_close(ours, reference_logits(in_blocks, IDS), rtol=0, atol=LOGITS_WITHIN)


def test_layers_that_no_block_takes_are_full(tmp_path: Path) -> None:
    folder, reference = packed(tmp_path, "fp8-blocks", intermediate_size=112)
    assert blocks(folder)["model.layers.1.mlp.down_proj.weight"][0] == "F32"
    ours = cpu_logits(cpu_engine(folder), IDS).log_softmax(-1)
    theirs = reference_logits(reference, IDS).log_softmax(-1)
    assert float((theirs.exp() * (theirs - ours)).sum(-1).mean()) < 1e-2


@pytest.mark.parametrize("form", ["awq", "gptq-desc-act", "int8"])
def test_experts_are_packed_one_by_one(form: str, tmp_path: Path) -> None:
    folder, reference = packed(tmp_path, form, "qwen3-moe", moe_intermediate_size=64)
    ours = DenseSequence(load(folder)).extend(IDS)
    torch.testing.assert_close(ours, reference_logits(reference, IDS), rtol=0, atol=LOGITS_WITHIN)
    kept = blocks(folder)
    assert kept["model.layers.2.mlp.experts.3.down_proj.weight"][0] == KINDS[form]
    in_blocks = with_weights(reference, tmp_path, {n: torch.from_numpy(x.copy()) for n, (_, x) in kept.items()})
    near = cpu_logits(cpu_engine(folder), IDS)
    torch.testing.assert_close(near, reference_logits(in_blocks, IDS), rtol=0, atol=LOGITS_WITHIN)


def test_the_file_is_made_once(tmp_path: Path) -> None:
    folder, _ = packed(tmp_path, "awq")
    said: list[str] = []
    config = EngineConfig(model=str(folder), num_pages=64)
    for _ in range(2):
        load_cpu_engine(config, lambda text, done=0, total=0: said.append(text)).close()
    assert len({text for text in said if "once" in text}) == 1
    assert len(list((tmp_path / "cache" / "packed").glob("*/model.gguf"))) == 1


def test_biases_of_zeros_that_the_model_has_not(tmp_path: Path) -> None:
    """AutoGPTQ writes them."""
    from safetensors.torch import load_file, save_file

    folder, reference = packed(tmp_path, "gptq-sym")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.bias"
    save_file({**tensors, name: torch.zeros(64)}, folder / "model.safetensors")
    ours = DenseSequence(load(folder)).extend(IDS)
    torch.testing.assert_close(ours, reference_logits(reference, IDS), rtol=0, atol=LOGITS_WITHIN)
    cpu_engine(folder).close()
    save_file({**tensors, name: torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"1 unknown: {name}"):
        load(folder)
    with pytest.raises(Unsupported, match=f"no place for: {name}"):
        cpu_engine(folder)


def test_incompatible_flags_are_refused(tmp_path: Path) -> None:
    folder, _ = packed(tmp_path, "awq")
    with pytest.raises(ConfigError, match=r"--quantization q8: the weights are quantized already \(awq, 4 bits\)"):
        cpu_engine(folder, quantization="q8")
    with pytest.raises(ConfigError, match="quantization_config: 'awq'"):
        load_engine(EngineConfig(model=str(folder), model_impl="transformers", engine="torch"), quiet)


def test_damage_is_an_error_with_the_layer(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, _ = packed(tmp_path, "packed-sym")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    scale = tensors[f"{name}.weight_scale"]
    save_file({**tensors, f"{name}.weight_scale": scale * 1e8}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name}.weight: a scale is too large for half precision"):
        cpu_engine(folder)
    save_file({**tensors, f"{name}.weight_scale": scale * torch.nan}, folder / "model.safetensors")
    for start in (load, cpu_engine):
        with pytest.raises(ConfigError, match=f"{name}.weight: a scale is not finite"):
            start(folder)
    assert not list((tmp_path / "cache" / "packed").glob("*/*"))
