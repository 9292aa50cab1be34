"""Which attention backend serves, and what is said of the choice."""

from __future__ import annotations

import argparse

import pytest
import torch

from minisgl.attention.api import LayerAttention
from minisgl.attention.backend import BACKENDS, BackendError, Choice, Machine, Shape, choose
from minisgl.cli.flags import ENGINE, add_settings

H200 = Machine("cuda", (9, 0), frozenset({"flashinfer", "flash_attention"}))

QWEN3 = Shape(torch.bfloat16, 128, 16, (None, None))


@pytest.mark.parametrize(
    ("machine", "shape", "name", "reason"),
    [
        (H200, QWEN3, "flashinfer", "fastest"),
        (Machine("cuda", (9, 0), frozenset()), QWEN3, "torch_sdpa", "pip install flashinfer-python"),
        (H200, Shape(torch.float32, 128, 16), "torch_sdpa", "float16 or bfloat16"),
        (H200, Shape(torch.bfloat16, 80, 16), "torch_sdpa", "head_dim 80"),
        (H200, Shape(torch.bfloat16, 80, 256), "flash_attention", "not flashinfer: head_dim 80"),
        (Machine("cuda", (7, 5), H200.installed), QWEN3, "torch_sdpa", "capability 8.0, and this device has 7.5"),
        (Machine("cpu", (0, 0), H200.installed), QWEN3, "torch_sdpa", "needs a CUDA device"),
    ],
)
def test_auto_says_why(machine: Machine, shape: Shape, name: str, reason: str) -> None:
    choice = choose("auto", machine, shape)
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("asked", "machine", "shape", "says"),
    [
        ("flashinfer", Machine("cuda", (9, 0), frozenset()), QWEN3, "not installed: pip install flashinfer-python"),
        ("flash_attention", H200, QWEN3, "--page-size 16 is no multiple of 256"),
        ("flash_attention", Machine("cuda", (9, 0), frozenset()), QWEN3, "pip install flash-attn"),
        ("flashinfer", Machine("cpu", (0, 0), frozenset()), QWEN3, "needs a CUDA device, and this is cpu"),
        ("flashinfer:fa3", Machine("cuda", (8, 9), H200.installed), QWEN3, "fa3 needs .* 9.0, .* 8.9: use flashinfer"),
        ("flashinfer:fa3", Machine("cuda", (10, 0), H200.installed), QWEN3, "fa3 needs"),
        ("flashinfer:fa3", Machine("cuda", (9, 0), frozenset()), QWEN3, "not installed: pip install flashinfer-python"),
        ("flashinfer:fa3", H200, Shape(torch.float32, 128, 16), "float16 or bfloat16"),
        ("flashinfer:fa3", H200, Shape(torch.bfloat16, 80, 16), "head_dim 80"),
        ("xformers", H200, QWEN3, "choose one of auto, torch_sdpa"),
    ],
)
def test_a_backend_that_cannot_serve_says_what_to_do(asked: str, machine: Machine, shape: Shape, says: str) -> None:
    with pytest.raises(BackendError, match=says):
        choose(asked, machine, shape)


PLAIN = LayerAttention(8, 2, 128, 128)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (LayerAttention(8, 2, 128, 128, softcap=50.0), "soft caps"),
        (LayerAttention(8, 2, 128, 128, scale=1.0), "a scale of its own"),
        (LayerAttention(8, 2, 256, 256), "layers of different heads"),
        (LayerAttention(8, 2, 128, 64), "heads of K and V of different sizes"),
    ],
)
def test_what_only_torch_computes_is_refused_by_others(layer: LayerAttention, says: str) -> None:
    shape = Shape.of([PLAIN, layer], torch.bfloat16, 256)
    choice = choose("auto", H200, shape)
    assert choice.name == "torch_sdpa" and says in choice.reason
    for name in ("flashinfer", "flash_attention"):
        with pytest.raises(BackendError, match=f"{says}, which only torch_sdpa"):
            choose(name, H200, shape)


def test_plain_layers_are_supported_by_every_backend() -> None:
    windowed = LayerAttention(8, 2, 128, 128, window=9, scale=128**-0.5)
    shape = Shape.of([PLAIN, windowed], torch.bfloat16, 16)
    assert shape == Shape(torch.bfloat16, 128, 16, (None, 9))
    assert choose("auto", H200, shape).name == "flashinfer"


def test_requested_backend_is_chosen() -> None:
    for name in ("torch_sdpa", "flashinfer"):
        assert choose(name, H200, QWEN3).name == name


def test_fa3_is_taken_only_if_asked_for() -> None:
    assert choose("flashinfer:fa3", H200, QWEN3) == Choice("flashinfer", "asked for", "fa3")
    for asked in ("auto", "flashinfer"):
        choice = choose(asked, H200, QWEN3)
        assert (choice.name, choice.prefill) == ("flashinfer", "fa2")
        assert "flashinfer:fa3" in choice.reason
    older = choose("auto", Machine("cuda", (8, 0), H200.installed), QWEN3)
    assert older.prefill == "fa2" and "fa3" not in older.reason


def test_every_backend_can_be_asked_for_by_flag() -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser, ENGINE)
    for name in BACKENDS:
        assert parser.parse_args(["--attention-backend", name]).attention_backend == name
