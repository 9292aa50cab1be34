"""Recorded scheduler calls, and their replay with another scheduler. A trace is a file of msgpack frames, each preceded
by its length (4 bytes, little-endian): first the configuration, then one frame per call, written before the call is
made, so that the trace contains a call that breaks the scheduler. The file may be gzip-compressed, like those in
`tests/replay`. A truncated trace is read up to its last whole frame; a trace gives the same digests on every machine.
"""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, get_type_hints

import msgspec
import numpy as np

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig, ControlPlaneError
from minisgl.scheduler.digest import output_digest, plan_digest
from minisgl.scheduler.wrapped import WrappedControlPlane
from minisgl.step import (
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
    """Error for a file that is not a trace of the supported version."""


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
    """Frame after the header, for models with recurrent layers only."""

    checkpoint_interval: int
    num_checkpoints: int


class _Policy(msgspec.Struct, tag="policy", array_like=True):
    """Frame after the header, for schedule policies other than fcfs only."""

    schedule_policy: str


_KINDS: dict[str, type[Any]] = {
    "arrival": Arrival,
    "stored": Arrival,  # an arrival with stored pages
    "finish": Finish,
    "abort": Abort,
    "failed": ForwardFailed,
    "unpin": Unpin,
    "clear": ClearCache,
    "budget": TokenBudget,
    "read": PagesRead,
    "draft": Draft,
}
"""Event types by their tags in a frame."""


def _form(tag: str, kind: type[Any]) -> type[msgspec.Struct]:
    """Return the msgpack struct for an event type: its fields in order, an arrival's tokens as int32 bytes."""
    left_out = ("stored_from", "stored_to") if tag == "arrival" else ()
    types = get_type_hints(kind) | ({"tokens": bytes} if kind is Arrival else {})
    struct_fields: list[Any] = []
    for field in fields(kind):
        if field.name not in left_out:
            default = () if field.default is MISSING else (field.default,)
            struct_fields.append((field.name, types[field.name], *default))
    return msgspec.defstruct(kind.__name__, struct_fields, tag=tag, array_like=True)


_FORMS = {tag: _form(tag, kind) for tag, kind in _KINDS.items()}
_TAGS = {kind: tag for tag, kind in _KINDS.items() if tag != "stored"}
if TYPE_CHECKING:
    _Event = msgspec.Struct
else:
    _Event = reduce(or_, _FORMS.values())


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
    """A scheduler that writes every call of `inner` to `file` as a trace."""

    def __init__(self, inner: ControlPlane, config: ControlPlaneConfig, file: BinaryIO) -> None:
        super().__init__(inner)
        self._file = file
        settings = {name: getattr(config, name) for name in _Header.__struct_fields__ if name != "version"}
        self._write(_Header(version=VERSION, **settings))
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
    stored = isinstance(event, Arrival) and event.stored_to
    form = _FORMS["stored" if stored else _TAGS[type(event)]]
    values = {name: getattr(event, name) for name in form.__struct_fields__}
    if isinstance(event, Arrival):
        values["tokens"] = event.tokens.tobytes()
    return form(**values)


def _unpacked(event: _Event) -> Event:
    kind, values = _KINDS[str(event.__struct_config__.tag)], msgspec.structs.asdict(event)
    if kind is Arrival:
        values["tokens"] = np.frombuffer(values["tokens"], np.int32)
    unpacked: Event = kind(**values)
    return unpacked


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded configuration and its calls: (step, events) for a schedule, (step, tokens) for a commit."""

    config: ControlPlaneConfig
    calls: list[tuple[int, Events | Int32Array]]

    def call_name(self, index: int) -> str:
        """Return the name of a call, such as "commit(12)"."""
        step, given = self.calls[index]
        return f"{'schedule' if isinstance(given, Events) else 'commit'}({step})"


def read_trace(path: Path) -> Trace:
    """Read a trace file, which may be gzip-compressed. Raises `TraceError` if it is no valid trace, and `OSError`."""
    data = path.read_bytes()
    if data.startswith(GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path.name}: {error}") from error
    return parse_trace(data, path.name)


def parse_trace(data: bytes, name: str) -> Trace:
    """Parse a trace. `name` is the file's name in error texts. Raises `TraceError`."""
    frames = _frames(data, name)
    header = next(frames, None)
    if not isinstance(header, _Header) or header.version != VERSION:
        raise TraceError(f"{name}: not a trace of version {VERSION}")
    settings = {field: getattr(header, field) for field in _Header.__struct_fields__ if field != "version"}
    calls: list[tuple[int, Events | Int32Array]] = []
    for frame in frames:
        match frame:
            case _Schedule(step, events):
                calls.append((step, Events([_unpacked(event) for event in events])))
            case _Commit(step, tokens):
                calls.append((step, np.frombuffer(tokens, np.int32)))
            case _States(interval, slots):
                settings |= {"checkpoint_interval": interval, "num_checkpoints": slots}
            case _Policy(policy):
                settings["schedule_policy"] = policy
            case _Header():
                raise TraceError(f"{name}: a second header")
    return Trace(ControlPlaneConfig(**settings), calls)


def _frames(data: bytes, name: str) -> Iterator[_Frame]:
    at = 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + size > len(data):
            return  # truncated in the middle of a frame
        try:
            yield _decoder.decode(data[at + 4 : at + 4 + size])
        except msgspec.MsgspecError as error:
            raise TraceError(f"{name}: byte {at}: {error}") from error
        at += 4 + size


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a replay: digest and duration of each call, up to the first that failed; `error` has its text."""

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
    """Make the calls of `trace` on `plane`. A scheduler that decides differently may raise an error in a later call:
    the replay ends there."""
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
