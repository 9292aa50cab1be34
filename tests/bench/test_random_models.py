"""Files of random weights: GGUF as others read it, computed by the CPU engine, finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from minisgl import envs
from minisgl.bench import random_models
from minisgl.bench.model_run import Point, Runner
from minisgl.bench.random_models import SHAPES, TYPES, Shape, type_of, write_random
from minisgl.config import EngineConfig
from minisgl.tokenizer import Tokenizer
from minisgl.weights.gguf_folder import gguf_folder
from minisgl.weights.sources import find_smollm2
from tests.helpers.gguf import START, TOKENS, write_gguf, written_model

LLAMA = SHAPES["llama-3.2-3b"]


def small(shape: Shape, vocab: int) -> Shape:
    tiny = replace(shape, layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, inner=512, vocab=vocab, context=2048)
    if shape.attending is not None:
        return replace(tiny, attending=(1,), state_heads=min(shape.state_heads, 2))
    return replace(tiny, experts=8, per_token=2, expert_inner=256) if shape.experts else tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))


def check_speed(file: Path) -> None:
    """A row that is not finite would end with an error."""
    engine = EngineConfig(model=str(file), engine="cpu", activations="int8", num_pages=64, num_threads=1)
    runner = Runner(engine)
    about = runner.about()
    assert 0 < about["token_bytes"] <= about["weight_bytes"] and about["token_products"] > about["head_products"] > 0
    assert runner.ask(Point(num_in=16), (1, 0)) > 0
    runner.engine.close()


@pytest.fixture
def vocab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a small tokenizer in the place of the embedded model's; tokens are made up beyond it."""
    model = written_model("llama3-tied", num_hidden_layers=1)
    file = write_gguf(tmp_path / "tokenizer.gguf", model, edit=lambda writer: writer.add_bos_token_id(START))
    monkeypatch.setattr(random_models, "find_smollm2", lambda: file)
    return len(TOKENS) + 59


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_computed(name: str, vocab: int, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_random(file, small(SHAPES[name], vocab), "mxfp4" if name == "gpt-oss-20b" else "q4_k_m")
    check_speed(file)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "mxfp4"])
def test_every_type_is_computed(kind: str, vocab: int, tmp_path: Path) -> None:
    shape, file = small(LLAMA, vocab), tmp_path / "model.gguf"
    write_random(file, shape, kind)
    tensors = {str(one.name): one for one in gguf.GGUFReader(file).tensors}
    assert set(tensors) == {name for name, _ in shape.tensors()}
    for name, sizes in shape.tensors():
        assert tuple(tensors[name].shape) == sizes[::-1]
        assert len(sizes) == 1 or tensors[name].tensor_type.name.lower() == type_of(name, kind)
    check_speed(file)


@pytest.mark.slow
def test_the_tokenizer_is_the_embedded_models(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_random(file, small(LLAMA, 49_408), "q4_k_m")
    check_speed(file)
    own, embedded = (Tokenizer.load(gguf_folder(one)) for one in (file, find_smollm2()))
    assert own.encode("A page of the tree.").tolist() == embedded.encode("A page of the tree.").tolist()


def test_types_of_a_mixture() -> None:
    found = [type_of(f"blk.{i}.ffn_down.weight", "q4_k_m") for i in range(3)]
    assert found == ["q6_k", "q4_k", "q6_k"] and type_of("token_embd.weight", "q4_k_m") == "q6_k"
    assert type_of("blk.0.ffn_up_exps.weight", "mxfp4") == "mxfp4" and type_of("blk.0.attn_q.weight", "mxfp4") == "q8_0"
