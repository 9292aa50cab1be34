"""Streams that another server can go on with: `--resumable`, for servers that stand behind a router.

A router that is to have a stream continued when its server is gone needs the request and the tokens so far. So between
the events of a stream stand *marks*: lines `: minisgl {...}` that say of which tokens the events since the last mark
were made. The router takes them out, passes on what a mark closes (or the good end of a stream), and asks another
server with `Said`, what the marks told, in front of the request's body. That server makes the same events once more,
sends none of them, and goes on with the next token.

Invariants: what was passed on and what comes then is one stream, with the same ids and numbers, and the text that would
have come from the first server, if the request is greedy or both servers draw the same numbers.
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
"""Header of a request whose stream is to have marks; its value is how many bytes before the body are `Said`."""
LINE = b": minisgl "
MAX_SAID_BYTES = 1 << 24


class Tokens(msgspec.Struct, array_like=True):
    """What choice `index` got since the last mark; `reason` (`step.FinishReason`) if the engine ended it, `ended` if it
    did or a stop string was found."""

    index: Annotated[int, Meta(ge=0)]
    tokens: list[Annotated[int, Meta(ge=0)]]
    reason: Annotated[int, Meta(ge=0, le=3)] = 0  # an error ends a stream
    ended: bool = False


class Origin(msgspec.Struct):
    """What must be the same elsewhere: the model, seeds of random choices and of ids, Unix seconds, limits of lengths
    by prompt, and what was cached of each choice's prompt."""

    model: str
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    ids: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    created: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    lengths: list[Annotated[int, Meta(ge=1)]]
    cached: list[Annotated[int, Meta(ge=0)]]


class Mark(msgspec.Struct, omit_defaults=True):
    """`origin` comes with the first one. `lost`: nothing more comes, for this reason; the stream is to go on
    elsewhere."""

    tokens: list[Tokens] = []
    origin: Origin | None = None
    lost: str = ""


class Said(msgspec.Struct):
    """What the marks of one stream told, in order."""

    origin: Origin
    turns: list[list[Tokens]]


def fingerprint(name: str, info: EngineReady) -> str:
    """Names a model: servers with the same one can go on with each other's streams."""
    return f"{name} {Path(info.model_dir or '').name} {info.vocab_size}"


class Resumable:
    """One request that asked for marks."""

    def __init__(self, num_said_bytes: int) -> None:
        self.num_said_bytes = num_said_bytes
        self.said: Said | None = None
        self._origin = Origin("", secrets.randbits(63), secrets.randbits(63), int(time.time()), [], [])
        self._is_told = False  # the origin
        self._num_marked: dict[int, int] = {}  # tokens, by choice
        self.source = ids.Source(self._origin.ids, self._origin.created)

    @classmethod
    def of(cls, headers: Mapping[bytes, bytes]) -> Resumable | None:
        """Raises `ApiError` 400."""
        if (given := headers.get(MARKS)) is None:
            return None
        if not given.isdigit() or int(given) > MAX_SAID_BYTES:
            raise ApiError(400, f"{MARKS.decode()}: must be a number of bytes, at most {MAX_SAID_BYTES}")
        return cls(int(given))

    def take_from(self, body: bytearray) -> None:
        """What other servers said, off the front of `body`. Raises `ApiError` 400."""
        if not self.num_said_bytes:
            return
        data = body[: self.num_said_bytes]
        del body[: self.num_said_bytes]
        try:
            self.said = msgspec.json.decode(data, type=Said)
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"{MARKS.decode()}: what was said before is unreadable: {error}") from error
        self._origin = self.said.origin
        self.source = ids.Source(self._origin.ids, self._origin.created)

    # ------------------------------------------------------------------------------------------------- before it runs

    def seeded(self, sampling: SamplingParams, model: str) -> SamplingParams:
        """With the seed that it has everywhere. Raises `ApiError` 409 for a stream of another model."""
        if self.said is not None and self._origin.model != model:
            message = f"the stream was begun by another model: {self._origin.model!r}, this is {model!r}"
            raise ApiError(409, message, code="other_model")
        self._origin.model = model
        if sampling.seed is not None:
            self._origin.seed = sampling.seed
        return msgspec.structs.replace(sampling, seed=self._origin.seed)

    def lengths(self, found: list[int], room: Sequence[int]) -> list[int]:
        """The limits that its choices have everywhere, by prompt; those `found` here if it begins here. `room`: what
        each prompt leaves. Raises `ApiError` 400."""
        if self.said is None:
            self._origin.lengths = found
        given = self._origin.lengths
        if len(given) != len(room) or any(one > left for one, left in zip(given, room, strict=True)):
            raise _bad(f"lengths: {given[:8]}: the prompts leave {room[:8]} tokens")
        return given

    def before(self, lengths: Sequence[int], n: int, vocab_size: int) -> list[Before] | None:
        """What there is of each of the `n` choices of prompts with these limits. None: nothing of any. Raises
        `ApiError` 400."""
        if self.said is None:
            return None
        cached, num_choices = self._origin.cached, len(lengths) * n
        found = [Before([], cached[i] if i < len(cached) else None) for i in range(num_choices)]
        for one in itertools.chain.from_iterable(self.said.turns):
            if one.index >= num_choices:
                raise _bad(f"choice {one.index}: there are {num_choices}")
            choice, length = found[one.index], lengths[one.index // n]
            if choice.ended or (one.reason and not one.ended):
                raise _bad(f"choice {one.index}: it goes on after its end")
            choice.tokens += one.tokens
            choice.ended = one.ended
            if max(one.tokens, default=0) >= vocab_size:
                raise _bad(f"choice {one.index}: token ids must be below {vocab_size} (got {max(one.tokens)})")
            if len(choice.tokens) + (not one.ended) > length:
                raise _bad(f"choice {one.index}: {len(choice.tokens)} tokens, its limit is {length}")
        return found

    # -------------------------------------------------------------------------------------------------- while it runs

    def mark(
        self,
        deltas: Sequence[Delta],
        token_ids: Callable[[int], list[int]],
        reason: Callable[[int], int],
        cached: Callable[[], list[int]],
    ) -> bytes:
        """What stands behind a chunk of `deltas`. `token_ids` and `reason` say of a choice what was generated for it,
        `cached` how many tokens of each prompt were known."""
        tokens = []
        for delta in deltas:
            index, found = delta.index, token_ids(delta.index)
            new = found[self._num_marked.get(index, 0) :]
            self._num_marked[index] = len(found)
            tokens.append(Tokens(index, new, reason(index), delta.finish_reason is not None))
        if self._is_told or self.said is not None:
            return _line(Mark(tokens))
        self._is_told = True
        self._origin.cached = cached()
        return _line(Mark(tokens, self._origin))


def _bad(what: str) -> ApiError:
    return ApiError(400, f"{MARKS.decode()}: what was said before: {what}")


def lost(reason: str) -> bytes:
    """The last mark of a stream whose engine is gone."""
    return _line(Mark(lost=reason or "no reason was given"))


def _line(mark: Mark) -> bytes:
    return b"%b%b\n" % (LINE, msgspec.json.encode(mark))


NOTHING_NEW = _line(Mark())
"""Stands behind what belongs to no token."""
