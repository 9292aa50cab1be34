"""The text path in plain Python, on the package `tokenizers`: the reference for `rust/minisgl-text`, and its fallback
if the extension is missing.

Byte-level BPE and sentencepiece with byte fallback, which nearly all models use, have a table from id to bytes, and the
bytes of an incomplete character wait for the next id. Other decoders (WordPiece, CTC) decode a short window of ids.

Invariants: token ids and decoded text are those of `minisgl._rust.TextTokenizer`, `TextDecoder` and `TextStream`. It
has no lower bound for a text's token count: a text that is too long is encoded completely first.
"""

from __future__ import annotations

import codecs
import collections
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from minisgl.extension import _rust
from minisgl.step import Int32Array
from minisgl.tokenizer.echo import char_to_byte
from minisgl.tokenizer.reference_guards import Guarding

if TYPE_CHECKING:
    from minisgl._rust import AnswerTools, Thinking, ToolFormat

    Formats: TypeAlias = tuple[ToolFormat | None, Thinking | None, AnswerTools | None]

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LITERAL = re.compile(r"R+B?(FS?)?")
"""Decoders like sentencepiece's, by the letters of their steps, in which a token's text depends on no neighbour."""
_LETTERS = {"Replace": "R", "Metaspace": "R", "ByteFallback": "B", "Fuse": "F", "Strip": "S"}
_WINDOW_HOLD = 8  # most ids held back for an incomplete character
_WINDOW_CONTEXT = 4  # ids decoded again as left context
_CHAR_TO_BYTE = char_to_byte()


class NotEncodable(ValueError):
    """Error for a text that is not valid Unicode (lone surrogates), or that the tokenizer cannot encode."""


class TooManyTokens(ValueError):
    """Error for a text with too many tokens: `count`, or `at_least` that many if it was not encoded to its end."""

    def __init__(self, count: int, at_least: bool = False) -> None:
        super().__init__(f"{'at least ' if at_least else ''}{count} tokens")
        self.count = count
        self.at_least = at_least


class ReferenceTokenizer:
    """Tokenizer from a tokenizer.json, given as a file or as text. Raises `ValueError` if it cannot be read. The
    methods are those of `minisgl._rust.TextTokenizer`, see `_rust.pyi`."""

    def __init__(self, file: str | PathLike[str] | None = None, text: str | None = None) -> None:
        import tokenizers  # slow to import, and unused with the extension

        library = tokenizers.Tokenizer
        try:
            made = library.from_str(text or "") if file is None else library.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"the tokenizer cannot be read: {error}") from error
        made.no_truncation()
        made.no_padding()
        self.backend = made
        self.num_ids = max(made.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids = sorted(
            i for i, token in made.get_added_tokens_decoder().items() if token.special and i < self.num_ids
        )
        steps = [] if made.decoder is None else _flat(json.loads(made.decoder.__getstate__()))
        self._falls_back = any(step["type"] == "ByteFallback" for step in steps)
        self.is_byte_level = [step["type"] for step in steps] == ["ByteLevel"]
        self.is_literal = _is_literal(steps)
        self._replacements = _replacements(steps) if self.is_literal else []
        self._bytes: dict[int, bytes] = {}

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None, guards: Sequence[int] = ()
    ) -> Int32Array:
        if not guards:
            return self.encode_batch([text], add_special_tokens, most)[0]
        text.encode()
        try:
            ids = np.array(self.guarding.encode(text, guards), np.int32)
        except Exception as error:  # the library raises nothing narrower
            raise NotEncodable(f"the tokenizer has no ids for it: {error}") from error
        if add_special_tokens:
            ids = np.concatenate([self.leading_ids, ids])
        if most is not None and len(ids) > most:
            raise TooManyTokens(len(ids))
        return ids

    def has_markers(self, value: Any, /) -> bool:
        if isinstance(value, str):
            return self.guarding.finds(value)
        if isinstance(value, Mapping):
            return any(map(self.has_markers, itertools.chain(value, value.values())))
        return isinstance(value, list | tuple) and any(map(self.has_markers, value))

    def guarded(self, text: str, guard: str, kept: Sequence[str], /) -> str:
        edges = [0, *self.guarding.guards(text, kept), len(text)]
        return guard.join(text[a:b] for a, b in itertools.pairwise(edges))

    @cached_property
    def guarding(self) -> Guarding:
        return Guarding(self.backend)

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, most: int | None = None
    ) -> list[Int32Array]:
        batch = self._ids(list(texts), add_special_tokens)
        for ids in batch:
            if most is not None and len(ids) > most:
                raise TooManyTokens(len(ids))
        return batch

    def encode_pair(self, one: str, other: str) -> Int32Array:
        return self._ids([(one, other)], True)[0]

    def _ids(self, inputs: list[Any], add_special_tokens: bool) -> list[Int32Array]:
        for text in inputs:
            "".join(text).encode()  # raises for lone surrogates, for which the library raises TypeError
        try:
            encodings = self.backend.encode_batch(inputs, add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises nothing narrower
            raise NotEncodable(f"the tokenizer has no ids for it: {error}") from error
        return [np.array(one.ids, np.int32) for one in encodings]

    def min_tokens(self, text: str, most: int) -> int:
        return 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        known = [i for i in ids if 0 <= i < self.num_ids]
        return str(self.backend.decode(known, skip_special_tokens=skip_special_tokens)) if known else ""

    def token_bytes(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._make_bytes(token_id)
        return data

    def _make_bytes(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            known = all(char in _CHAR_TO_BYTE for char in token)
            return bytes(_CHAR_TO_BYTE[char] for char in token) if known else token.encode()
        if self.is_byte(token_id):
            return bytes.fromhex(token[3:5])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()

    def is_byte(self, token_id: int) -> bool:
        """Return whether the id stands for a single byte in a tokenizer with byte fallback."""
        token = self._token(token_id) if self._falls_back else None
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def _token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id) if 0 <= token_id < self.num_ids else None

    def token_id(self, text: str) -> int | None:
        return self.backend.token_to_id(text)

    @cached_property
    def leading_ids(self) -> Int32Array:
        plain, around = self.encode("a", False).tolist(), self.encode("a").tolist()
        at = around.index(plain[0]) if plain and plain[0] in around else 0
        return np.array(around[:at] if around[at : at + len(plain)] == plain else [], np.int32)

    def decoder(self, skip_special_tokens: bool = True) -> ReferenceDecoder:
        return self._decoder(skip_special_tokens, ())

    def stream(
        self, stop: Sequence[str], shown: Collection[int], min_tokens: int, formats: Formats | None = None
    ) -> ReferenceStream:
        return ReferenceStream(self._decoder(True, shown), stop, shown, min_tokens, formats)

    def _decoder(self, skip_special_tokens: bool, shown: Collection[int]) -> ReferenceDecoder:
        skipped = frozenset(self.special_ids) - set(shown) if skip_special_tokens else frozenset()
        if self.is_byte_level:
            return _ByteLevelDecoder(self, skipped)
        if self.is_literal:
            return _LiteralDecoder(self, skipped)
        return _WindowDecoder(self, skipped if shown else frozenset(), skip_special_tokens and not shown)


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a decoder's steps in order, with nested sequences flattened."""
    return [one for part in step["decoders"] for one in _flat(part)] if step["type"] == "Sequence" else [step]


def _is_literal(steps: list[dict[str, Any]]) -> bool:
    """Return whether a token's text is the token with characters replaced, or one byte. A strip at the beginning of the
    whole text is allowed: it does not affect continued text."""
    return (
        _LITERAL.fullmatch("".join(_LETTERS.get(step["type"], "?") for step in steps)) is not None
        and all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
        and all(step["stop"] == 0 for step in steps if step["type"] == "Strip")
    )


def _replacements(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (step["replacement"], " ") if step["type"] == "Metaspace" else (step["pattern"]["String"], step["content"])
        for step in steps
        if step["type"] in ("Replace", "Metaspace")
    ]


class ReferenceDecoder(ABC):
    """Incremental decoder of one stream of token ids; `skipped` ids give no text."""

    def __init__(self, tokenizer: ReferenceTokenizer, skipped: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete."""
        return "".join([self._push_one(token_id) for token_id in ids if token_id not in self._skipped])

    def place(self, token_id: int) -> tuple[int, str]:
        """Return the number of characters in the new text before the one in which the id begins (those of pending bytes
        that the id does not continue), and the text of `push`."""
        return 0, self.push((token_id,))

    @abstractmethod
    def flush(self) -> str:
        """Return the pending text: the bytes of an incomplete character as U+FFFD."""

    @abstractmethod
    def _push_one(self, token_id: int) -> str: ...


class _ByteLevelDecoder(ReferenceDecoder):
    """Decoder for tokens that are sequences of bytes."""

    def __init__(self, tokenizer: ReferenceTokenizer, skipped: Collection[int]) -> None:
        super().__init__(tokenizer, skipped)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def _push_one(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def place(self, token_id: int) -> tuple[int, str]:
        data = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
        held = self._utf8.getstate()[0]
        before = len((held + data[:1]).decode(errors="replace")) - 1 if held and data else 0
        return before, self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _LiteralDecoder(ReferenceDecoder):
    """Decoder for tokens that are their own text; a run of byte tokens is UTF-8 if valid, else one U+FFFD per byte."""

    def __init__(self, tokenizer: ReferenceTokenizer, skipped: Collection[int]) -> None:
        super().__init__(tokenizer, skipped)
        self._pending = b""  # undelivered bytes of the current run
        self._run_is_invalid = False

    def _push_one(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        if self._tokenizer.is_byte(token_id):
            return self._push_byte(data)
        return self.flush() + data.decode() if data else ""

    def place(self, token_id: int) -> tuple[int, str]:
        held = len(self._pending)
        text = self.push((token_id,))
        goes_on = self._tokenizer.is_byte(token_id) and not self._run_is_invalid
        return held if text and not goes_on else 0, text

    def _push_byte(self, byte: bytes) -> str:
        if self._run_is_invalid:
            return REPLACEMENT
        self._pending += byte
        try:
            text = self._pending.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            self._run_is_invalid = True
            text = REPLACEMENT * len(self._pending)
        self._pending = b""
        return text

    def flush(self) -> str:
        text = REPLACEMENT * len(self._pending)
        self._pending, self._run_is_invalid = b"", False
        return text


class _WindowDecoder(ReferenceDecoder):
    """Decoder for all other tokenizers: decodes the last few ids with and without the new ones and returns the
    difference. Approximate: the first id is decoded as if it began the text, and rules with a wider reach are missed.
    """

    def __init__(self, tokenizer: ReferenceTokenizer, skipped: Collection[int], library_skips: bool) -> None:
        super().__init__(tokenizer, skipped)
        self._library_skips = library_skips
        self._context: list[int] = []  # delivered ids
        self._held: list[int] = []

    def _push_one(self, token_id: int) -> str:
        if not 0 <= token_id < self._tokenizer.num_ids:
            return ""
        self._held.append(token_id)
        text = self._new_text()
        waits = text.endswith(REPLACEMENT) and len(self._held) < _WINDOW_HOLD
        return "" if waits else self._deliver(text)

    def flush(self) -> str:
        return self._deliver(self._new_text()) if self._held else ""

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, self._library_skips)
        return self._tokenizer.decode(self._context + self._held, self._library_skips)[len(before) :]

    def _deliver(self, text: str) -> str:
        self._context, self._held = self._held[-_WINDOW_CONTEXT:], []
        return text


class _Search:
    """Incremental search for one stop string by the Knuth-Morris-Pratt algorithm, in linear time. Its table grows with
    the matched length, so that a long stop string costs nothing before a similar text."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched_len = 0  # longest suffix of the text that is a prefix of the stop string
        self._borders = [0, 0]  # [n]: longest proper border of the stop string's first n characters

    def push(self, text: str) -> int | None:
        """Return where the first match ends in `text`, or `None`. Not to be called after a match."""
        stop, matched, at = self.stop, self.matched_len, 0
        while at < len(text):
            if not matched and (at := text.find(stop[0], at)) < 0:
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
        """Compute the border of the first `length` characters from those of fewer."""
        if len(self._borders) > length:
            return
        char, border = self.stop[length - 1], self._borders[length - 1]
        while border and self.stop[border] != char:
            border = self._borders[border]
        self._borders.append(border + (self.stop[border] == char))


class ReferenceStream:
    """Text of one output, truncated at the first stop string; text that may begin one is held back. The methods are
    those of `minisgl._rust.TextStream`, see `_rust.pyi`. `shown`: special tokens that appear as text but match no stop
    string. `formats`: parser of the output; only its content is searched for stop strings."""

    def __init__(
        self,
        decoder: ReferenceDecoder,
        stop: Sequence[str],
        shown: Collection[int],
        min_tokens: int,
        formats: Formats | None = None,
    ) -> None:
        self._decoder = decoder
        self._searches = [_Search(one) for one in stop if one]
        self._shown = frozenset(shown)
        self._num_unsearched = min_tokens - 1  # ids to come that cannot be part of a stop string
        self._held = ""
        self._scan = None if formats is None or not self._searches else _rust.ContentScan(formats)
        self._scanned: collections.deque[bool] = collections.deque()  # by character: whether it is searched
        self.matched_stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.matched_stop is not None

    def push(self, ids: Sequence[int]) -> str:
        return self._push(ids)[0]

    def take(self, ids: Sequence[int], ended: bool, by_token: bool) -> tuple[str, int]:
        text, num_used = self._push(ids[:-1] if by_token else ids)
        if self.stopped:
            return text, num_used
        if ended:
            text += self._decided(self._decoder.flush(), True, ended=True)
            text += "" if self.stopped else self._take_held()
        return text, len(ids)

    def _push(self, ids: Sequence[int]) -> tuple[str, int]:
        if not self._searches:
            return self._decoder.push(ids), len(ids)
        parts: list[str] = []
        for at, token_id in enumerate(ids):
            if self.stopped:
                return "".join(parts), at
            text = self._decoder.push((token_id,))
            is_searched = self._num_unsearched <= 0 and token_id not in self._shown
            parts.append(self._decided(text, is_searched))
            self._num_unsearched -= 1
        return "".join(parts), len(ids)

    def _decided(self, text: str, is_searched: bool, *, ended: bool = False) -> str:
        """Return the text that can be shown now."""
        if self._scan is None:
            return self._search(text) if is_searched else self._skip(text)
        self._scanned.extend([is_searched] * len(text))
        parts: list[str] = []
        for piece, is_content in self._scan.push(text, ended):
            kinds = [self._scanned.popleft() and is_content for _ in piece]
            for is_one, run in itertools.groupby(zip(kinds, piece, strict=True), lambda pair: pair[0]):
                part = "".join(char for _, char in run)
                parts.append(self._search(part) if is_one else self._skip(part))
                if self.stopped:
                    return "".join(parts)
        return "".join(parts)

    def _skip(self, text: str) -> str:
        for search in self._searches:
            search.matched_len = 0
        return self._take_held() + text

    def _search(self, text: str) -> str:
        """Return the text before a match, else all that cannot be part of a later one. Not to be called after one."""
        ends = [(end, -len(one.stop), one.stop) for one in self._searches if (end := one.push(text)) is not None]
        text = self._held + text
        if ends:
            end, minus_len, self.matched_stop = min(ends)
            return text[: len(self._take_held()) + end + minus_len]
        cut = len(text) - max((search.matched_len for search in self._searches), default=0)
        self._held = text[cut:]
        return text[:cut]

    def _take_held(self) -> str:
        text, self._held = self._held, ""
        return text
