"""Weights quantized once and kept, as Python asks for them."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from minisgl import envs
from minisgl.weights.quantized import quantized_weights
from tests.helpers.gguf import TOKENS, numbers_of, write_gguf
from tests.helpers.models import tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "quantized"


class Steps(list[tuple[str, int, int]]):
    def __call__(self, text: str, done: int = 0, total: int = 0) -> None:
        self.append((text, done, total))


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    rng = np.random.default_rng(1)
    tensors = {
        "model.embed_tokens.weight": (50, 64),
        "model.norm.weight": (64,),
        "model.layers.0.mlp.up_proj.weight": (8, 64),
        "model.layers.0.mlp.gate.weight": (4, 64),
    }
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in tensors.items()}
    save_file(made, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("quantization", "kind"), [("q8", "Q8_0"), ("q4", "Q4_1")])
def test_a_folder_is_quantized_once(quantization: str, kind: str, tmp_path: Path) -> None:
    folder, steps = _folder(tmp_path), Steps()
    kept = quantized_weights(folder, quantization, steps)  # type: ignore[arg-type]
    assert steps[0][0] == f"quantizing model to {quantization}, once"
    assert steps[-1][1] == steps[-1][2] > 0
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(kept).tensors}
    assert kinds == {
        "model.embed_tokens.weight": "Q8_0",
        "model.layers.0.mlp.up_proj.weight": kind,
        "model.norm.weight": "F32",
        "model.layers.0.mlp.gate.weight": "F32",
    }
    steps.clear()
    assert quantized_weights(folder, quantization, steps) == kept  # type: ignore[arg-type]
    assert steps == []
    os.utime(folder / "model.safetensors", (0, 0))
    assert quantized_weights(folder, quantization, steps) != kept  # type: ignore[arg-type]


def test_a_gguf_file_keeps_its_architecture(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_model("qwen3-tied", vocab_size=len(TOKENS)), "qwen3")
    kept = quantized_weights(file, "q8", Steps())
    field = gguf.GGUFReader(kept).get_field("general.architecture")
    assert field is not None and field.contents() == "qwen3"
    exact, found = numbers_of(file), numbers_of(kept)
    assert exact.keys() == found.keys()
    for name, values in exact.items():
        np.testing.assert_allclose(found[name], values, atol=np.abs(values).max() / 200)


def test_a_file_in_blocks_stays_where_it_is(tmp_path: Path, cache: Path) -> None:
    model = tiny_model("qwen3-tied", vocab_size=len(TOKENS), intermediate_size=128)
    blocks = gguf.GGMLQuantizationType.Q4_1
    file = write_gguf(tmp_path / "m.gguf", model, "qwen3", quantise=blocks)
    assert quantized_weights(file, "q8", Steps()) == file
    assert not cache.exists()


def test_a_caller_that_stops_it_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantized_weights(_folder(tmp_path), "q4", stop)
    assert list(cache.iterdir()) == []
