"""Recorded calls of a control plane, and driving another one with them.

A trace is a file of msgpack frames, each behind its length (4 bytes, little-endian): first the configuration, then one
frame a call, written before the call is made, so that a call which breaks the control plane is in it.

Keeps true: a trace that was cut off is read up to the cut; the same trace gives the same digests on every machine.
Doesn't know: engines. (The recorded tokens stand in for one.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig, Stats
from minisgl.scheduler.reference.digest import output_digest, plan_digest
from minisgl.step import (
    Abort,
    Arrival,
    Event,
    Events,
    Finish,
    ForwardFailed,
    Int32Array,
    StepBuffers,
    StepOutput,
    StepPlan,
)

VERSION = 1


class TraceError(ValueError):
    """A file that is no trace, or of another version."""


class _Header(msgspec.Struct, tag="trace", array_like=True):
    version: int
    num_pages: int
    page_size: int
    max_running_requests: int
    max_prefill_length: int
    context_len: int
    eos_ids: tuple[int, ...]
    cache: str
    graph_sizes: tuple[int, ...]


class _Arrival(msgspec.Struct, tag="arrival", array_like=True):
    req_id: int
    tokens: bytes  # int32
    num_prompt: int
    max_tokens: int
    num_generated: int
    stop_ids: tuple[int, ...]
    min_tokens: int
    ignore_eos: bool
    priority: int
    no_overlap: bool
    no_match: bool


class _Finish(msgspec.Struct, tag="finish", array_like=True):
    req_id: int


class _Abort(msgspec.Struct, tag="abort", array_like=True):
    req_id: int


class _ForwardFailed(msgspec.Struct, tag="failed", array_like=True):
    step: int


class _Schedule(msgspec.Struct, tag="schedule", array_like=True):
    step: int
    events: list[_Arrival | _Finish | _Abort | _ForwardFailed]


class _Commit(msgspec.Struct, tag="commit", array_like=True):
    step: int
    tokens: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header | _Schedule | _Commit)


class RecordingControlPlane:
    """The one inside, with every call written to `file`."""

    def __init__(self, inner: ControlPlane, config: ControlPlaneConfig, file: BinaryIO) -> None:
        self._inner = inner
        self._file = file
        fields = {name: getattr(config, name) for name in _Header.__struct_fields__ if name != "version"}
        self._write(_Header(version=VERSION, **fields))

    def schedule(self, step: int, events: Events) -> StepPlan:
        self._write(_Schedule(step, [_packed(event) for event in events]))
        return self._inner.schedule(step, events)

    def commit(self, step: int, tokens: Int32Array) -> StepOutput:
        self._write(_Commit(step, tokens.tobytes()))
        return self._inner.commit(step, tokens)

    def stats(self) -> Stats:
        return self._inner.stats()

    def check(self) -> None:
        self._inner.check()

    @property
    def buffers(self) -> StepBuffers:
        return self._inner.buffers

    def _write(self, frame: _Header | _Schedule | _Commit) -> None:
        data = _encoder.encode(frame)
        self._file.write(len(data).to_bytes(4, "little") + data)
        self._file.flush()


def _packed(event: Event) -> _Arrival | _Finish | _Abort | _ForwardFailed:
    match event:
        case Arrival():
            fields = {name: getattr(event, name) for name in _Arrival.__struct_fields__ if name != "tokens"}
            return _Arrival(tokens=event.tokens.tobytes(), **fields)
        case Finish(req_id):
            return _Finish(req_id)
        case Abort(req_id):
            return _Abort(req_id)
        case ForwardFailed(step):
            return _ForwardFailed(step)


def _unpacked(event: _Arrival | _Finish | _Abort | _ForwardFailed) -> Event:
    match event:
        case _Arrival():
            fields = {name: getattr(event, name) for name in _Arrival.__struct_fields__ if name != "tokens"}
            return Arrival(tokens=np.frombuffer(event.tokens, np.int32), **fields)
        case _Finish(req_id):
            return Finish(req_id)
        case _Abort(req_id):
            return Abort(req_id)
        case _ForwardFailed(step):
            return ForwardFailed(step)


@dataclass(frozen=True, slots=True)
class Trace:
    """`calls` are (step, events) of a schedule or (step, tokens) of a commit."""

    config: ControlPlaneConfig
    calls: list[tuple[int, Events | Int32Array]]


def read_trace(path: Path) -> Trace:
    """Raises `TraceError`, `OSError`."""
    frames = _frames(path)
    header = next(frames, None)
    if not isinstance(header, _Header) or header.version != VERSION:
        raise TraceError(f"{path.name}: not a trace of version {VERSION}")
    fields = {name: getattr(header, name) for name in _Header.__struct_fields__ if name != "version"}
    calls: list[tuple[int, Events | Int32Array]] = []
    for frame in frames:
        match frame:
            case _Schedule(step, events):
                calls.append((step, Events([_unpacked(event) for event in events])))
            case _Commit(step, tokens):
                calls.append((step, np.frombuffer(tokens, np.int32)))
            case _Header():
                raise TraceError(f"{path.name}: a second header")
    return Trace(ControlPlaneConfig(**fields), calls)


def _frames(path: Path) -> Iterator[_Header | _Schedule | _Commit]:
    data = path.read_bytes()
    at = 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + size > len(data):
            return  # cut off in the middle of a frame
        try:
            yield _decoder.decode(data[at + 4 : at + 4 + size])
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path.name}: byte {at}: {error}") from error
        at += 4 + size


@dataclass(frozen=True, slots=True)
class Replay:
    """Digests by call, and the seconds that the calls took in all."""

    digests: list[int]
    seconds: float
    num_steps: int


def replay(trace: Trace, plane: ControlPlane) -> Replay:
    """Drive `plane` with the calls of `trace`."""
    digests, seconds, num_steps = list[int](), 0.0, 0
    for step, given in trace.calls:
        began = time.perf_counter()
        if isinstance(given, Events):
            plan = plane.schedule(step, given)
            seconds += time.perf_counter() - began
            digests.append(plan_digest(plan, plane.buffers))
            num_steps += 1
        else:
            output = plane.commit(step, given)
            seconds += time.perf_counter() - began
            digests.append(output_digest(output))
    return Replay(digests, seconds, num_steps)
