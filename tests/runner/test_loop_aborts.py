"""What an abort frees, counted in steps of the loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minisgl.engine.echo import EchoEngine
from minisgl.message import AbortRequest, AddRequest
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig


def test_all_pages_are_back_two_steps_after_the_last_abort(
    control_plane: Callable[[ControlPlaneConfig], ControlPlane],
) -> None:
    """Requests that decode, prefill in chunks and wait, all aborted at once, with a step in flight."""
    plane = control_plane(ControlPlaneConfig(256, 4, 3, 8, 200, ()))
    engine = EchoEngine(num_pages=256, page_size=4, max_rows=3, max_seq_len=200, context_len=200, eos_ids=())
    loop = StepLoop(plane, engine, lambda messages: None)
    lengths = (5, 3, 60, 20)
    sampling = SamplingParams(max_tokens=100, seed=0)
    loop.step([AddRequest(i, np.full(n, i, np.int32).tobytes(), sampling) for i, n in enumerate(lengths)])
    for _ in range(4):
        loop.step([])
    before = plane.stats()
    assert before.num_running == 3 and before.num_waiting == 1 and before.num_held_pages > 0
    loop.step([AbortRequest(i) for i in range(len(lengths))])
    loop.step([])
    after = plane.stats()
    assert (after.num_live, after.num_held_pages, after.num_protected_pages, after.num_draining) == (0, 0, 0, 0)
    assert after.num_free_pages + after.num_evictable_pages == 256 and loop.idle
    engine.close()
