"""llama.cpp's converter writes pairs of a text model and a vision tower. The tests compare their logits with those of
the folder that it read, and their tokens with those of llama.cpp's own server with images."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from minisgl import envs
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.images import read_processor
from minisgl.prompt_image import PromptImage, virtual_ids
from minisgl.step import Int32Array
from minisgl.tokenizer import Tokenizer
from tests.helpers.engines import load
from tests.helpers.llama_cpp import Step, converted, llama_cpp, put_tokenizer
from tests.helpers.models import LOGITS_WITHIN
from tests.helpers.seeing_gguf import GEMMA_TEXT
from tests.helpers.vision import gemma, idefics3, prompt_of, random_image, saved, seer

pytestmark = pytest.mark.slow
QWEN, GEMMA = ("<|vision_start|>", "<|vision_end|>"), ("<start_of_image>", "<end_of_image>")
TILES = ("<image>", "<fake_token_around_image>")
# the converter writes the text model's epsilon for the tower, too, and llama.cpp wants states of equal sizes
_DELTA: dict[str, Any] = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "rms_norm_eps": 1e-6}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3-vl": {},
    "qwen3-vl-moe": {},
    "qwen3.5": _DELTA,
    "qwen3.5-moe": _DELTA,
    "gemma3": GEMMA_TEXT,
    "smolvlm": {},
}
WITHIN = {"f32": LOGITS_WITHIN, "f16": 0.01, "bf16": 0.1, "q8_0": 0.2}
"""Largest difference of a logit that a tower with rounded weights may cause. Recurrent states and experts would amplify
the rounding."""
SIZES = [(2, 2), (8, 4), (4, 16), (10, 10)]
ASKED: list[tuple[list[str], list[tuple[int, int]]]] = [
    (["abc", "def"], [(48, 32)]),
    (["", "d"], [(80, 80)]),
    (["abc", "def", "a"], [(48, 48), (64, 32)]),
    (["abcab", "def"], [(16, 120)]),
]
"""Texts around images, and the images' heights and widths, which llama.cpp does not change. Those of Gemma 3 are all
`SQUARE`."""
SQUARE = (32, 32)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seer")
    put_tokenizer(folder, "qwen2")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*QWEN, "<|image_pad|>", *GEMMA, "<image_soft_token>", *TILES]}
    )
    tokenizer.save_pretrained(folder)
    changes = {"vocab_size": len(tokenizer), **FAMILIES[request.param]}
    if request.param == "gemma3":
        return published(gemma(**changes), folder)
    if request.param == "smolvlm":
        model = idefics3(**changes)
        model.config.text_config.architectures = ["VLlama3ForCausalLM"]  # as published: the converter knows it by that
        model.config.image_token_id = tokenizer.convert_tokens_to_ids(TILES[0])
        return saved(model, folder)
    return saved(seer(request.param, **changes), folder)


def published(model: Any, folder: Path) -> Path:
    """Save a Gemma 3 with the names that its published files have and the converter knows."""
    with torch.no_grad():  # the converter writes it in 16 bits
        projection = model.model.multi_modal_projector.mm_input_projection_weight
        projection.copy_(projection.half())
    file = saved(model, folder) / "model.safetensors"
    weights = {name.replace("_tower.", "_tower.vision_model."): one for name, one in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    processor = folder / "preprocessor_config.json"
    processor.write_text(json.dumps({**json.loads(processor.read_bytes()), "image_seq_length": 16}))
    return folder


def is_gemma(checkpoint: Path) -> bool:
    return bool(json.loads((checkpoint / "config.json").read_bytes())["model_type"] == "gemma3")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))


def pair_of(checkpoint: Path, kind: str, folder: Path) -> tuple[Path, Path]:
    """Convert the text model in f32, and the tower in `kind`."""
    options = ["--no-mtp"] if "qwen3_5" in (checkpoint / "config.json").read_text(encoding="utf-8") else []
    text = converted(checkpoint, "f32", "qwen2", *options).rename(folder / "model.gguf")
    return text, converted(checkpoint, kind, "qwen2", "--mmproj").rename(folder / "mmproj-model.gguf")


def logits(model: Path, ids: Int32Array, images: Sequence[PromptImage]) -> torch.Tensor:
    engine, _ = load("cpu", model, num_pages=64, num_threads=1)
    assert isinstance(engine, CpuEngine) and engine.info.sees
    found = np.frombuffer(engine.rust.prompt_logits(ids, tuple(images)), np.float32).reshape(len(ids), -1)
    engine.close()
    return torch.from_numpy(found.copy())


@pytest.mark.parametrize(
    ("checkpoint", "kind"),
    [*((family, "f32") for family in FAMILIES), *(("qwen3-vl", kind) for kind in WITHIN if kind != "f32")],
    indirect=["checkpoint"],
)
def test_a_converted_pair_computes_what_its_folder_does(checkpoint: Path, kind: str, tmp_path: Path) -> None:
    is_square = "image_size" in json.loads((checkpoint / "config.json").read_bytes())["vision_config"]
    sizes, within = ([(8, 8)] * 2, 0.0) if is_square else (SIZES, WITHIN[kind])
    parts = [part for i, size in enumerate(sizes) for part in (1 + i, random_image(*size, seed=i))]
    ids, images = prompt_of([*parts, 9])
    ours = logits(pair_of(checkpoint, kind, tmp_path)[0], ids, images)
    torch.testing.assert_close(ours, logits(checkpoint, ids, images), rtol=0, atol=within)


@pytest.mark.parametrize("checkpoint", [one for one in FAMILIES if one != "smolvlm"], indirect=True)
def test_a_converted_pair_answers_as_llama_cpp_does(checkpoint: Path, tmp_path: Path) -> None:
    """llama.cpp keeps keys and values in 16 bits, and approximates the mergers' GELU. It resizes SmolVLM's tiles in
    another way."""
    text, tower = pair_of(checkpoint, "f32", tmp_path)
    processor, tokenizer = read_processor(checkpoint, max_tokens=1024), Tokenizer.load(checkpoint)
    assert processor is not None
    begin, end = GEMMA if is_gemma(checkpoint) else QWEN
    rng = np.random.default_rng(5)
    with llama_cpp(text, mmproj=tower) as server:
        marker = server.ask("/props")["media_marker"]
        for texts, asked in ASKED:
            sizes = [SQUARE] * len(asked) if is_gemma(checkpoint) else asked
            data, ids, images = [], [], []
            for i, words in enumerate(texts):
                around = f"{end if i else ''}{words}{begin if i < len(sizes) else ''}"
                ids += tokenizer.encode(around).tolist()
                if i < len(sizes):
                    Image.fromarray(rng.integers(0, 256, (*sizes[i], 3), np.uint8)).save(file := io.BytesIO(), "png")
                    data.append(base64.b64encode(file.getvalue()).decode())
                    [one] = processor.prepare(file.getvalue()).tiles
                    images.append(PromptImage(one.digest, len(ids), one.num_tokens, one.grid, one.pixels))
                    ids += virtual_ids(one.digest, one.num_tokens).tolist()
            steps: list[Step] = server.steps({"prompt_string": marker.join(texts), "multimodal_data": data}, 6)
            whole = np.array([*ids, *(step.token for step in steps)], np.int32)
            ours = logits(text, whole, images).log_softmax(-1)[len(ids) - 1 : -1]
            for step, row in zip(steps, ours, strict=True):
                assert int(row.argmax()) == step.token or row.max() - row[step.token] < 0.05
                assert max(abs(float(row[token]) - theirs) for token, theirs in step.top.items()) < 0.05
