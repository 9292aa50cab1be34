"""How long an answer may become: what its client named, else a default, which a busy server may shorten.

Of a prompt that leaves `left` tokens of the context:

- a length that the client named is cut to `left` and to nothing else;
- else it is the endpoint's default (or all of `left`), but leaves `--context-margin` of the context free; and with
  `--adaptive-max-tokens THRESHOLD:FACTOR`, while more than THRESHOLD answers are in flight, it is FACTOR of that,
  rounded down. It stays at least 1, and at least `min_tokens`, as far as the default has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minisgl.config import Limits
from minisgl.sampling_params import ParamError, SamplingParams

TO_THE_END = -1
"""The `max_tokens` of a client that wants all that fits."""


def asked_limit(
    field: str, asked: int | None, default: int | None, *, least: int = TO_THE_END
) -> tuple[int | None, bool]:
    """The limit that the engine gets, None for the context's, and whether only the prompt is to be computed: that is
    what a client wants who asks for 0 tokens, and one is computed and dropped. Raises `ParamError`."""
    if asked is None:
        return default, False
    if asked < least:
        other = "0, or -1: to the end of the context" if least == TO_THE_END else least
        raise ParamError(field, asked, f"must be at least {other}")
    return (1, True) if asked == 0 else (None if asked == TO_THE_END else asked, False)


@dataclass(frozen=True, slots=True)
class Lengths:
    """`by_prompt`: limits of generated tokens."""

    by_prompt: list[int]
    are_shortened: bool

    def shown(self) -> str:
        """In the order of the prompts."""
        return ",".join(map(str, self.by_prompt))


def lengths(
    room: Sequence[int], sampling: SamplingParams, limits: Limits, num_in_flight: Callable[[], int], *, named: bool
) -> Lengths:
    """`room`: tokens that each prompt leaves. `sampling.max_tokens` is the length that the client `named`, else the
    default."""
    whole = [left if sampling.max_tokens is None else min(sampling.max_tokens, left) for left in room]
    if named:
        return Lengths(whole, are_shortened=False)
    most = [min(length, max(1, left - limits.context_margin)) for length, left in zip(whole, room, strict=True)]
    adaptive = limits.adaptive_max_tokens
    is_busy = adaptive is not None and num_in_flight() > adaptive.threshold
    if adaptive is not None and is_busy:
        most = [length * adaptive.millionths // 1_000_000 for length in most]
    found = [max(1, length, min(sampling.min_tokens, all_)) for length, all_ in zip(most, whole, strict=True)]
    return Lengths(found, are_shortened=is_busy)
