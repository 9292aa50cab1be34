"""The folder of config and tokenizer that stands for a GGUF file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.models import load_config
from minisgl.models.config import parse_config
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.weights.gguf_config import READERS, Fields, config_of
from minisgl.weights.gguf_folder import gguf_file, gguf_folder
from minisgl.weights.gguf_import import import_gguf
from minisgl.weights.sources import find_smollm2
from tests.helpers.gguf import START, TOKENS, TOOL, Edit, write_gguf
from tests.helpers.models import tiny_model
from tests.helpers.seconds import WAIT_S

TEXT_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def _write(file: Path, variant: str = "llama3-tied", arch: str = "llama", **options: Any) -> Path:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    return write_gguf(file, tiny_model(variant, vocab_size=len(TOKENS), num_hidden_layers=1, **rope), arch, **options)


def test_folder_is_made_from_the_header_alone(tmp_path: Path) -> None:
    file = _write(tmp_path / "m.gguf")
    folder = gguf_folder(file)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*TEXT_FILES, "source.json"])
    assert gguf_file(folder) == file
    assert Tokenizer.load(folder).encode("<|start|>x<tool>").tolist()[0] == START
    assert load_config(folder).vocab_size == len(TOKENS)


def test_folder_config_equals_that_of_an_import(tmp_path: Path) -> None:
    file = _write(tmp_path / "m.gguf", "qwen3-moe", "qwen3moe")
    folder, imported = gguf_folder(file), import_gguf(file, lambda *_: None)
    for name in TEXT_FILES:
        assert (folder / name).read_text() == (imported / name).read_text()
    assert gguf_file(imported) is None


def test_changed_file_gets_another_folder(tmp_path: Path) -> None:
    file = _write(tmp_path / "m.gguf")
    folder = gguf_folder(file)
    assert gguf_folder(file) == folder
    link = tmp_path / "link.gguf"
    link.symlink_to(file)
    assert gguf_folder(link) == folder
    copy = tmp_path / "copy.gguf"
    shutil.copy2(file, copy)
    assert gguf_folder(copy) != folder  # other weights may have the same header
    os.utime(file, (0, 0))
    assert gguf_folder(file) != folder


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "source.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"source\.json: .* remove the folder"):
        gguf_file(tmp_path)


def test_an_end_of_turn_ends_answers(tmp_path: Path) -> None:
    folder = gguf_folder(_write(tmp_path / "m.gguf", edit=lambda writer: writer.add_eot_token_id(TOOL)))
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == START
    assert load_config(folder).eos_ids == (START, TOOL)


HEAVY = ("torch", "transformers", "gguf", "safetensors")


def test_nothing_heavy_is_imported_for_the_embedded_model(cache: Path) -> None:
    try:
        file = find_smollm2()
    except ConfigError as error:
        pytest.skip(str(error))
    code = (
        "import sys; from pathlib import Path; from minisgl.weights.gguf_folder import gguf_folder;"
        f"folder = gguf_folder(Path({str(file)!r}));"
        f"print(folder, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_S)
    folder, found = run.stdout.strip().split(" ", 1)
    assert found == "[]"
    config = load_config(folder)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)


def _saying(key: str, value: Any) -> Edit:
    """That key of the metadata has that value."""

    def edit(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        {int: writer.add_int64, str: writer.add_string, list: writer.add_array}[type(value)](key, value)

    return edit


def _other_factors(writer: GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 3, 8, dtype=np.float32))


def _half_factors(writer: GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float16), raw_dtype=GGMLQuantizationType.F16)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_saying("llama.attention.head_count", -1), "attention.head_count: -1: must be at least 1"),
        (_saying("llama.block_count", "many"), "block_count: 'many' is not a number for all layers"),
        (_saying("llama.attention.head_count", [4]), r"attention.head_count: \[4\] is not a number for all layers"),
        (_saying("llama.block_count", 2**31), "tensor blk.2147483647.attn_q.weight is missing"),
        (
            _saying("llama.attention.key_length", 2**31),
            r"tensor blk.0.attn_q.weight is \[64, 64\], not \[8589934592, 64\] as the metadata says",
        ),
        (lambda writer: writer.kv_data[0].pop("tokenizer.ggml.tokens"), "metadata lacks tokenizer.ggml.tokens"),
        (_saying("tokenizer.ggml.merges", ["zz yy"]), "tokenizer.ggml.merges: .*zz"),
        (_saying("tokenizer.ggml.merges", ["zz"]), "tokenizer.ggml.merges: 'zz' must have two parts"),
        (_saying("tokenizer.ggml.bos_token_id", 10_000), "bos_token_id: 10000: must be below 261"),
        (_saying("llama.rope.dimension_count", 8), "rope.dimension_count: 8 is not imported: only 16, the size"),
        (_other_factors, "rope_freqs.weight: these factors are not those of Llama 3.1"),
        (_half_factors, "tensor rope_freqs.weight: .* in F16 is not imported"),
        (_saying("split.count", 3), r"part 0 \(from 0\) of 3: its name must end in -00001-of-00003.gguf"),
    ],
)
def test_unsupported_input_is_refused_by_name(edit: Any, message: str, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match=rf"m\.gguf: .*{message}"):
        gguf_folder(_write(tmp_path / "m.gguf", edit=edit))
    assert not any(path.is_dir() for path in (cache / "gguf-text").glob("*"))


_OF_GEMMA4: dict[str, Any] = {
    "general.architecture": "gemma4",
    "tokenizer.ggml.eos_token_id": 1,
    "gemma4.block_count": 3,
    "gemma4.context_length": 64,
    "gemma4.embedding_length": 32,
    "gemma4.feed_forward_length": [48, 48, 96],
    "gemma4.attention.head_count": 4,
    "gemma4.attention.head_count_kv": [2, 1, 1],
    "gemma4.attention.key_length": 16,
    "gemma4.attention.key_length_swa": 8,
    "gemma4.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma4.attention.sliding_window": 9,
    "gemma4.attention.sliding_window_pattern": [True, False, False],
    "gemma4.attention.shared_kv_layers": 1,
}
_TENSORS_OF_GEMMA4 = {"token_embd.weight": (9, 32), "blk.2.attn_norm.weight": (32,)}
_TENSORS_OF_GEMMA4 |= {f"blk.{i}.attn_q.weight": (64 if i else 32, 32) for i in range(3)}
_TENSORS_OF_GEMMA4 |= {f"blk.{i}.attn_k.weight": (16, 32) for i in range(2)}
_TURNING = {"rope_freqs.weight": [1.0, 1.0, 1e30, 1e30, 1e30, 1e30, 1e30, 1e30]}


def test_layers_of_different_sizes_are_read() -> None:
    config = parse_config(config_of(Fields(_OF_GEMMA4), _TENSORS_OF_GEMMA4, _TURNING))
    assert [(one.kv_heads, one.head_dim, one.kv_of, one.values_are_keys) for one in config.heads] == [
        (2, 8, 0, False),
        (1, 16, 1, True),
        (1, 16, 1, True),
    ]
    assert config.intermediate_sizes == (48, 48, 96)
    assert config.ropes[0].turning_share == 0.25


@pytest.mark.parametrize(
    ("changes", "factors", "message"),
    [
        ({"block_count": 2**31}, {}, "tensor blk.2147483647.attn_norm.weight is missing"),
        ({"attention.head_count_kv": [2, 1]}, {}, r"head_count_kv: \[2, 1\]: must be at least 1 for each of 3 layers"),
        ({"attention.head_count_kv": 2}, {}, r"tensor blk.1.attn_k.weight is \[16, 32\], not \[32, 32\]"),
        ({"feed_forward_length": [48, 96, 96]}, {}, "which share KV, may have twice"),
        ({"attention.value_length_swa": 16}, {}, "value_length_swa: 16 is not imported: only 8, the size of a head"),
        ({}, {"rope_freqs.weight": [1.0, 1e30, 1.0]}, "only the first dimensions may rotate"),
    ],
)
def test_impossible_layer_sizes_are_refused(
    changes: dict[str, Any], factors: dict[str, list[float]], message: str
) -> None:
    metadata = _OF_GEMMA4 | {f"gemma4.{key}": value for key, value in changes.items()}
    with pytest.raises(ConfigError, match=message):
        config_of(Fields(metadata), _TENSORS_OF_GEMMA4, factors)


@pytest.mark.parametrize("architecture", READERS)
def test_a_reader_asks_for_nothing_that_its_config_lacks(architecture: str) -> None:
    """With the least that a file says, each makes a config or names what is missing."""
    least = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48}
    least |= {"attention.head_count": 4, "attention.sliding_window": 8}
    metadata: dict[str, Any] = {f"{architecture}.{key}": value for key, value in least.items()}
    metadata |= {f"{architecture}.attention.layer_norm{one}_epsilon": 1e-6 for one in ("", "_rms")}
    metadata |= {"general.architecture": architecture, "tokenizer.ggml.eos_token_id": 1}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (9, 32), "position_embd.weight": (64, 32)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.attn_{one}.weight": (32, 32) for one in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_{one}.weight": (48, 32) for one in ("gate", "up")}
        shapes |= {f"blk.{layer}.attn_norm.weight": (32,), f"blk.{layer}.ffn_down.weight": (32, 48)}
    with contextlib.suppress(ConfigError):
        assert config_of(Fields(metadata), shapes, {})["hidden_size"] == 32
