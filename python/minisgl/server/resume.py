"""Streams that another server can go on with: `--resumable`, for servers that stand behind a router.

A router that is to have a stream continued when its server is gone needs the request and the tokens so far. So between
the events of a stream stand *marks*: lines `: minisgl {...}` that say of which tokens the events since the last mark
were made. The router takes them out, passes on what a mark closes (or the good end of a stream), and asks another
server with `Said`, what the marks told, in front of the request's body. That server makes the same events once more,
sends none of them, and goes on with the next token.

Keeps true: what was passed on and what comes then is one stream, with the same ids and numbers, and the text that would
have come from the first server, if the request is greedy or both servers draw the same numbers.
Doesn't know: routers, engines.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from minisgl import ids
from minisgl.frontend.output_processor import Before, Delta
from minisgl.message import EngineReady
from minisgl.sampling_params import SamplingParams
from minisgl.server.errors import ApiError

MARKS = b"x-minisgl-marks"
"""Header of a request whose stream is to have marks; its value is how many bytes before the body are `Said`."""
LINE = b": minisgl "
MAX_SAID_BYTES = 1 << 26


class Tokens(msgspec.Struct, array_like=True):
    """Of choice `index`, since the last mark; `reason` (`step.FinishReason`) if the engine ended it, `ended` if it did
    or a stop string was found."""

    index: int
    tokens: list[int]
    reason: int = 0
    ended: bool = False


class Origin(msgspec.Struct):
    """What must be the same elsewhere: the model, seeds of random choices and of ids, Unix seconds, limits of lengths
    by prompt, and what was cached of each choice's prompt."""

    model: str
    seed: int
    ids: int
    created: int
    lengths: list[int]
    cached: list[int]


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


class Choices(Protocol):
    """What is generated for a request; choices by index."""

    def token_ids(self, index: int) -> list[int]: ...
    def reason(self, index: int) -> int: ...
    def cached(self) -> list[int]: ...


C = TypeVar("C", bound=Choices)


def fingerprint(name: str, info: EngineReady) -> str:
    """Of a model: servers of the same one can go on with each other's streams."""
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

    def lengths(self, found: list[int]) -> list[int]:
        """The limits that its choices have everywhere, by prompt; those `found` here if it begins here."""
        if self.said is None:
            self._origin.lengths = found
        return self._origin.lengths if len(self._origin.lengths) == len(found) else found

    def before(self, num_choices: int) -> list[Before] | None:
        """What there is of each choice. None: nothing of any. Raises `ApiError` 400."""
        if self.said is None:
            return None
        cached = self._origin.cached
        found = [Before([], cached[i] if i < len(cached) else None) for i in range(num_choices)]
        for turn in self.said.turns:
            for one in turn:
                if not 0 <= one.index < num_choices:
                    raise ApiError(400, f"{MARKS.decode()}: choice {one.index}: there are {num_choices}")
                found[one.index].tokens += one.tokens
                found[one.index].ended |= one.ended
        return found

    # -------------------------------------------------------------------------------------------------- while it runs

    def marked(self, show: Callable[[C, Sequence[Delta]], bytes]) -> Callable[[C, list[Delta]], bytes]:
        """What `show` makes of tokens, with a mark behind it."""

        def chunk(choices: C, deltas: list[Delta]) -> bytes:
            with ids.of(self.source):
                return show(choices, deltas) + self._mark(choices, deltas)

        return chunk

    def _mark(self, choices: Choices, deltas: Sequence[Delta]) -> bytes:
        tokens = []
        for delta in deltas:
            index, found = delta.index, choices.token_ids(delta.index)
            new = found[self._num_marked.get(index, 0) :]
            self._num_marked[index] = len(found)
            tokens.append(Tokens(index, new, choices.reason(index), delta.finish_reason is not None))
        if self._is_told or self.said is not None:
            return _line(Mark(tokens))
        self._is_told = True
        self._origin.cached = choices.cached()
        return _line(Mark(tokens, self._origin))


def lost(reason: str) -> bytes:
    """The last mark of a stream whose engine is gone."""
    return _line(Mark(lost=reason or "no reason was given"))


def _line(mark: Mark) -> bytes:
    return b"%b%b\n" % (LINE, msgspec.json.encode(mark))
