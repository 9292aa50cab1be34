"""Recorded calls of a scheduler, and driving another one with them.

A trace is a file of msgpack frames, each behind its length (4 bytes, little-endian): first the configuration, then one
frame a call, written before the call is made, so that a call which breaks the scheduler is in it.

A file may be compressed with gzip afterwards, as the corpus in `tests/replay` is.

A trace that was cut off is read up to the cut; the same trace gives the same digests on every machine.
"""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig, ControlPlaneError
from minisgl.scheduler.digest import output_digest, plan_digest
from minisgl.scheduler.wrapped import WrappedControlPlane
from minisgl.step import (
    UNBOUNDED,
    Abort,
    Arrival,
    ClearCache,
    Draft,
    Event,
    Events,
    Finish,
    ForwardFailed,
    Int32Array,
    PagesRead,
    StepOutput,
    StepPlan,
    TokenBudget,
    Unpin,
)

VERSION = 1
GZIP = b"\x1f\x8b"


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
    max_pinned_pages: int = 0
    cache_token_budget: int = 0
    cache_max_prompt: int = 0
    max_draft_len: int = 0


class _States(msgspec.Struct, tag="states", array_like=True):
    """Behind the header, of a model that has states."""

    checkpoint_interval: int
    num_checkpoints: int


class _Policy(msgspec.Struct, tag="policy", array_like=True):
    """Behind the header, of one that is not fcfs."""

    schedule_policy: str


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
    background: bool = False
    pin: bool = False
    namespace: int = 0
    no_drafts: bool = False


class _StoredArrival(_Arrival, tag="stored", array_like=True):
    """An arrival that also says which pages can be loaded."""

    stored_from: int = 0
    stored_to: int = 0


class _Finish(msgspec.Struct, tag="finish", array_like=True):
    req_id: int


class _Abort(msgspec.Struct, tag="abort", array_like=True):
    req_id: int


class _ForwardFailed(msgspec.Struct, tag="failed", array_like=True):
    step: int


class _Unpin(msgspec.Struct, tag="unpin", array_like=True):
    req_id: int


class _ClearCache(msgspec.Struct, tag="clear", array_like=True):
    pass


class _TokenBudget(msgspec.Struct, tag="budget", array_like=True):
    beside_decode: int
    prefill_only: int
    background: int = UNBOUNDED


class _PagesRead(msgspec.Struct, tag="read", array_like=True):
    req_id: int
    stored_from: int
    stored_to: int


class _Draft(msgspec.Struct, tag="draft", array_like=True):
    req_id: int
    length: int
    tokens: tuple[int, ...]


_Event = (
    _Arrival
    | _StoredArrival
    | _Finish
    | _Abort
    | _ForwardFailed
    | _Unpin
    | _ClearCache
    | _TokenBudget
    | _PagesRead
    | _Draft
)


class _Schedule(msgspec.Struct, tag="schedule", array_like=True):
    step: int
    events: list[_Event]


class _Commit(msgspec.Struct, tag="commit", array_like=True):
    step: int
    tokens: bytes


_encoder = msgspec.msgpack.Encoder()
_Frame = _Header | _States | _Policy | _Schedule | _Commit
_decoder = msgspec.msgpack.Decoder(_Frame)


class RecordingControlPlane(WrappedControlPlane):
    """The one inside, with every call written to `file`."""

    def __init__(self, inner: ControlPlane, config: ControlPlaneConfig, file: BinaryIO) -> None:
        super().__init__(inner)
        self._file = file
        fields = {name: getattr(config, name) for name in _Header.__struct_fields__ if name != "version"}
        self._write(_Header(version=VERSION, **fields))
        if config.checkpoint_interval:
            self._write(_States(config.checkpoint_interval, config.num_checkpoints))
        if config.schedule_policy != "fcfs":
            self._write(_Policy(config.schedule_policy))

    def schedule(self, step: int, events: Events) -> StepPlan:
        self._write(_Schedule(step, [_packed(event) for event in events]))
        return self._inner.schedule(step, events)

    def commit(self, step: int, tokens: Int32Array) -> StepOutput:
        self._write(_Commit(step, tokens.tobytes()))
        return self._inner.commit(step, tokens)

    def _write(self, frame: _Frame) -> None:
        data = _encoder.encode(frame)
        self._file.write(len(data).to_bytes(4, "little") + data)
        self._file.flush()


def _packed(event: Event) -> _Event:
    match event:
        case Arrival():
            kind = _StoredArrival if event.stored_to else _Arrival
            fields = {name: getattr(event, name) for name in kind.__struct_fields__ if name != "tokens"}
            return kind(tokens=event.tokens.tobytes(), **fields)
        case Finish(req_id):
            return _Finish(req_id)
        case Abort(req_id):
            return _Abort(req_id)
        case ForwardFailed(step):
            return _ForwardFailed(step)
        case Unpin(req_id):
            return _Unpin(req_id)
        case ClearCache():
            return _ClearCache()
        case TokenBudget(beside_decode, prefill_only, background):
            return _TokenBudget(beside_decode, prefill_only, background)
        case PagesRead(req_id, stored_from, stored_to):
            return _PagesRead(req_id, stored_from, stored_to)
        case Draft(req_id, length, tokens):
            return _Draft(req_id, length, tokens)


def _unpacked(event: _Event) -> Event:
    match event:
        case _Arrival():
            fields = {name: getattr(event, name) for name in event.__struct_fields__ if name != "tokens"}
            return Arrival(tokens=np.frombuffer(event.tokens, np.int32), **fields)
        case _Finish(req_id):
            return Finish(req_id)
        case _Abort(req_id):
            return Abort(req_id)
        case _ForwardFailed(step):
            return ForwardFailed(step)
        case _Unpin(req_id):
            return Unpin(req_id)
        case _ClearCache():
            return ClearCache()
        case _TokenBudget(beside_decode, prefill_only, background):
            return TokenBudget(beside_decode, prefill_only, background)
        case _PagesRead(req_id, stored_from, stored_to):
            return PagesRead(req_id, stored_from, stored_to)
        case _Draft(req_id, length, tokens):
            return Draft(req_id, length, tokens)


@dataclass(frozen=True, slots=True)
class Trace:
    """`calls` are (step, events) of a schedule or (step, tokens) of a commit."""

    config: ControlPlaneConfig
    calls: list[tuple[int, Events | Int32Array]]

    def call_name(self, index: int) -> str:
        """Such as "commit(12)"."""
        step, given = self.calls[index]
        return f"{'schedule' if isinstance(given, Events) else 'commit'}({step})"


def read_trace(path: Path) -> Trace:
    """Raises `TraceError`, `OSError`."""
    data = path.read_bytes()
    if data.startswith(GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path.name}: {error}") from error
    return parse_trace(data, path.name)


def parse_trace(data: bytes, name: str) -> Trace:
    """`name` is what errors call it. Raises `TraceError`."""
    frames = _frames(data, name)
    header = next(frames, None)
    if not isinstance(header, _Header) or header.version != VERSION:
        raise TraceError(f"{name}: not a trace of version {VERSION}")
    fields = {field: getattr(header, field) for field in _Header.__struct_fields__ if field != "version"}
    calls: list[tuple[int, Events | Int32Array]] = []
    for frame in frames:
        match frame:
            case _Schedule(step, events):
                calls.append((step, Events([_unpacked(event) for event in events])))
            case _Commit(step, tokens):
                calls.append((step, np.frombuffer(tokens, np.int32)))
            case _States(interval, slots):
                fields |= {"checkpoint_interval": interval, "num_checkpoints": slots}
            case _Policy(policy):
                fields["schedule_policy"] = policy
            case _Header():
                raise TraceError(f"{name}: a second header")
    return Trace(ControlPlaneConfig(**fields), calls)


def _frames(data: bytes, name: str) -> Iterator[_Frame]:
    at = 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + size > len(data):
            return  # cut off in the middle of a frame
        try:
            yield _decoder.decode(data[at + 4 : at + 4 + size])
        except msgspec.MsgspecError as error:
            raise TraceError(f"{name}: byte {at}: {error}") from error
        at += 4 + size


@dataclass(frozen=True, slots=True)
class Replay:
    """What the calls decided, by digest, and how long each took; up to a call that failed, which `error` tells of."""

    digests: list[int]
    schedule_ns: list[int]
    commit_ns: list[int]
    error: str = ""

    @property
    def num_steps(self) -> int:
        return len(self.schedule_ns)

    @property
    def seconds(self) -> float:
        return (sum(self.schedule_ns) + sum(self.commit_ns)) / 1e9


def replay(trace: Trace, plane: ControlPlane) -> Replay:
    """Drive `plane` with the calls of `trace`. One that decides differently may find a later call impossible: then that
    is where the replay ends."""
    digests, schedule_ns, commit_ns = list[int](), list[int](), list[int]()
    for step, given in trace.calls:
        began = time.perf_counter_ns()
        try:
            if isinstance(given, Events):
                plan = plane.schedule(step, given)
                schedule_ns.append(time.perf_counter_ns() - began)
                digests.append(plan_digest(plan, plane.buffers))
            else:
                output = plane.commit(step, given)
                commit_ns.append(time.perf_counter_ns() - began)
                digests.append(output_digest(output))
        except (ControlPlaneError, ValueError) as error:
            return Replay(digests, schedule_ns, commit_ns, f"{type(error).__name__}: {error}")
    return Replay(digests, schedule_ns, commit_ns)
