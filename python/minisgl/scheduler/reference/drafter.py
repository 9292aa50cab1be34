"""What is known of one text's repetitions, and how far to trust it.

Invariants: the same text and the same verdicts give the same guesses; a guess costs O(its length).

A guess is what came after the last `NGRAM` tokens when they stood in the text the last time (prompt lookup; Saxena
2023). Drafts get longer while they are right. One of which nothing was right is followed by a pause, and each such one
by a pause that is twice as long: so a text that does not repeat soon costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NGRAM = 5  # tokens that must have stood in the text
FIRST_LEN = 2  # of a draft of a text whose guesses were not right yet
MAX_PAUSE = 256  # tokens without a draft, at most


@dataclass(slots=True, eq=False)
class Drafter:
    """`draft` is the guess for the tokens after the committed ones, `in_flight` what a step in flight computes of one.
    Lengths in tokens."""

    max_len: int
    draft_len: int  # of the next one, at most
    draft: list[int] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    pause: int = 0  # the last one
    paused_until: int = 0  # length of the text
    _ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # by n-gram, where it ended the last time
    _num_seen: int = 0  # length of the text up to which `_ends` goes

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `tokens`, which have only grown since the last call. The guess may reach
        into itself: what repeats goes on repeating."""
        for end in range(max(NGRAM, self._num_seen), len(tokens)):
            self._ends[tuple(tokens[end - NGRAM : end])] = end
        self._num_seen = len(tokens)
        start = self._ends.get(tuple(tokens[-NGRAM:]))
        if start is None:
            return []
        found = tokens[start : start + count]
        while len(found) < count:
            found += found
        return found[:count]

    def learn(self, num_accepted: int, length: int) -> None:
        """A draft was computed, of which so many tokens were right; the text is `length` tokens long now."""
        self.draft_len = min(max(2 * num_accepted, FIRST_LEN), self.max_len)
        self.pause = 0 if num_accepted else min(max(2 * self.pause, 1), MAX_PAUSE)
        self.paused_until = length + self.pause


def make_drafter(max_draft_len: int) -> Drafter:
    return Drafter(max_draft_len, min(FIRST_LEN, max_draft_len))
