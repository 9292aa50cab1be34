"""Which errors of a step leave a CUDA engine usable.

Invariants: only an error that is known to leave the CUDA context whole ends one step alone; after any other the engine
is dead, and its process must end. If one of several ranks fails, the others wait in a collective: then only a step that
all ranks find not finite ends alone.
"""

from __future__ import annotations

import torch

from minisgl.distributed import GroupError
from minisgl.engine.api import EngineStepError


class EngineDeadError(RuntimeError):
    """The device's context is broken, or may be: no later step can be trusted."""


def step_failure(step: int, error: BaseException, ranks: int = 1) -> EngineStepError | EngineDeadError | GroupError:
    """What `error`, raised by the launch of `step` or by waiting for it, means for an engine that is one of `ranks`."""
    if isinstance(error, EngineStepError | EngineDeadError | GroupError):
        return error
    if isinstance(error, torch.OutOfMemoryError):  # the allocator refused; nothing was launched
        text = f"{str(error).splitlines()[0]} (lower --memory-ratio or --max-prefill-length)"
        return EngineStepError(text) if ranks == 1 else EngineDeadError(f"step {step}: {text}")
    return EngineDeadError(f"step {step}: {type(error).__name__}: {error}: the CUDA engine cannot go on")
