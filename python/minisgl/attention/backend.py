"""The choice of the attention backend: what each supports, what is installed, and the reason for the choice.

Invariants: a requested backend serves, or the start fails with what to do; `auto` always finds one.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from minisgl.attention.api import LayerAttention

BACKENDS = ("auto", "torch_sdpa", "flashinfer", "flashinfer:fa3", "flash_attention", "eager")
_MODULES = {"flashinfer": "flashinfer", "flash_attention": "flash_attn"}
_HOW_TO_GET = {
    "flashinfer": "pip install flashinfer-python, with nvcc at hand: it compiles its kernels when they are first used",
    "flash_attention": "pip install flash-attn",
}
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
_HALVES = (torch.float16, torch.bfloat16)
_FLASH_ATTENTION_PAGE = 256  # paged kernels support pages of multiples of this


class BackendError(ValueError):
    """Error for a requested backend that cannot serve; its text has the reason and a remedy."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Properties of the machine that the choice of a backend depends on."""

    device_type: str  # cpu or cuda
    capability: tuple[int, int]  # of the CUDA device; (0, 0) without
    installed: frozenset[str]  # backends whose packages are installed


@dataclass(frozen=True, slots=True)
class Shape:
    """Requirements of the model and the KV pool on a backend."""

    dtype: torch.dtype
    head_dim: int
    page_size: int
    windows: Sequence[int | None] = ()
    beyond: str = ""  # features that only torch_sdpa and eager support

    @classmethod
    def of(cls, layers: Sequence[LayerAttention], dtype: torch.dtype, page_size: int) -> Shape:
        beyond = {
            "soft caps": any(layer.softcap is not None for layer in layers),
            "a scale of its own": any(layer.scale not in (None, layer.k_dim**-0.5) for layer in layers),
            "layers of different heads": len({(layer.heads, layer.kv_heads, layer.k_dim) for layer in layers}) > 1,
            "heads of K and V of different sizes": any(layer.k_dim != layer.v_dim for layer in layers),
        }
        named = ", ".join(name for name, used in beyond.items() if used)
        return cls(dtype, layers[0].k_dim, page_size, tuple(layer.window for layer in layers), named)


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen backend. `decode`: the backend for rows of one token, if it is another one."""

    name: str
    reason: str
    prefill: str = ""  # FlashInfer's kernels for rows of several tokens
    decode: str = ""

    @property
    def names(self) -> str:
        return f"{self.name} for prefill, {self.decode} for decode" if self.decode else self.name


def _is_installed(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None


def machine(device: torch.device) -> Machine:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    installed = frozenset(name for name, module in _MODULES.items() if _is_installed(module))
    return Machine(device.type, capability, installed)


def choose(asked: str, machine: Machine, shape: Shape) -> Choice:
    """Choose the backend for `asked`: one of `BACKENDS`, or PREFILL,DECODE of two of them except `auto`. Raises
    `BackendError` if it cannot serve."""
    first, comma, second = asked.partition(",")
    if comma:
        if {first, second} - {*BACKENDS[1:]}:
            raise BackendError(f"--attention-backend {asked}: a pair is of two of {', '.join(BACKENDS[1:])}")
        for name in (first, second):
            if obstacle := _obstacle(name, machine, shape):
                raise BackendError(f"--attention-backend {asked}: {name}: {obstacle}")
        choice, decode = _choice(first, "asked for", machine), second.partition(":")[0]
        return choice if decode == choice.name else replace(choice, decode=decode)
    if asked not in BACKENDS:
        raise BackendError(f"--attention-backend {asked}: choose one of {', '.join(BACKENDS)}")
    if asked != "auto":
        if obstacle := _obstacle(asked, machine, shape):
            raise BackendError(f"--attention-backend {asked}: {obstacle}")
        return _choice(asked, "asked for", machine)
    passed_over: list[str] = []
    for name in ("flashinfer", "flash_attention"):
        obstacle = _obstacle(name, machine, shape)
        if not obstacle:
            return _choice(name, "; ".join(["the fastest that is there", *passed_over]), machine)
        passed_over.append(f"not {name}: {obstacle}")
    return _choice("torch_sdpa", "; ".join(passed_over), machine)


def _choice(asked: str, reason: str, machine: Machine) -> Choice:
    name, _, kernels = asked.partition(":")
    if name != "flashinfer":
        return Choice(name, reason)
    prefill = kernels or "fa2"
    if not kernels and _has_fa3(machine):
        reason += "; prefill by its fa2 kernels, by fa3 only if asked for as flashinfer:fa3"
    return Choice(name, reason, prefill)


def _has_fa3(machine: Machine) -> bool:
    return machine.capability[0] == 9  # only Hopper has its instructions


def _obstacle(asked: str, machine: Machine, shape: Shape) -> str:
    """Return the reason why a backend cannot serve, with what to change; empty if it can."""
    name, _, kernels = asked.partition(":")
    if name in ("torch_sdpa", "eager"):
        return ""
    if machine.device_type != "cuda":
        return f"it needs a CUDA device, and this is {machine.device_type}"
    if machine.capability < (8, 0):
        major, minor = machine.capability
        return f"it needs compute capability 8.0, and this device has {major}.{minor}"
    if kernels == "fa3" and not _has_fa3(machine):
        major, minor = machine.capability
        return f"fa3 needs compute capability 9.0, and this device has {major}.{minor}: use flashinfer"
    if name not in machine.installed:
        return f"not installed: {_HOW_TO_GET[name]}"
    if shape.beyond:
        return f"the model's attention has {shape.beyond}, which only torch_sdpa and eager compute here"
    if shape.dtype not in _HALVES:
        return "it computes in float16 or bfloat16: use --dtype bfloat16"
    if name == "flashinfer" and shape.head_dim not in _FLASHINFER_HEAD_DIMS:
        return f"head_dim {shape.head_dim} is none of {', '.join(map(str, _FLASHINFER_HEAD_DIMS))}"
    if name == "flash_attention" and shape.page_size % _FLASH_ATTENTION_PAGE:
        return f"--page-size {shape.page_size} is no multiple of {_FLASH_ATTENTION_PAGE}"
    if name == "flash_attention" and (shape.head_dim % 8 or shape.head_dim > 256):
        return f"head_dim {shape.head_dim} is no multiple of 8 up to 256"
    return ""
