"""A seeded load with both schedulers under the same calls, in this process: do their decisions differ?

The load is made to reach every decision: shared prefixes, a pool that is too small (eviction and retraction), requests
that are aborted, and new ones while others run.

Invariants: the same seed gives the same calls.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from minisgl.config import DebugConfig, EngineConfig
from minisgl.message import AbortRequest, AddRequest, FromEngine, ToEngine
from minisgl.runner.build import build_control_plane, build_engine
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.shadow import ShadowControlPlane

PREFIXES = (0, 24, 100)  # tokens
MAX_STEPS = 100_000


def shadow_run(num_requests: int = 400, seed: int = 0, page_size: int = 4) -> dict[str, Any]:
    """num_calls, num_compared, num_diffs, stopped (why comparing ended, or nothing), num_retracted, num_steps."""
    config = EngineConfig(
        engine="echo",
        num_pages=96,
        page_size=page_size,
        max_running_requests=16,
        max_prefill_length=128,
        max_seq_len=256,
        cpu_backend="rust_hotpath",
        debug=DebugConfig(shadow=True),
    )
    engine = build_engine(config, lambda *report: None)
    try:
        plane = build_control_plane(config, engine.info)
        assert isinstance(plane, ShadowControlPlane)
        loop = StepLoop(plane, engine, _drop)
        waiting = _messages(num_requests, seed, engine.info.vocab_size)
        rng = random.Random(seed + 1)
        while (waiting or not loop.idle) and loop.num_steps < MAX_STEPS:
            count = rng.choice((0, 0, 0, 1, 2, 8))
            loop.step(waiting[:count])
            del waiting[:count]
        retracted = plane.stats().num_retracted_total
    finally:
        engine.close()
    return {**asdict(plane.summary), "num_retracted": retracted, "num_steps": loop.num_steps}


def _drop(messages: Sequence[FromEngine]) -> None:
    pass


def _messages(num_requests: int, seed: int, vocab_size: int) -> list[ToEngine]:
    """Requests in order of arrival; every eighth is aborted some requests later."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(vocab_size) for _ in range(length)] for length in PREFIXES]
    found: list[ToEngine] = []
    for req_id in range(num_requests):
        tokens = rng.choice(prefixes) + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 60))]
        sampling = SamplingParams(temperature=0, max_tokens=rng.randint(1, 80), seed=req_id, ignore_eos=True)
        found.append(AddRequest(req_id, np.array(tokens, np.int32).tobytes(), sampling))
        if req_id % 8 == 7:
            found.append(AbortRequest(req_id - rng.randint(0, 7)))
    return found
