"""What each of several engine processes gets of the machine: on a CPU its part of the threads and of the memory, else
its CUDA devices, in order.

Invariants: one engine gets what was asked for, unchanged; no device belongs to two engines.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from minisgl import envs
from minisgl.config import ConfigError, EngineConfig, ServerConfig

DEV = Path("/dev")
TOOL = "nvidia-smi"
TOOL_TIMEOUT_S = 20.0


def num_cuda_devices() -> int:
    """That CUDA would find: as its variable says, else as the driver lists them, else as there are device files."""
    if (visible := envs.cuda_visible_devices()) is not None:
        names = [name.strip() for name in visible.split(",")]
        return next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))
    if (tool := shutil.which(TOOL)) is not None:
        try:
            done = subprocess.run([tool, "-L"], check=False, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
            if done.returncode == 0:
                return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
        except (OSError, subprocess.TimeoutExpired):
            pass
    return len(list(DEV.glob("nvidia[0-9]*")))


def _devices(config: EngineConfig) -> int:
    """How many CUDA devices engines may be dealt; 0: they compute on a CPU."""
    if config.engine not in ("auto", "torch") or config.device not in ("auto", "cuda") or any(config.of_cpu_only()):
        return 0
    found = num_cuda_devices()
    return 0 if config.device == "auto" and found < config.tp else found


def with_number(config: ServerConfig) -> ServerConfig:
    """With a number of engines for `auto`."""
    if config.dp != "auto":
        return config
    return msgspec.structs.replace(config, dp=max(1, _devices(config.engine) // config.engine.tp))


def shares(config: EngineConfig, number: int) -> tuple[Sequence[EngineConfig], str]:
    """The configuration of each of `number` engines, and a line for the log. Raises `ConfigError`."""
    if number == 1:
        return [config], ""
    if config.engine in ("echo", "sim"):
        return [config] * number, f"{number} engines"
    if devices := _devices(config):
        if number * config.tp > devices:
            raise ConfigError(
                f"--dp {number}: needs {number * config.tp} CUDA devices ({config.tp} each), there are {devices}: "
                f"choose at most --dp {devices // config.tp}, or --device cpu"
            )
        firsts = range(0, number * config.tp, config.tp)
        dealt = [msgspec.structs.replace(config, device=f"cuda:{first}") for first in firsts]
        return dealt, f"{number} engines, from {', '.join(one.device for one in dealt)} on, {config.tp} devices each"
    from minisgl.engine.pool_size import MEMORY_RATIO

    threads = config.num_threads or len(os.sched_getaffinity(0))
    ratio = MEMORY_RATIO if config.memory_ratio is None else config.memory_ratio
    one = msgspec.structs.replace(config, num_threads=max(1, threads // number), memory_ratio=ratio / number)
    pool = f"{one.memory_ratio:.3g} of the free memory" if config.num_pages is None else f"{config.num_pages} pages"
    return [one] * number, f"{number} engines, {one.num_threads} of {threads} threads and {pool} for each"
