"""Maximum length of the output: what the client named, else a default, which a busy server may shorten.

For a prompt that leaves `left` tokens of the context:

- a length that the client named is limited to `left` and by nothing else;
- else it is the endpoint's default (or all of `left`), but leaves `--context-margin` tokens of the context free; and
  with `--adaptive-max-tokens THRESHOLD:FACTOR`, while more than THRESHOLD choices are in flight, it is FACTOR of that,
  rounded down. It stays at least 1, and at least `min_tokens` if the default allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minisgl.config import Limits
from minisgl.sampling_params import ParamError, SamplingParams

TO_THE_END = -1
"""Value of `max_tokens` for the rest of the context."""


def asked_limit(
    field: str, requested: int | None, default: int | None, *, least: int = TO_THE_END
) -> tuple[int | None, bool]:
    """Return the engine's `max_tokens` (`None`: up to the context's end) for the requested value, and whether the
    client requested 0 tokens: then one is computed and dropped. Raises `ParamError` if `requested` is below `least`."""
    if requested is None:
        return default, False
    if requested < least:
        other = "0, or -1: to the end of the context" if least == TO_THE_END else least
        raise ParamError(field, requested, f"must be at least {other}")
    return (1, True) if requested == 0 else (None if requested == TO_THE_END else requested, False)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Maximum numbers of generated tokens, by prompt. `are_shortened`: because the server is busy."""

    by_prompt: list[int]
    are_shortened: bool

    def shown(self) -> str:
        """Return the maximum lengths in the order of the prompts, separated by commas."""
        return ",".join(map(str, self.by_prompt))


def lengths(
    room: Sequence[int], sampling: SamplingParams, limits: Limits, num_in_flight: Callable[[], int], *, named: bool
) -> Lengths:
    """Compute the maximum length for each prompt. `room`: tokens of the context that each prompt leaves. `named`:
    `sampling.max_tokens` was set by the client and is no default."""
    whole = [left if sampling.max_tokens is None else min(sampling.max_tokens, left) for left in room]
    if named:
        return Lengths(whole, are_shortened=False)
    most = [min(length, max(1, left - limits.context_margin)) for length, left in zip(whole, room, strict=True)]
    adaptive = limits.adaptive_max_tokens
    is_busy = adaptive is not None and num_in_flight() > adaptive.threshold
    if adaptive is not None and is_busy:
        most = [length * adaptive.millionths // 1_000_000 for length in most]
    by_prompt = [max(1, length, min(sampling.min_tokens, all_)) for length, all_ in zip(most, whole, strict=True)]
    return Lengths(by_prompt, are_shortened=is_busy)
