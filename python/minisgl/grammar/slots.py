"""Grammar matchers by request slot: they decide which tokens a request may sample next.

Invariants: a slot without a grammar costs nothing; a matcher has consumed what its slot's request generated, in forward
order; an error in a matcher ends its own request only; a row whose mask is late has no token in its step, and none
until its slot is assigned again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from minisgl.step import Int32Array


class Matcher(Protocol):
    """State of one request in its grammar. Nothing raises: an error is in `error`, permanently."""

    @property
    def error(self) -> str:
        """Reason why the matcher cannot continue; empty while it can."""

    def restart(self, generated: Sequence[int]) -> None:
        """Go to the state after these generated ids, whatever was consumed before."""

    def fill(self, mask: Int32Array) -> None:
        """Set the bits of the ids that may come next in `mask` (int32 [ceil(vocab / 32)], bit i % 32 of word i // 32)
        and clear all others. If the matcher cannot continue, only an end of sequence is allowed."""

    def try_fill(self, mask: Int32Array, left_s: float) -> bool:
        """Fill `mask`, or return False, with undefined bits, if that would take long (with `left_s` 0: more than very
        short). Call `prepare` before the next try."""

    def prepare(self) -> None:
        """Compute the next mask for `fill`, however long it takes. Any thread."""

    def copy(self) -> Matcher:
        """Return an independent matcher at the start of the same grammar."""

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the compiled grammar, in bytes."""

    def consume(self, token: int) -> None:
        """Advance by one sampled token. An invalid token may be reported only by the next `fill`."""


STEP_S = 0.005  # seconds per step for masks that are not fast
LATE = ""  # reason for a row without token: its mask is late; the request continues once the mask is computed


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """Token masks of the sampled rows that have a grammar."""

    rows: Int32Array  # [m] indices among the sampled rows, ascending
    bits: Int32Array  # [m, ceil(vocab / 32)]


class GrammarSlots:
    """Matchers by request slot; only slots with a grammar have one. Use it in forward order."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._num_words = -(-vocab_size // 32)
        self._eos_ids = tuple(eos_ids)
        self._matchers: dict[int, Matcher] = {}
        self._late: set[int] = set()  # slots whose masks took too long

    def assign(self, slot: int, matcher: Matcher | None, generated: Sequence[int]) -> None:
        """Set the matcher of a slot's new request, which has generated the ids `generated` so far."""
        self._late.discard(slot)
        if matcher is not None:
            matcher.restart(generated)
            self._matchers[slot] = matcher
        elif self._matchers:
            self._matchers.pop(slot, None)

    def free(self, slots: Int32Array) -> None:
        """Remove the matchers of slots whose requests have ended."""
        if self._matchers:
            for slot in slots.tolist():
                self._matchers.pop(slot, None)
                self._late.discard(slot)

    def __bool__(self) -> bool:
        """Return whether any slot has a matcher."""
        return bool(self._matchers)

    def masks(self, slots: Sequence[int]) -> TokenMasks | None:
        """Return the masks of the rows in `slots` that have a grammar, or `None`. Late rows may sample any id."""
        if not self._matchers:
            return None
        rows = [row for row, slot in enumerate(slots) if slot in self._matchers]
        if not rows:
            return None
        bits = np.full((len(rows), self._num_words), -1, np.int32)
        began = time.perf_counter()
        for mask, row in zip(bits, rows, strict=True):
            slot, left_s = slots[row], max(0.0, began + STEP_S - time.perf_counter())
            if slot not in self._late and not self._matchers[slot].try_fill(mask, left_s):
                self._late.add(slot)
        return TokenMasks(np.array(rows, np.int32), bits)

    def record(self, slots: Sequence[int], tokens: Int32Array) -> dict[int, str]:
        """Record that the rows in `slots` sampled `tokens`. Rows that cannot continue, or are late, get an end of
        sequence in `tokens`, and are returned with the reason."""
        failures: dict[int, str] = {}
        if self._matchers:
            for row, slot in enumerate(slots):
                if (matcher := self._matchers.get(slot)) is None:
                    continue
                if slot in self._late:
                    failures[row] = LATE
                else:
                    if not matcher.error:
                        matcher.consume(int(tokens[row]))
                    if matcher.error:
                        failures[row] = matcher.error
                if row in failures:
                    tokens[row] = self._eos_ids[0]
        return failures
