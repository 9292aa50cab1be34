"""The reference for `rust/minisgl-text/src/guarded.rs`: encodes texts with offsets across which no added token is
matched.

Invariants: markers and token ids are those of `minisgl._rust.TextTokenizer`. Added tokens that match normalized text
are searched as they are spelled.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_TAGS = "table caption thead tbody tfoot tr th td h1 h2 h3 h4 h5 h6 blockquote strong em b i u s sub sup code"
_TAG = re.compile(rf"<[</]*(?:{'|'.join(_TAGS.split())})>+")
_LEAD = "a"  # temporary prefix of a text that is not at the beginning


def is_marker(token: tokenizers.AddedToken) -> bool:
    """Return whether request text must not be encoded as this token."""
    text = token.content
    is_word = all(char.isalnum() or char.isspace() or char == "▁" for char in text)
    return len(text) > 1 and (token.special or not (is_word or _TAG.fullmatch(text)))


class Guarding:
    """Markers of one tokenizer, and its encoder for guarded texts."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._ids = frozenset(i for i, token in added.items() if is_marker(token))
        self._markers = sorted(token.content for i, token in added.items() if i in self._ids)
        self._longest = max(map(len, self._markers), default=0)
        self._begins = re.compile(
            f"[{re.escape(''.join({text[0] for text in self._markers}))}]" if self._ids else "(?!)"
        )
        self._added = {token.content: (i, token) for i, token in added.items()}
        self._searches = [
            _search(token.content for token in added.values() if token.normalized is normalized)
            for normalized in (False, True)
        ]

    def finds(self, text: str) -> bool:
        return bool(self.guards(text, ()))

    def guards(self, text: str, kept: Sequence[str]) -> list[int]:
        """Return the guard offsets that keep `text` from being encoded as markers, except for those in `kept`."""
        edge = len(text.rstrip())
        offsets = []
        for match in self._begins.finditer(text):
            at = match.start()
            whole = any(text.startswith(marker, at) and marker not in kept for marker in self._with(text[at]))
            if whole or any(end - at <= self._longest and self._goes_on(text[at:end]) for end in (edge, len(text))):
                offsets.append(at + 1)
        return offsets

    def _with(self, begin: str) -> Sequence[str]:
        first = bisect.bisect_left(self._markers, begin)
        return self._markers[first : bisect.bisect_left(self._markers, chr(ord(begin) + 1))]

    def _goes_on(self, begun: str) -> bool:
        after = bisect.bisect_right(self._markers, begun)
        return bool(begun) and after < len(self._markers) and self._markers[after].startswith(begun)

    def encode(self, text: str, guards: Sequence[int]) -> list[int]:
        """Return the token ids of `text`. `guards` are ascending offsets. Raises the library's errors."""
        ids: list[int] = []
        for begin, end, token in self.split(text, guards):
            ids += self._letters(text[begin:end], begin > 0) if token is None else [token]
        return ids

    def split(self, text: str, guards: Sequence[int]) -> Iterator[tuple[int, int, int | None]]:
        """Yield start, end and, for an added token, the id of each part of `text`."""
        for begin, end, token in self._find(self._searches[0], text, 0, len(text), guards):
            if token is not None:
                yield begin, end, token
            else:
                yield from self._find(self._searches[1], text, begin, end, guards)

    def _find(
        self, search: re.Pattern[str], text: str, begin: int, end: int, guards: Sequence[int]
    ) -> Iterator[tuple[int, int, int | None]]:
        at = begin
        while match := search.search(text, at, end):
            at = match.end()
            guard = bisect.bisect_right(guards, match.start())
            if guard < len(guards) and guards[guard] < match.end():
                at = match.start() + 1
                continue
            token_id, token = self._added[match[0]]
            before, after = text[begin : match.start()], text[match.end() : end]
            if token.single_word and (re.search(r"\w\Z", text[: match.start()]) or re.match(r"\w", after)):
                continue
            start = begin + len(before.rstrip()) if token.lstrip else match.start()
            at = end - len(after.lstrip() if token.rstrip else after)
            if start > begin:
                yield begin, start, None
            yield start, at, token_id
            begin = at
        if end > begin:
            yield begin, end, None

    def _letters(self, text: str, follows: bool) -> list[int]:
        """Return the token ids of a text without added tokens. `follows`: it is not at the beginning of the prompt."""
        import tokenizers

        lead = len(_LEAD) if follows else 0
        parts = tokenizers.PreTokenizedString(_LEAD[:lead] + text)
        backend = self._backend
        if lead:
            parts.split(lambda _, whole: [whole[:lead], whole[lead:]])
        if backend.normalizer is not None:
            parts.normalize(backend.normalizer.normalize)
        if backend.pre_tokenizer is not None:
            backend.pre_tokenizer.pre_tokenize(parts)
        parts.tokenize(self._tokens)
        encoding = parts.to_encoding()
        return [i for i, (start, _) in zip(encoding.ids, encoding.offsets, strict=True) if start >= lead]

    def _tokens(self, piece: str) -> list[Any]:
        """Return the model's tokens; a piece that would become a marker is split after the marker's first character."""
        tokenize: Callable[[str], list[Any]] = self._backend.model.tokenize
        found: list[Any] = []
        while True:
            tokens = tokenize(piece)
            marker = next((token for token in tokens if token.id in self._ids), None)
            data = piece.encode()
            cut = len(data) if marker is None else len(data[: marker.offsets[0]].decode()) + 1
            if marker is None or cut >= len(piece):
                return found + tokens
            found += tokenize(piece[:cut])
            piece = piece[cut:]


def _search(texts: Iterator[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")
