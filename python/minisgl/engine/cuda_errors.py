"""Which errors of a step leave a CUDA engine usable.

Keeps true: only what is known to leave the context whole ends a step alone; after anything else the engine is dead, and
the process that holds it must end.
"""

from __future__ import annotations

import torch

from minisgl.engine.api import EngineStepError


class EngineDeadError(RuntimeError):
    """The device's context is broken, or nobody knows: no later step can be trusted."""


def step_failure(step: int, error: BaseException) -> EngineStepError | EngineDeadError:
    """What `error`, raised by step `step`'s launch or found when it was waited for, means for the engine."""
    if isinstance(error, EngineStepError | EngineDeadError):
        return error
    if isinstance(error, torch.OutOfMemoryError):  # the allocator refused; nothing was launched
        text = str(error).split("\n", 1)[0]
        return EngineStepError(f"{text} (lower --memory-ratio or --max-prefill-length)")
    return EngineDeadError(f"step {step}: {type(error).__name__}: {error}: the CUDA engine cannot go on")
