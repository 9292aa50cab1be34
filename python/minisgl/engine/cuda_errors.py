"""Which errors of a step leave a CUDA engine usable.

Keeps true: only what is known to leave the context whole ends a step alone; after anything else the engine is dead, and
the process that holds it must end. One of several ranks that fails leaves the others waiting in a collective: then only
a step that all of them find not finite ends alone.
"""

from __future__ import annotations

import torch

from minisgl.distributed import GroupError
from minisgl.engine.api import EngineStepError


class EngineDeadError(RuntimeError):
    """The device's context is broken, or nobody knows: no later step can be trusted."""


def step_failure(step: int, error: BaseException, ranks: int = 1) -> EngineStepError | EngineDeadError | GroupError:
    """What `error`, raised by step `step`'s launch or found when it was waited for, means for the engine, which is one
    of `ranks`."""
    if isinstance(error, EngineStepError | EngineDeadError | GroupError):
        return error
    if isinstance(error, torch.OutOfMemoryError):  # the allocator refused; nothing was launched
        text = f"{str(error).splitlines()[0]} (lower --memory-ratio or --max-prefill-length)"
        return EngineStepError(text) if ranks == 1 else EngineDeadError(f"step {step}: {text}")
    return EngineDeadError(f"step {step}: {type(error).__name__}: {error}: the CUDA engine cannot go on")
