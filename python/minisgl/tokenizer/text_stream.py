"""The text of one request as it grows: detokenized, and cut at the first stop string.

Invariants: the deltas joined are the text before the first match, whatever the chunks were; text that may be the
beginning of a stop string is held back until that is decided. The first match is the one that ends first; of those that
end at the same place, the one that begins first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.tokenizer.tokenizer import Tokenizer


class _Search:
    """One stop string, looked for by Knuth, Morris and Pratt's method: linear whatever stop string and text are.
    The table grows with the matched length, so that a long stop string costs nothing before text resembles it."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched_len = 0  # length of the longest end of the text with which the stop string begins
        self._borders = [0, 0]  # [n]: the same of the stop string's own first n characters, short of all n

    def push(self, text: str) -> int | None:
        """Where in `text` the first match ends. Not to be called after a match."""
        stop, matched = self.stop, self.matched_len
        at = 0
        while at < len(text):
            if not matched:
                at = text.find(stop[0], at)
                if at < 0:
                    break
            while matched and stop[matched] != text[at]:
                matched = self._borders[matched]
            if stop[matched] == text[at]:
                matched += 1
                self._extend(matched)
                if matched == len(stop):
                    self.matched_len = matched
                    return at + 1
            at += 1
        self.matched_len = matched
        return None

    def _extend(self, length: int) -> None:
        """Know the border of the first `length` characters; those of fewer are known."""
        if len(self._borders) > length:
            return
        char = self.stop[length - 1]
        border = self._borders[length - 1]
        while border and self.stop[border] != char:
            border = self._borders[border]
        self._borders.append(border + (self.stop[border] == char))


class StopMatcher:
    """Cut a growing text at the first of `stops`; empty ones count for nothing."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._searches = [_Search(stop) for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What is decided: text before the match if there is one, else all that cannot belong to a match to come."""
        if self.matched is not None:
            return ""
        if not self._searches:
            return text
        ends = [(end, -len(search.stop), search.stop) for search in self._searches if (end := search.push(text))]
        text = self._held + text
        if ends:
            end, minus_len, self.matched = min(ends)
            cut = len(self._held) + end + minus_len
            self._held = ""
            return text[:cut]
        cut = len(text) - max(search.matched_len for search in self._searches)
        self._held = text[cut:]
        return text[:cut]

    def skip(self, text: str) -> str:
        """Text that is not searched; the search begins anew after it."""
        for search in self._searches:
            search.matched_len = 0
        return self.flush() + text

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text


class TextStream:
    """`push` generated ids, get text; `stopped` once a stop string was found; `finish` gives what was held back."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`shown`: special tokens that are text all the same, but for stop strings."""
        self._decoder = tokenizer.new_decoder(skip_special_tokens, shown)
        self._matcher = StopMatcher(stop)
        self._shown = shown if stop else frozenset()

    @property
    def stopped(self) -> bool:
        return self._matcher.matched is not None

    @property
    def matched_stop(self) -> str | None:
        return self._matcher.matched

    def push(self, ids: Sequence[int], *, may_stop: bool = True) -> str:
        """The new text. With `may_stop` False it is text whatever it spells, and begins no stop string either."""
        if self._shown and not self._shown.isdisjoint(ids):
            return "".join([self._push_one(one, may_stop and one not in self._shown) for one in ids])
        text = self._decoder.push(ids)
        return self._matcher.push(text) if may_stop else self._matcher.skip(text)

    def _push_one(self, token_id: int, may_stop: bool) -> str:
        if self.stopped:
            return ""
        text = self._decoder.push((token_id,))
        return self._matcher.push(text) if may_stop else self._matcher.skip(text)

    def finish(self) -> str:
        """End of the request: nothing may be pushed any more."""
        text = self._matcher.push(self._decoder.flush())
        return text + self._matcher.flush()
