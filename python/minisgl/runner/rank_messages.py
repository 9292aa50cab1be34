"""Messages between rank 0 and the ranks above it: a step is one message with the live regions of rank 0's buffers.

Invariants: the received regions, written into buffers of the same sizes, have the digest of the sent ones.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from minisgl.config import EngineConfig
from minisgl.engine.api import SlotAssignment
from minisgl.message import EngineFailed, Heartbeat
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.digest import live_regions
from minisgl.step import StepBuffers, StepLimits, StepPlan


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """First line on a worker's stdin. `rendezvous` is a file through which the ranks find each other."""

    engine: EngineConfig
    rank: int
    steps: str
    acks: str
    rendezvous: str


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Message of a rank that has finished loading."""


FromRank = RankReady | Heartbeat | EngineFailed  # JSON lines on a worker's stdout; `EngineFailed` is the last


class NewBuffers(msgspec.Struct, frozen=True, array_like=True, tag="buffers"):
    """Sizes of the buffers for all later steps."""

    limits: tuple[int, ...]
    padded_rows: int
    ring_len: int


class RankAssignment(msgspec.Struct, frozen=True, array_like=True):
    slot: int
    req_id: int
    sampling: SamplingParams
    tokens: bytes  # int32
    num_prompt: int


class RankStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """A step for the ranks above 0. `in_flight` is the number of earlier steps that rank 0 has launched and not waited
    for: waiting has effects (the reset after a failed step) that must come in the same order on all ranks."""

    step: int
    plan: tuple[int, ...]
    data: bytes
    assignments: tuple[RankAssignment, ...]
    in_flight: int = 0


class RankAdapter(msgspec.Struct, frozen=True, array_like=True, tag="adapter"):
    """Order to load the adapter in `folder` for all later steps, or to unload it if that is `None`."""

    number: int
    folder: str | None


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    pass


ToRank = NewBuffers | RankStep | RankAdapter | Stop
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(ToRank).decode


_PLAN = tuple(field.name for field in fields(StepPlan))
_LIMITS = tuple(field.name for field in fields(StepLimits))


def _values(of: Any, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the named fields of an object: a Rust scheduler's plan has a `StepPlan`'s fields, but is none."""
    return tuple(getattr(of, name) for name in names)


def sizes_of(buffers: StepBuffers) -> NewBuffers:
    return NewBuffers(_values(buffers.limits, _LIMITS), len(buffers.ring[0].req_slots), len(buffers.ring))


def make_buffers(sizes: NewBuffers) -> StepBuffers:
    return StepBuffers(StepLimits(*sizes.limits), sizes.padded_rows, sizes.ring_len)


def pack(plan: StepPlan, buffers: StepBuffers, assignments: list[SlotAssignment], in_flight: int = 0) -> RankStep:
    data = b"".join(region.tobytes() for region in live_regions(plan, buffers.ring[plan.ring_index]))
    sent = (RankAssignment(b.slot, b.req_id, b.sampling, b.tokens.tobytes(), b.num_prompt) for b in assignments)
    return RankStep(plan.step, _values(plan, _PLAN), data, tuple(sent), in_flight)


def unpack(step: RankStep, buffers: StepBuffers) -> tuple[StepPlan, list[SlotAssignment]]:
    """Write the step into its ring entry. Returns its plan and assignments. Raises `ValueError` for a wrong length."""
    plan, at = StepPlan(*step.plan), 0
    for region in live_regions(plan, buffers.ring[plan.ring_index]):
        region[...] = np.frombuffer(step.data, region.dtype, region.size, at).reshape(region.shape)
        at += region.nbytes
    if at != len(step.data):
        raise ValueError(f"a step of {len(step.data)} bytes, not {at}")
    assignments = [
        SlotAssignment(b.slot, b.req_id, b.sampling, np.frombuffer(b.tokens, np.int32), b.num_prompt)
        for b in step.assignments
    ]
    return plan, assignments
