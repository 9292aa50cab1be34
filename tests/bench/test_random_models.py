"""Files of random weights: GGUF as others read it, computed by the CPU engine, finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from minisgl.bench.model import BenchModel, measure
from minisgl.bench.model_run import Point
from minisgl.bench.random_models import SHAPES, TYPES, Shape, type_of, write_random
from minisgl.config import EngineConfig

LLAMA = SHAPES["llama-3.2-3b"]


def small(shape: Shape) -> Shape:
    tiny = replace(shape, layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, inner=512, vocab=49_408, context=2048)
    if shape.attending is not None:
        return replace(tiny, attending=(1,), state_heads=min(shape.state_heads, 2))
    return replace(tiny, experts=8, per_token=2, expert_inner=256) if shape.experts else tiny


def speed(file: Path) -> float:
    engine = EngineConfig(model=str(file))
    of = BenchModel(engine=engine, variants=("int8",), points=(Point(num_in=16),), repeats=1, beside={})
    found = measure(of)
    assert found.missing == {}
    about = found.about["int8"]
    assert 0 < about["token_bytes"] <= about["weight_bytes"] and about["token_products"] > about["head_products"] > 0
    return found.samples["int8"]["pp16"][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_computed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    write_random(file, small(SHAPES[name]), "mxfp4" if name == "gpt-oss-20b" else "q4_k_m")
    assert speed(file) > 0  # a row that is not finite would have ended with an error


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "mxfp4"])
def test_every_type_is_computed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    shape, file = small(LLAMA), tmp_path / "model.gguf"
    write_random(file, shape, kind)
    tensors = {str(one.name): one for one in gguf.GGUFReader(file).tensors}
    assert set(tensors) == {name for name, _ in shape.tensors()}
    for name, sizes in shape.tensors():
        assert tuple(tensors[name].shape) == sizes[::-1]
        assert len(sizes) == 1 or tensors[name].tensor_type.name.lower() == type_of(name, kind)
    assert speed(file) > 0


def test_types_of_a_mixture() -> None:
    found = [type_of(f"blk.{i}.ffn_down.weight", "q4_k_m") for i in range(3)]
    assert found == ["q6_k", "q4_k", "q6_k"] and type_of("token_embd.weight", "q4_k_m") == "q6_k"
    assert type_of("blk.0.ffn_up_exps.weight", "mxfp4") == "mxfp4" and type_of("blk.0.attn_q.weight", "mxfp4") == "q8_0"
