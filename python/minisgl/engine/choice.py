"""The choice of `--engine auto`: torch with a CUDA device, else the CPU engine if it supports the configuration, else
torch. Without torch installed it is the CPU engine, or an error that says how to install torch.

A flag that only one engine has decides; two flags for different engines are an error. The CPU engine raises
`Unsupported` for a model that it cannot run. torch is imported only if there are signs of a GPU.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from minisgl import envs
from minisgl.config import ConfigError, EngineConfig, EngineName
from minisgl.utils.installed import TORCH_ENGINE, how_to_get, missing, need_extension, need_torch_engine

DRIVER = Path("/proc/driver/nvidia/version")
DEVICES = ("nvidia[0-9]*", "nvidiactl", "dxg")  # below /dev; the last under Windows
DEV = Path("/dev")
TOOL = "nvidia-smi"


def choose_engine(config: EngineConfig) -> tuple[EngineName, str]:
    """Return the engine for `config`, and a reason if the choice is unexpected (else an empty string). A model that the
    CPU engine does not support falls back to torch later, unless a flag needs the CPU engine. Raises `ConfigError`."""
    if config.engine != "auto":
        if config.engine == "torch":
            need_torch_engine("--engine torch: the torch engine", config.device)
        if config.engine == "cpu":
            need_extension("--engine cpu: the CPU engine")
        return config.engine, ""
    wanted, against = next(config.of_cpu_only(), ""), next(config.not_of_cpu(), "")
    if wanted and against:
        raise ConfigError(f"{wanted}: only the CPU engine has it, which has no {against}: leave one of them out")
    if wanted:
        need_extension(f"{wanted}: only the CPU engine has it, which")
    if against:
        need_torch_engine(f"{against}: only the torch engine has it, which", config.device)
        return "torch", f"the CPU engine has no {against}"
    if not wanted and config.device == "auto":
        if absent := missing(*TORCH_ENGINE):
            hint = f"there may be a CUDA device, and {absent[0]} is not installed: {how_to_get('cuda')}"
            return "cpu", hint if looks_like_cuda() else ""
        if cuda_is_available():
            return "torch", "there is a CUDA device"
    return "cpu", ""


def may_fall_back(config: EngineConfig) -> bool:
    """Return whether torch may serve a model that the CPU engine does not support."""
    return config.engine == "auto" and not any(config.of_cpu_only())


def may_use_cuda(config: EngineConfig) -> bool:
    """Return whether the engine will probably compute on a CUDA device, without importing torch."""
    torch_serves = config.engine == "torch" or (config.engine == "auto" and not any(config.of_cpu_only()))
    if config.device == "auto":
        return torch_serves and not missing(*TORCH_ENGINE) and looks_like_cuda()
    return torch_serves and config.device.startswith("cuda")


def cuda_is_available() -> bool:
    """Return whether torch can use a CUDA device. torch is imported only if the system shows signs of one."""
    if not looks_like_cuda():
        return False
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def looks_like_cuda() -> bool:
    if envs.cuda_visible_devices() in ("", "-1"):
        return False
    return DRIVER.exists() or any(any(DEV.glob(name)) for name in DEVICES) or shutil.which(TOOL) is not None
