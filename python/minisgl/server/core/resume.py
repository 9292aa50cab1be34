"""Streams that another server can continue: `--resumable`, for servers behind a router.

To continue a stream when its server has failed, a router needs the request and the tokens so far. So *marks* stand
between the events of a stream: lines `: minisgl {...}` with the tokens of the events since the last mark. The router
removes them, forwards what a mark completes (or the regular end of a stream), and sends another server `Said`, the
content of the marks, in front of the request's body. That server generates the same events again, sends none of them,
and continues with the next token.

Invariants: the forwarded part and its continuation are one stream, with the same ids and sequence numbers, and the text
that the first server would have generated, if the request is greedy or both servers draw the same random numbers.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from minisgl.frontend.output_processor import Before, Delta
from minisgl.message import EngineReady
from minisgl.parsers import ids
from minisgl.sampling_params import SamplingParams
from minisgl.server.core.errors import ApiError

MARKS = b"x-minisgl-marks"
"""Header that requests marks in the stream; its value is the number of bytes of `Said` before the body."""
LINE = b": minisgl "
MAX_SAID_BYTES = 1 << 24


class Tokens(msgspec.Struct, array_like=True):
    """Tokens of choice `index` since the last mark. `reason`: the `step.FinishReason` if the engine ended it; `ended`:
    the engine or a stop string ended it."""

    index: Annotated[int, Meta(ge=0)]
    tokens: list[Annotated[int, Meta(ge=0)]]
    reason: Annotated[int, Meta(ge=0, le=3)] = 0  # no error: that ends a stream
    ended: bool = False


class Origin(msgspec.Struct):
    """Parameters that every server of a stream shares: the model, seeds for sampling and for ids, creation time (Unix
    seconds), maximum lengths by prompt, and cached prompt tokens by choice."""

    model: str
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    ids: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    created: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    lengths: list[Annotated[int, Meta(ge=1)]]
    cached: list[Annotated[int, Meta(ge=0)]]


class Mark(msgspec.Struct, omit_defaults=True):
    """Mark in a stream. Only the first one has `origin`. `lost`: why the server cannot continue the stream."""

    tokens: list[Tokens] = []
    origin: Origin | None = None
    lost: str = ""


class Said(msgspec.Struct):
    """Content of all marks of one stream, in order: what the client has received."""

    origin: Origin
    turns: list[list[Tokens]]


def fingerprint(name: str, info: EngineReady, max_image_tokens: int = 0) -> str:
    """Return an id of a model: servers with the same one can continue each other's streams. Of one that sees, the limit
    of an image's tokens is a part, as prompts differ by it."""
    id_of_text = f"{name} {Path(info.model_dir or '').name} {info.vocab_size}"
    return f"{id_of_text} {max_image_tokens}" if info.sees else id_of_text


class Resumable:
    """Resume state of one request whose stream has marks, by which another server can continue it."""

    def __init__(self, num_said_bytes: int) -> None:
        self.num_said_bytes = num_said_bytes
        self.said: Said | None = None
        self._origin = Origin("", secrets.randbits(63), secrets.randbits(63), int(time.time()), [], [])
        self._is_told = False  # whether the origin was sent
        self._num_marked: dict[int, int] = {}  # tokens that marks have, by choice
        self.source = ids.Source(self._origin.ids, self._origin.created)

    @classmethod
    def of(cls, headers: Mapping[bytes, bytes]) -> Resumable | None:
        """Parse the marks header; `None` without one. Raises `ApiError` 400 if it is no byte count or too large."""
        if (given := headers.get(MARKS)) is None:
            return None
        if not given.isdigit() or int(given) > MAX_SAID_BYTES:
            raise ApiError(400, f"{MARKS.decode()}: must be a number of bytes, at most {MAX_SAID_BYTES}")
        return cls(int(given))

    def decode_said(self, body: bytearray) -> None:
        """Remove `Said`, if there is one, from the front of `body` and decode it. Raises `ApiError` 400."""
        if not self.num_said_bytes:
            return
        data = body[: self.num_said_bytes]
        del body[: self.num_said_bytes]
        try:
            self.said = msgspec.json.decode(data, type=Said)
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"{MARKS.decode()}: the state before the body is not valid: {error}") from error
        self._origin = self.said.origin
        self.source = ids.Source(self._origin.ids, self._origin.created)

    # ------------------------------------------------------------------------------------------------- before it runs

    def seeded(self, sampling: SamplingParams, model: str) -> SamplingParams:
        """Return `sampling` with the seed of the stream on all servers. Raises `ApiError` 409 if its model differs."""
        if self.said is not None and self._origin.model != model:
            message = f"the stream was begun by another model: {self._origin.model!r}, this is {model!r}"
            raise ApiError(409, message, code="other_model")
        self._origin.model = model
        if sampling.seed is not None:
            self._origin.seed = sampling.seed
        return msgspec.structs.replace(sampling, seed=self._origin.seed)

    def lengths(self, own: list[int], room: Sequence[int]) -> list[int]:
        """Return the maximum lengths that all servers of the stream use, by prompt; `own` if it begins here. `room`:
        tokens of the context that each prompt leaves. Raises `ApiError` 400."""
        if self.said is None:
            self._origin.lengths = own
        given = self._origin.lengths
        if len(given) != len(room) or any(one > left for one, left in zip(given, room, strict=True)):
            raise _bad(f"lengths: {given[:8]}: the prompts leave {room[:8]} tokens")
        return given

    def before(self, lengths: Sequence[int], n: int, vocab_size: int) -> list[Before] | None:
        """Return the tokens already generated for each of `n` choices per prompt, or `None` if the stream begins here.
        `lengths`: maximum lengths by prompt. Raises `ApiError` 400 for marks that do not fit."""
        if self.said is None:
            return None
        cached, num_choices = self._origin.cached, len(lengths) * n
        before = [Before([], cached[i] if i < len(cached) else None) for i in range(num_choices)]
        for one in itertools.chain.from_iterable(self.said.turns):
            if one.index >= num_choices:
                raise _bad(f"choice {one.index}: the request has {num_choices}")
            choice, length = before[one.index], lengths[one.index // n]
            if choice.ended or (one.reason and not one.ended):
                raise _bad(f"choice {one.index}: tokens follow its end")
            choice.tokens += one.tokens
            choice.ended = one.ended
            if max(one.tokens, default=0) >= vocab_size:
                raise _bad(f"choice {one.index}: token ids must be below {vocab_size} (got {max(one.tokens)})")
            if len(choice.tokens) + (not one.ended) > length:
                raise _bad(f"choice {one.index}: {len(choice.tokens)} tokens, its limit is {length}")
        return before

    # -------------------------------------------------------------------------------------------------- while it runs

    def mark(
        self,
        deltas: Sequence[Delta],
        token_ids: Callable[[int], list[int]],
        reason: Callable[[int], int],
        cached: Callable[[], list[int]],
    ) -> bytes:
        """Return the mark to write after a chunk of `deltas`. `token_ids` and `reason` give a choice's generated tokens
        and finish reason, `cached` the cached prompt tokens of each choice."""
        tokens = []
        for delta in deltas:
            index, generated = delta.index, token_ids(delta.index)
            new = generated[self._num_marked.get(index, 0) :]
            self._num_marked[index] = len(generated)
            tokens.append(Tokens(index, new, reason(index), delta.finish_reason is not None))
        if self._is_told or self.said is not None:
            return _line(Mark(tokens))
        self._is_told = True
        self._origin.cached = cached()
        return _line(Mark(tokens, self._origin))


def _bad(what: str) -> ApiError:
    return ApiError(400, f"{MARKS.decode()}: the state before the body: {what}")


def lost(reason: str) -> bytes:
    """Return the last mark of a stream whose engine has failed."""
    return _line(Mark(lost=reason or "no reason was given"))


def _line(mark: Mark) -> bytes:
    return b"%b%b\n" % (LINE, msgspec.json.encode(mark))


NOTHING_NEW = _line(Mark())
"""Mark after bytes that belong to no token, such as a ping."""
