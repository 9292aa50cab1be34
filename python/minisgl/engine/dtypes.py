"""The dtype of weights and KV, and the reason for it.

On a CPU `auto` means the checkpoint's dtype only if matrix products of it run natively. Emulated, they would be up to
ten times slower than float32, and rounded for nothing. torch and oneDNN are queried in addition to the processor, so
that a process that is limited to an older processor's instructions makes the choice of such a processor.
"""

from __future__ import annotations

import platform

import torch

from minisgl.config import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HALF_DTYPES = {"bfloat16": ("bf16", "avx512_bf16 or amx_bf16"), "float16": ("fp16", "avx512_fp16")}


def choose(wanted: str, checkpoint: str, device: torch.device) -> tuple[str, str]:
    """Return a key of `DTYPES` for --dtype `wanted` and the checkpoint's dtype, and why. Raises `ConfigError`."""
    name = checkpoint if wanted == "auto" else wanted
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype: {name!r} is not supported: choose --dtype {', '.join(DTYPES)}")
    why = obstacle(name) if device.type == "cpu" else ""
    if wanted != "auto":
        return name, f"by --dtype; emulated, slow: {why}" if why else "by --dtype"
    if why:
        return "float32", f"the checkpoint's {name} would be emulated: {why}"
    return name, "as in the checkpoint"


def obstacle(name: str) -> str:
    """Return why matrix products of this dtype would be emulated on this CPU; empty if they run natively."""
    if name == "float32":
        return ""
    kind, instructions = _HALF_DTYPES[name]
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", None)
    usable = torch.backends.mkldnn.is_available() and supported is not None and bool(supported())
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "" if usable else f"torch has no fast products of {name} here"
    if name == "bfloat16" and not (_cpu_has("avx512_bf16") or _cpu_has("amx_tile")):
        return f"this CPU has no {instructions}"  # oneDNN calls it supported from AVX-512 on
    if usable and torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return ""
    return f"torch uses no {instructions} here"


def _cpu_has(instructions: str) -> bool:
    """Return whether the CPU has the instructions, by a private function of torch; false if torch lacks that."""
    return bool(getattr(torch.cpu, f"_is_{instructions}_supported", bool)())
