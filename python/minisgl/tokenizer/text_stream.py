"""The text of one request as it grows: detokenized, and cut at the first stop string.

Keeps true: the deltas joined are the text before the first match, whatever the chunks were; text that may be the
beginning of a stop string is held back until that is decided. The first match is the one that ends first; of those that
end at the same place, the one that begins first.
Doesn't know: stop tokens. The token that ended a request (EOS, a stop id) is no text: the caller does not push it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.tokenizer.tokenizer import Tokenizer


class StopMatcher:
    """Cut a growing text at the first of `stops`. Linear in the text: it looks back by one stop string at most."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        hold = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - hold
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0


class TextStream:
    """`push` generated ids, get text; `stopped` once a stop string was found; `finish` gives what was held back."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> None:
        self._decoder = tokenizer.new_decoder(skip_special_tokens)
        self._matcher = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        return self._matcher.matched is not None

    @property
    def matched_stop(self) -> str | None:
        return self._matcher.matched

    def push(self, ids: Sequence[int]) -> str:
        return self._matcher.push(self._decoder.push(ids))

    def finish(self) -> str:
        """End of the request: nothing may be pushed any more."""
        text = self._matcher.push(self._decoder.flush())
        return text + self._matcher.flush()
