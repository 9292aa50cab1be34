"""Turns messages into the scheduler's events, and tracks requests, prefixes and adapters.

Invariants: a request reaches the scheduler once its grammar is compiled, its adapter is loaded, its images are computed
and its stored pages were looked up, or it is refused; a client's abort or finish takes effect wherever the request is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np

from minisgl.config import EngineConfig
from minisgl.engine.api import Engine, EngineInfo, Sees, Stores
from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.slots import Matcher
from minisgl.message import (
    GRAMMAR_REFUSED,
    AbortRequest,
    AddPrefix,
    AddRequest,
    ClearCache,
    FinishRequest,
    FromEngine,
    RemovePrefix,
    Shutdown,
    ToEngine,
    Watch,
)
from minisgl.prompt_image import DIGEST_BYTES, FIRST_VIRTUAL_ID, virtual_ids
from minisgl.runner.adapters import EngineAdapters
from minisgl.runner.drafting import Proposer
from minisgl.runner.prefixes import Prefixes
from minisgl.runner.reading import Reading
from minisgl.runner.request_tracker import Compiling, RequestTracker, TrackedRequest, ended
from minisgl.runner.seeing import Seeing
from minisgl.sampling_params import ParamError
from minisgl.scheduler.api import AGE, ControlPlane
from minisgl.step import Abort, Arrival, Event, Events, Finish, FinishReason, Int32Array

OWN_NAMESPACES = 1 << 30  # namespaces of API keys start here; below are those of adapters
Send = Callable[[Sequence[FromEngine]], None]


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Settings of a step loop. `has_budget`: unused cached tokens are limited, and evicted after requests have ended.
    `own_cache_keys`: ids of the API keys whose cached prefixes are private, each with its name in the page store."""

    overlap: bool = True
    keeps_prefixes: bool = True
    has_budget: bool = False
    own_cache_keys: Sequence[tuple[int, bytes]] = ()

    @classmethod
    def of(cls, config: EngineConfig) -> LoopSettings:
        return cls(
            config.overlap, config.cache != "naive", config.cache_token_budget is not None, config.own_cache_keys
        )


@dataclass(frozen=True, slots=True)
class Beside:
    """Helpers of a step loop: the grammar compiler, the draft model, and `wake`, which the compiler and the readers of
    adapters and pages call from their threads when they are done. Without `wake` they block."""

    compiler: GrammarCompiler | None = None
    wake: Callable[[], None] | None = None
    guesses: Proposer | None = None


class Intake:
    """Passes messages to the scheduler as events; `send` gets early replies. `step` is the next step's number."""

    def __init__(
        self, engine: Engine, control_plane: ControlPlane, send: Send, settings: LoopSettings, beside: Beside
    ) -> None:
        self._info = engine.info
        self._send = send
        self.step = 0
        self.requests = RequestTracker(judges=engine.info.kind == "judge")
        limits = control_plane.buffers.limits
        self.prefixes = Prefixes(
            self.requests, limits, send, keeps=settings.keeps_prefixes and engine.info.shares_prefixes
        )
        self.compiling = Compiling(beside.compiler)
        self.adapters = EngineAdapters(engine, send, self.end_early, self._adapters_in_use, beside.wake)
        self._stores = engine if isinstance(engine, Stores) and engine.store is not None else None
        store = None if self._stores is None else self._stores.store
        self.reading = Reading(store, limits.page_size, beside.wake)
        sees = engine if isinstance(engine, Sees) and engine.info.sees else None
        self.seeing = Seeing(sees, limits.page_size, beside.wake)
        self._page_size = limits.page_size
        self.ending: dict[int, FinishReason] = {}  # requested ends that are not reported yet
        self.watch: Watch | None = None  # not handled by the loop yet
        self.shutdown = False
        self._own_cache_keys = dict(settings.own_cache_keys)
        self._namespaces: dict[tuple[int, int], int] = {}  # by API key and adapter
        self._num_arrivals = 0  # arrivals at the scheduler

    @property
    def has_events(self) -> bool:
        """Whether there are events for the next step even without new messages."""
        return bool(self.prefixes.events) or self.adapters.has_removals or self.compiling.has_returns

    def _adapters_in_use(self) -> set[int]:
        return self.requests.adapters() | self.compiling.adapters()

    def take(self, messages: Sequence[ToEngine], events: Events, control_plane: ControlPlane) -> None:
        """Add the events that have become due, and those of `messages`, to `events`."""
        events.items += self.prefixes.events
        self.prefixes.events = []
        for request, matcher, error in self.compiling.take():
            if isinstance(request, TrackedRequest):
                events.add(self._return(request))
            elif matcher is None:
                self.refuse(request.req_id, f"{GRAMMAR_REFUSED}{error}")
            else:
                self._arrive(events, self._tracked(request, matcher), control_plane)
        for seen in self.seeing.take():
            events.add(seen.arrival())
        for message in self.adapters.intake(messages):
            match message:
                case AddRequest() if error := _error_of(message, self._info):
                    self.refuse(message.req_id, error)
                case AddRequest() if message.sampling.grammar is not None:
                    if error := self.compiling.add(message):
                        self.refuse(message.req_id, f"{GRAMMAR_REFUSED}{error}")
                case AddRequest():
                    self._arrive(events, self._tracked(message), control_plane)
                case AbortRequest(req_id):
                    self._end(events, Abort(req_id), FinishReason.ABORT)
                case FinishRequest(req_id):
                    self._end(events, Finish(req_id), FinishReason.STOP)
                case AddPrefix() | RemovePrefix() | ClearCache():
                    for event in self.prefixes.take(message, control_plane.stats().num_evictable_pages):
                        self._add_prefix_event(events, event, control_plane)
                case Watch():
                    self.watch = message
                case Shutdown():
                    self.shutdown = True
        for event in self.reading.take():
            if isinstance(event, Arrival):
                self._see(events, self.requests.get(event.req_id), control_plane)
            else:
                events.add(event)

    def arrivals(self) -> list[Event]:
        """Return the arrivals of all requests that the scheduler has, for another scheduler."""
        self.seeing.lost()
        elsewhere = self.compiling, self.seeing, self.reading
        return [r.arrival() for r in self.requests.live() if not any(r.req_id in holder for holder in elsewhere)]

    def forget(self, req_id: int, field: str, reason: str) -> None:
        """Drop a request whose arrival the scheduler refused, and report the reason."""
        self.requests.drop(req_id)
        self.ending.pop(req_id, None)
        if req_id < 0:
            self.prefixes.refuse(req_id, field, reason)
        else:
            self.refuse(req_id, f"{field}: {reason}")

    def refuse(self, req_id: int, reason: str) -> None:
        self.end_early(req_id, FinishReason.ERROR, reason)

    def end_early(self, req_id: int, reason: FinishReason, text: str = "") -> None:
        """Report the end of a request that has not reached the scheduler."""
        self._send([ended(self.step, req_id, reason, text)])

    def _end(self, events: Events, event: Abort | Finish, reason: FinishReason) -> None:
        """End a request at its client's wish, wherever it is."""
        if any(holder.drop(event.req_id) for holder in (self.compiling, self.seeing, self.reading)):
            if event.req_id in self.requests:
                self.requests.drop(event.req_id)
            self.end_early(event.req_id, reason)
            return
        events.add(event)
        self.ending.setdefault(event.req_id, reason)

    def _add_prefix_event(self, events: Events, event: Event, control_plane: ControlPlane) -> None:
        match event:
            case Arrival(req_id):
                self._arrive(events, self.requests.get(req_id), control_plane)
            case Abort(req_id) if self.reading.drop(req_id):
                self.requests.drop(req_id)
                self.prefixes.computed.pop(req_id, None)
            case Abort(req_id):
                self.ending.setdefault(req_id, FinishReason.ABORT)
                events.add(event)
            case _:
                events.add(event)

    def _arrive(self, events: Events, request: TrackedRequest, control_plane: ControlPlane) -> None:
        """Add the arrival to `events`, or first read the request's stored pages."""
        if not self.reading.add(request, lambda: control_plane.cached_pages(request.tokens, request.namespace)):
            self._see(events, request, control_plane)

    def _see(self, events: Events, request: TrackedRequest, control_plane: ControlPlane) -> None:
        """Add the arrival to `events`, or first compute the images that neither cached nor stored pages cover."""
        if not self.seeing.add(request, partial(self._num_pages, request, control_plane)):
            events.add(request.arrival())

    def _num_pages(self, request: TrackedRequest, control_plane: ControlPlane) -> int:
        """Return how many pages of a request are cached or were read."""
        stored = request.stored_len(self._page_size) // self._page_size
        return max(control_plane.cached_pages(request.tokens, request.namespace), stored)

    @property
    def prepares(self) -> bool:
        """Whether requests may need something before their first step: stored pages, or features of images."""
        return self.reading.has_store or self.seeing.sees

    def sent_back(self, request: TrackedRequest, control_plane: ControlPlane) -> None:
        """Prepare a retracted request again, for when the scheduler admits it."""
        self.reading.sent_back(request)
        self.seeing.sent_back(request, partial(self._num_pages, request, control_plane))

    def started(self, req_id: int) -> None:
        """End the preparation of a request that was admitted."""
        self.reading.started(req_id)
        self.seeing.started(req_id)

    def _tracked(self, message: AddRequest, grammar: Matcher | None = None) -> TrackedRequest:
        if message.req_id in self.requests:
            raise ValueError(f"request id {message.req_id} was used twice")
        tokens = np.frombuffer(message.tokens, np.int32)
        num_prompt = len(tokens) - message.num_generated
        request = self.requests.add(
            message.req_id, message.sampling, tokens, num_prompt, message.priority, background=message.background
        )
        if message.key in self._own_cache_keys:
            own = (message.key, message.sampling.adapter)
            request.namespace = self._namespaces.setdefault(own, OWN_NAMESPACES + len(self._namespaces))
        request.space = self._store_namespace(message.sampling.adapter, self._own_cache_keys.get(message.key))
        request.grammar, request.images = grammar, message.images
        request.number = self._num_arrivals
        self._num_arrivals += 1
        return request

    def _store_namespace(self, adapter: int, own: bytes | None) -> bytes:
        """Return the namespace's name in the page store, valid across processes; empty for the shared one."""
        if self._stores is None or (not adapter and own is None):
            return b""
        digest = self._stores.adapter_digest(adapter) if adapter else b""
        return msgspec.msgpack.encode((digest, own))

    def _return(self, request: TrackedRequest) -> Arrival:
        """Return the arrival of a request that has waited for a grammar mask, with its priority raised, so that it does
        not queue after requests that came since."""
        arrival = self.requests.get(request.req_id).arrival()
        steps = -(-(self._num_arrivals - request.number) // AGE)
        self._num_arrivals += 1
        return replace(arrival, priority=max(arrival.priority - steps, -(2**31) + 1))


def _error_of_images(message: AddRequest, info: EngineInfo, prompt: Int32Array) -> str:
    """Return the reason why the images of a request are invalid, or an empty string. All virtual ids of a valid request
    are those of its images."""
    if not info.sees:
        return "the model does not see"
    if message.sampling.prompt_logprobs is not None:
        return "prompt_logprobs are not supported with images"
    end, num_virtual, merge = 0, 0, info.patches_per_side
    for image in message.images:
        (rows, columns), start, num_tokens = image.grid, image.start, image.num_tokens
        if min(rows, columns) < 1 or rows % merge or columns % merge or rows * columns != num_tokens * merge**2:
            return f"a grid of {rows} x {columns} patches for {num_tokens} tokens"
        if len(image.digest) != DIGEST_BYTES or len(image.pixels) != rows * columns * info.patch_bytes:
            return f"{len(image.pixels)} bytes of pixels, a digest of {len(image.digest)}"
        if start < end or start + num_tokens > len(prompt):
            return f"{num_tokens} tokens at {start} of {len(prompt)}, after {end}"
        end = start + num_tokens
        if not np.array_equal(prompt[start:end], virtual_ids(image.digest, num_tokens)):
            return f"the ids at {start} are not those of the image"
        num_virtual += num_tokens
    if num_virtual != np.count_nonzero(np.frombuffer(message.tokens, np.int32) >= FIRST_VIRTUAL_ID):
        return "there are virtual ids of no image"
    return ""


def _error_of(message: AddRequest, info: EngineInfo) -> str:
    """Return the reason why a request is invalid, or an empty string."""
    sampling, vocab_size = message.sampling, info.vocab_size
    if sampling.max_tokens is None or sampling.seed is None:
        return "sampling: max_tokens and seed must be resolved before the engine sees them"
    try:
        sampling.check()
    except ParamError as error:
        return str(error)
    if len(message.tokens) % 4:
        return f"tokens: {len(message.tokens)} bytes: no multiple of 4"
    if not -(2**63) <= message.priority < 2**63:
        return "priority: more than 64 bits"
    tokens = np.frombuffer(message.tokens, np.int32)
    if not 0 <= message.num_generated < min(len(tokens), sampling.max_tokens):
        return f"num_generated: {message.num_generated}: must leave a prompt and a token to make"
    if message.images:
        if reason := _error_of_images(message, info, tokens[: len(tokens) - message.num_generated]):
            return f"images: {reason}"
        tokens = tokens[tokens < FIRST_VIRTUAL_ID]
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        return f"tokens: ids must be at least 0 and below {vocab_size}"
    if invalid := sampling.beyond(vocab_size):
        return f"{invalid[0]}: token ids must be below {vocab_size} (got {invalid[1]})"
    return ""
