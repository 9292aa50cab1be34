"""Which tokens may come next, by request slot: the matchers of those requests that have a grammar.

Invariants: a slot without a grammar costs nothing; a matcher has consumed what its slot's request generated, in forward
order; whatever goes wrong in a matcher ends its own request with an error, and no other; a row whose mask takes long
has no token in its step, and none until its slot is assigned again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from minisgl.step import Int32Array


class Matcher(Protocol):
    """One request's place in its grammar. Nothing raises: what goes wrong is in `error`, for good."""

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can."""

    def restart(self, generated: Sequence[int]) -> None:
        """Stand behind these ids, whatever was consumed before."""

    def fill(self, mask: Int32Array) -> None:
        """Set the bits of the ids that may come next in `mask` [ceil(vocab / 32)], bit i % 32 of word i // 32, and
        clear all others; of an end of sequence alone if it cannot go on."""

    def try_fill(self, mask: Int32Array, left_s: float) -> bool:
        """`fill`, but False and bits that mean nothing if that would take long, or more than little where a step has no
        time for masks left. `prepare` is to come before the next try."""

    def prepare(self) -> None:
        """Make the next mask for `fill`, however long it takes, in any thread."""

    def copy(self) -> Matcher:
        """Another place, at the start of the same grammar. What breaks the one does not break the other."""

    @property
    def num_bytes(self) -> int:
        """About what a compiled grammar takes."""

    def consume(self, token: int) -> None:
        """It came. If that is wrong, it may show with the next mask only."""


STEP_S = 0.005  # of a step, for masks that are not quick
LATE = ""  # why a row has no token: its mask takes long; it may go on where it was, once that is made


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """Masks of the sampled rows that have a grammar."""

    rows: Int32Array  # [m] indices among the sampled rows, ascending
    bits: Int32Array  # [m, ceil(vocab / 32)]


class GrammarSlots:
    """By request slot; slots without a grammar are not in it. Use it in forward order."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._num_words = -(-vocab_size // 32)
        self._eos_ids = tuple(eos_ids)
        self._matchers: dict[int, Matcher] = {}
        self._late: set[int] = set()  # slots whose masks took too long

    def assign(self, slot: int, matcher: Matcher | None, generated: Sequence[int]) -> None:
        """`generated` so far by the request that has the slot from now on."""
        self._late.discard(slot)
        if matcher is not None:
            matcher.restart(generated)
            self._matchers[slot] = matcher
        elif self._matchers:
            self._matchers.pop(slot, None)

    def free(self, slots: Int32Array) -> None:
        """Their requests have ended."""
        if self._matchers:
            for slot in slots.tolist():
                self._matchers.pop(slot, None)
                self._late.discard(slot)

    def __bool__(self) -> bool:
        """Whether any slot has one."""
        return bool(self._matchers)

    def masks(self, slots: Sequence[int]) -> TokenMasks | None:
        """What the rows in `slots` may sample next; None if no row has a grammar. Any id for rows that are late."""
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
        """The rows in `slots` sampled `tokens`; those that cannot go on, or are late, get an end of sequence in there,
        and are returned with the reason."""
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
