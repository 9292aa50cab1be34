"""Prompt-lookup drafting for one sequence, with an adaptive draft length.

Invariants: equal sequences and acceptance counts give equal drafts; a draft costs O(its length). The draft is what
followed the last `NGRAM` tokens at their previous occurrence in the sequence (prompt lookup; Saxena 2023). Drafts get
longer while tokens are accepted. A draft without an accepted token is followed by a pause, and each further one by a
pause twice as long: so a sequence that does not repeat soon costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NGRAM = 5  # tokens that must have occurred before
FIRST_LEN = 2  # draft length before any token was accepted
MAX_PAUSE = 256  # longest pause, in tokens


@dataclass(slots=True, eq=False)
class Drafter:
    """Draft state of one request. `draft` follows the committed tokens; `in_flight` are the draft tokens that a step in
    flight verifies. Lengths in tokens."""

    max_len: int
    draft_len: int  # limit for the next draft
    draft: list[int] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    pause: int = 0  # length of the last pause
    paused_until: int = 0  # sequence length at which the pause ends
    _ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # end of the last occurrence, by n-gram
    _num_seen: int = 0  # sequence length that `_ends` covers

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Return up to `count` draft tokens that may follow `tokens`, which must extend those of the last call. Empty
        if the last `NGRAM` tokens have not occurred before. A repeated part is continued periodically."""
        for end in range(max(NGRAM, self._num_seen), len(tokens)):
            self._ends[tuple(tokens[end - NGRAM : end])] = end
        self._num_seen = len(tokens)
        start = self._ends.get(tuple(tokens[-NGRAM:]))
        if start is None:
            return []
        draft = tokens[start : start + count]
        while len(draft) < count:
            draft += draft
        return draft[:count]

    def learn(self, num_accepted: int, length: int) -> None:
        """Adapt the draft length and the pause to a verified draft with `num_accepted` accepted tokens. `length` is the
        new length of the sequence."""
        self.draft_len = min(max(2 * num_accepted, FIRST_LEN), self.max_len)
        self.pause = 0 if num_accepted else min(max(2 * self.pause, 1), MAX_PAUSE)
        self.paused_until = length + self.pause


def make_drafter(max_draft_len: int) -> Drafter:
    return Drafter(max_draft_len, min(FIRST_LEN, max_draft_len))
