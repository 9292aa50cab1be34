"""Engine of scripted replies: the engine process's side of the protocol, without a model.

The prompt contains the reply: "say:TEXT" sends TEXT byte by byte and an EOS, "hang:TEXT" sends TEXT and then nothing
until it is aborted, "fail:TEXT" ends with an error after TEXT, "burst:TEXT" sends all of TEXT at once, "fill:" sends
`FILL` times an x and then hangs. Of several commands in a prompt the last one counts, as in a conversation. Without one
the reply is the first match in `replies`, else "ok". Log probabilities are those of `chance`, with one alternative.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeVar

import msgspec
import numpy as np

from minisgl.message import (
    AbortRequest,
    AddRequest,
    Embedding,
    EngineReady,
    EngineStats,
    FinishRequest,
    FromEngine,
    Heartbeat,
    StepTokens,
    ToEngine,
    TokenLogprobs,
)
from minisgl.message.codec import encode, framed
from minisgl.step import FinishReason
from tests.helpers.peers import EnginePeer
from tests.helpers.seconds import WAIT_S

EOS = 256
VOCAB_SIZE = 258
FILL = 480
RIVAL = ord("?")
MOST_SEEN = 512  # prompts that are compared with each new one
MAX_SEQ_LEN = 512
_ORDER = re.compile(rb"(say|hang|fail|burst|fill):(.*?)(?:</user>|$)", re.DOTALL)
T = TypeVar("T")

READY = EngineReady(
    engine="scripted",
    model_dir=None,
    vocab_size=VOCAB_SIZE,
    max_seq_len=MAX_SEQ_LEN,
    eos_ids=(EOS,),
    num_pages=64,
    page_size=16,
    device="none",
    dtype="none",
    cpu_backend="none",
)
STATS = EngineStats(
    num_waiting=2,
    num_running=3,
    num_pages=64,
    num_free_pages=40,
    num_evictable_pages=8,
    num_protected_pages=10,
    num_held_pages=6,
    num_retracted_total=5,
    num_prompt_tokens_total=700,
    num_cached_tokens_total=300,
    num_steps_total=900,
)


def prompt_ids(request: AddRequest) -> list[int]:
    return [int(token) for token in np.frombuffer(request.tokens, np.int32)]


def prompt_text(request: AddRequest) -> str:
    return bytes(token for token in prompt_ids(request) if token < 256).decode()


def one_token(req_id: int, token: int, reason: FinishReason = FinishReason.NONE) -> StepTokens:
    """Return a step of one row."""
    return StepTokens(
        step=0,
        req_ids=np.array([req_id], np.int64).tobytes(),
        tokens=np.array([token], np.int32).tobytes(),
        reasons=np.array([reason], np.int32).tobytes(),
    )


def failed_step(req_id: int, error: str) -> StepTokens:
    """Return the end of a request whose forward failed."""
    return msgspec.structs.replace(one_token(req_id, -1, FinishReason.ERROR), errors={req_id: error})


def chance(token: int) -> float:
    """Return the probability of a token: (n + 0.5) / 10 for digit n, else 0.95."""
    return (token - ord("0") + 0.5) / 10 if ord("0") <= token <= ord("9") else 0.95


@dataclass
class _Live:
    request: AddRequest
    kind: str
    tokens: list[int]
    sent: int = 0
    is_bound: bool = False


_SAYING = ("say", "burst")  # these end with their text, whatever may end them


@dataclass
class ScriptedEngine:
    """Engine process's side of the protocol, in a thread. `received` are all messages, in order."""

    address: str
    ready: EngineReady | None = READY
    beats: bool = True
    replies: Mapping[str, str] = field(default_factory=dict)
    marks: Mapping[int, list[int]] = field(default_factory=dict)  # bytes of an order -> the tokens that it means
    pace_s: float = 0.0  # between steps
    received: list[ToEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._outbox: SimpleQueue[bytes | list[FromEngine]] = SimpleQueue()
        self._live: dict[int, _Live] = {}
        self._seen: deque[list[int]] = deque(maxlen=MOST_SEEN)
        self._step = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- for tests

    def send(self, *messages: FromEngine) -> None:
        self._outbox.put([*messages])

    def send_frame(self, frame: bytes) -> None:
        self._outbox.put(frame)

    def wait_for(self, found: Callable[[list[ToEngine]], T | None]) -> T:
        """Wait until `found` returns a true value for the messages received so far, and return that."""
        with self._changed:
            answer = self._changed.wait_for(lambda: found(self.received), WAIT_S)
        assert answer, "never came; received: " + ", ".join(f"{type(one).__name__}" for one in self.received[-20:])
        return answer

    def wait_for_end(self, kind: type[AbortRequest] | type[FinishRequest], req_ids: set[int]) -> None:
        self.wait_for(lambda all_: req_ids <= {one.req_id for one in all_ if isinstance(one, kind)})

    def requests(self, marker: str) -> list[AddRequest]:
        """Return the requests whose prompt contains `marker`."""
        with self._changed:
            return [one for one in self.received if isinstance(one, AddRequest) and marker.encode() in _bytes(one)]

    def wait_for_request(self, marker: str) -> AddRequest:
        return self.wait_for(lambda _: self.requests(marker))[0]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    # -------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        greeting = framed(encode([self.ready])) if self.ready is not None else b""
        peer = EnginePeer(self.address, greeting)
        beat_at = 0.0
        while not self._stop.is_set():
            if self.beats and time.monotonic() >= beat_at:
                beat_at = time.monotonic() + 0.5
                peer.send(encode([Heartbeat("idle", 0.0)]))
            for messages in peer.receive(0 if self._busy() else 0.005):
                self.take(messages)
            while not self._outbox.empty():
                found = self._outbox.get()
                peer.send(found) if isinstance(found, bytes) else peer.send_messages(found)
            for message in self._advance():
                peer.send_messages([message])
                time.sleep(self.pace_s)
        for messages in peer.receive(0):  # messages received before the stop
            self.take(messages)
        peer.close()

    def _busy(self) -> bool:
        return any(one.sent < len(one.tokens) or one.kind != "hang" for one in self._live.values())

    def take(self, messages: list[ToEngine]) -> None:
        for message in messages:
            if isinstance(message, AddRequest):
                kind, text = [(b"say", self._reply(message)), *_ORDER.findall(_bytes(message))][-1]
                tokens = [token for byte in text for token in self.marks.get(byte, [byte])]
                tokens += [EOS] if kind.decode() in _SAYING else []
                if kind == b"fill":
                    kind, tokens = b"hang", [ord("x")] * FILL
                self._live[message.req_id] = _Live(message, kind.decode(), tokens, message.num_generated)
            elif isinstance(message, AbortRequest | FinishRequest):
                self._live.pop(message.req_id, None)
        with self._changed:
            self.received.extend(messages)
            self._changed.notify_all()

    def _reply(self, message: AddRequest) -> bytes:
        prompt = _bytes(message)
        texts = (text for pattern, text in self.replies.items() if re.search(pattern.encode(), prompt, re.DOTALL))
        return next(texts, "ok").encode()

    def _advance(self) -> Iterator[StepTokens]:
        """Yield one step of all live requests; a burst's steps are sent at once."""
        for one in list(self._live.values()):
            if one.kind == "burst":  # in one frame, so that its reader finds all of it at once
                many = list[FromEngine]()
                while one.request.req_id in self._live:
                    many.append(self._step_of([one]))
                self._outbox.put(many)
        if rows := [one for one in self._live.values() if one.sent < len(one.tokens) or one.kind != "hang"]:
            yield self._step_of(rows)

    def _step_of(self, rows: list[_Live]) -> StepTokens:
        bound = [one for one in rows if not one.is_bound]
        for one in bound:
            one.is_bound = True
        cached = [self._match(prompt_ids(one.request)) for one in bound]
        entries = [self._next(one) for one in rows]
        self._step += 1
        return StepTokens(
            step=self._step,
            req_ids=np.array([one.request.req_id for one in rows], np.int64).tobytes(),
            tokens=np.array([token for token, _ in entries], np.int32).tobytes(),
            reasons=np.array([reason for _, reason in entries], np.int32).tobytes(),
            admitted_ids=np.array([one.request.req_id for one in bound], np.int64).tobytes(),
            cached_lens=np.array(cached, np.int32).tobytes(),
            errors={
                one.request.req_id: "scripted failure"
                for one, (_, reason) in zip(rows, entries, strict=True)
                if reason == FinishReason.ERROR
            },
            logprobs=tuple(
                TokenLogprobs(i, math.log(chance(token)), (token, RIVAL), (math.log(chance(token)), math.log(0.01)))
                for i, (one, (token, _)) in enumerate(zip(rows, entries, strict=True))
                if one.request.sampling.logprobs is not None and token >= 0
            ),
            embeddings=tuple(
                Embedding(one.request.req_id, np.array(prompt_ids(one.request)[:4], np.float32).tobytes())
                for one in rows
                if one.request.sampling.embedding is not None
            ),
        )

    def _next(self, one: _Live) -> tuple[int, FinishReason]:
        if one.sent == len(one.tokens):
            del self._live[one.request.req_id]
            return -1, FinishReason.ERROR  # only kind "fail" reaches this
        token = one.tokens[one.sent]
        one.sent += 1
        stops = {EOS, *one.request.sampling.stop_token_ids} - ({EOS} if one.request.sampling.ignore_eos else set())
        reason = FinishReason.NONE
        if token in stops:
            reason = FinishReason.STOP
        elif one.sent == one.request.sampling.max_tokens or (one.sent == len(one.tokens) and one.kind in _SAYING):
            reason = FinishReason.LENGTH
        if reason:
            del self._live[one.request.req_id]
        return token, reason

    def _match(self, ids: list[int]) -> int:
        """Return the cached length of a prompt in a prefix cache with pages of one token, and add the prompt."""
        best = 0
        for seen in self._seen:
            same = 0
            while same < min(len(seen), len(ids) - 1) and seen[same] == ids[same]:
                same += 1
            best = max(best, same)
        self._seen.append(ids)
        return best


def _bytes(request: AddRequest) -> bytes:
    ids = prompt_ids(request)
    return bytes(token for token in ids[: len(ids) - request.num_generated] if token < 256)
