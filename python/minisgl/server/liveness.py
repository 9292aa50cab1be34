"""Whether the engine process is alive, told from its heartbeats.

Keeps true: a long forward is no hang, a stopped process or a stuck step loop is one within 5 s.
Doesn't know: who asks.
"""

from __future__ import annotations

import time

from minisgl.frontend.engine_client import ProcessClient

BEAT_TIMEOUT_S = 3.0  # beats come every 0.5 s
LOOP_TIMEOUT_S = 3.0  # between two forwards; a step of the loop takes milliseconds


def trouble(client: ProcessClient, step_timeout_s: float) -> str | None:
    """What is wrong with the engine; None if nothing is. A forward may take `step_timeout_s`."""
    if client.failure is not None:
        return client.failure
    if client.info is None:
        return None  # loading
    silent_s = time.monotonic() - client.beat_time
    if silent_s > BEAT_TIMEOUT_S:
        return f"no heartbeat from the engine process for {silent_s:.1f} s"
    phase, age_s = client.beat.phase, client.beat.age_s
    if phase == "working" and age_s > LOOP_TIMEOUT_S:
        return f"the step loop has not moved for {age_s:.1f} s"
    if phase == "forward" and age_s > step_timeout_s:
        return f"a forward has been running for {age_s:.1f} s, the limit is {step_timeout_s:g} (--step-timeout)"
    return None
