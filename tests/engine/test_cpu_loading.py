"""GGUF files with changed bytes, all the way into the CPU engine: an error or an engine, never a crash.

The Rust suite (rust/minisgl-cpu/src/tests/hostile_files.rs) does so with the reader alone, a hundred thousand times.
Here what a file says is believed by more: config, tokenizer, shapes of layers.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from minisgl import envs
from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.cpu_loading import load_cpu_engine
from tests.helpers.gguf import write_gguf, written_model

SIZES = (0, 1, 2, 31, 33, 63, 64, 65, 255, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def _changed(content: bytes, head: int, rng: random.Random) -> bytes:
    out = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(head)
        match rng.randrange(4):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at] = rng.randrange(256)
            case 2:
                number = rng.choice(SIZES).to_bytes(8, "little")[: rng.choice((4, 8))]
                out[at : at + len(number)] = number
            case 3:
                del out[rng.randrange(len(out)) :]
                head = min(head, len(out))
                if not head:
                    break
    return bytes(out)


def _head(content: bytes) -> int:
    """Where what is worth changing ends: the tokenizer's lists are long, the tensors' shapes come after them."""
    return content.index(b"output_norm.weight") + 64


@pytest.mark.parametrize("cases", [150, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize(
    ("variant", "arch", "changes"),
    [
        ("llama3-tied", "llama", {}),
        ("qwen3-moe", "qwen3moe", {}),
        ("gemma3-tied", "gemma3", {"layer_types": ["sliding_attention"]}),
    ],
)
def test_changed_files_are_errors_or_engines(
    variant: str, arch: str, changes: dict[str, Any], cases: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))
    model = written_model(variant, num_hidden_layers=1, intermediate_size=64, **changes)
    file = write_gguf(tmp_path / "m.gguf", model, arch)
    content, rng = file.read_bytes(), random.Random(14)
    tokens = content.index(b"tokenizer.ggml.token_type")
    config = EngineConfig(model=str(file), engine="cpu", num_pages=16, num_threads=1)
    _load(config)  # it is sound
    refused = 0
    for _ in range(cases):
        # before the tokenizer's lists, or after them
        start = rng.choice((0, tokens))
        file.write_bytes(content[:start] + _changed(content[start:], _head(content[start:]), rng))
        try:
            _load(config)
        except ConfigError as error:
            assert str(error)
            refused += 1
    assert refused > cases / 3


def _load(config: EngineConfig) -> None:
    load_cpu_engine(config, lambda *_: None).close()
