"""Our models against transformers, on tiny random checkpoints that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minisgl.config import EngineConfig
from minisgl.engine.loading import load_engine
from tests.helpers.models import (
    LOGITS_WITHIN,
    DenseSequence,
    load,
    reference_logits,
    save,
    tiny_model,
)
from tests.helpers.variants import MODELS, VARIANTS, VISION

pytestmark = pytest.mark.any_cpu

IDS = torch.randint(3, 131, (100,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=[*VARIANTS])
def reference(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture(scope="module", params=["single", "sharded"])
def folder(request: pytest.FixtureRequest, reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference, tmp_path_factory.mktemp("checkpoint"), shards=request.param == "sharded")


def test_prefill_logits_equal_transformers(reference: Any, folder: Path) -> None:
    ours = DenseSequence(load(folder)).extend(IDS)
    torch.testing.assert_close(ours, reference_logits(reference, IDS), rtol=0, atol=LOGITS_WITHIN)


def test_chunked_prefill_and_decode_equal_transformers(reference: Any, folder: Path) -> None:
    sequence, parts = DenseSequence(load(folder)), []
    for size in (1, 16, 37, 26, *[1] * 20):
        parts.append(sequence.extend(IDS[sequence.length : sequence.length + size]))
    torch.testing.assert_close(torch.cat(parts), reference_logits(reference, IDS), rtol=0, atol=LOGITS_WITHIN)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 has no such format")
def test_experts_in_one_tensor_are_the_same_model(tmp_path: Path) -> None:
    reference = tiny_model("qwen3-moe-not-everywhere")
    folder = save(reference, tmp_path, original_names=False)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert "model.layers.1.mlp.experts.gate_up_proj" in file.keys()  # noqa: SIM118 (not a dict)
    ours = DenseSequence(load(folder)).extend(IDS)
    torch.testing.assert_close(ours, reference_logits(reference, IDS), rtol=0, atol=LOGITS_WITHIN)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 ties whatever is in the files")
@pytest.mark.parametrize("other", [True, False])
def test_a_head_that_is_not_the_table_is_used_whatever_the_config_says(other: bool, tmp_path: Path) -> None:
    folder = save(tiny_model("qwen3-tied"), tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head.flip(0) if other else head}, file, {"format": "pt"})
    lines: list[str] = []
    config = EngineConfig(model=str(folder), num_pages=8, device="cpu", dtype="float32")
    engine = load_engine(config, lambda text, done=0, total=0: lines.append(text))
    try:
        with torch.inference_mode():
            ours = DenseSequence(engine.model).extend(IDS)
    finally:
        engine.close()
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(ours, reference_logits(reference, IDS), rtol=0, atol=LOGITS_WITHIN)
    assert any("lm_head.weight differs from model.embed_tokens.weight" in line for line in lines) is other


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("original_names", [True, False], ids=["names of 4", "names of 5"])
@pytest.mark.parametrize("which", [name for name in VISION if MODELS[name].torch])
def test_text_model_logits_equal_transformers(which: str, tied: bool, original_names: bool, tmp_path: Path) -> None:
    reference = tiny_model(which, tie_word_embeddings=tied)
    folder = save(reference, tmp_path, original_names=original_names)
    ours = DenseSequence(load(folder)).extend(IDS)
    torch.testing.assert_close(ours, reference_logits(reference, IDS), rtol=0, atol=LOGITS_WITHIN)


def test_the_engine_says_which_half_it_leaves_out(tmp_path: Path) -> None:
    save(tiny_model("mistral3"), tmp_path)
    said: list[str] = []
    config = EngineConfig(engine="torch", model=str(tmp_path), device="cpu", num_pages=4)
    engine = load_engine(config, lambda text, done=0, total=0: said.append(text))
    engine.close()
    line = next(line for line in said if line.startswith("text only"))
    assert line == (
        "text only: the vision part is not loaded: "
        "--engine torch sees with Qwen3-VL alone: --engine cpu sees with more models"
    )


def test_bfloat16_is_as_exact_as_transformers(reference: Any, folder: Path) -> None:
    exact = reference_logits(reference, IDS)
    ours = DenseSequence(load(folder, torch.bfloat16)).extend(IDS).float()
    theirs = reference_logits(type(reference).from_pretrained(folder, dtype=torch.bfloat16).eval(), IDS).float()
    # by token: where an expert's choice is close, rounding may turn it, in ours or in theirs
    of_ours, of_theirs = ((logits - exact).pow(2).mean(-1).sqrt() for logits in (ours, theirs))
    assert of_ours.median() <= 1.25 * of_theirs.median()
