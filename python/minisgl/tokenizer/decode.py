"""Incremental detokenization: token ids in, text out, each character once and whole.

Byte-level BPE and sentencepiece with byte fallback, which nearly all models use, are turned into a table from id to
bytes; the standard library's incremental UTF-8 decoder carries split characters. That is linear in the output whatever
the ids are, where decoding a growing window (as `DecodeStream` of the tokenizers library does) is quadratic in a flood
of invalid bytes and fails where a decoding does not begin with the one before it. Other decoders get a short window.

The text of one request as it grows: detokenized, and cut at the first stop string.

Invariants: the deltas and the flush together equal the whole-text decoding of the generated ids, in a text that goes on
(the space that sentencepiece strips at the very beginning is kept). So they equal decode(prompt + generated) without
decode(prompt), unless the prompt ends inside a character. One exception, which whole-text decoding decides in
hindsight: an invalid byte turns all bytes of its byte-fallback run into U+FFFD there; here, characters delivered before
it stay. The deltas joined are the text before the first match, whatever the chunks were; text that may be the beginning
of a stop string is held back until that is decided. The first match is the one that ends first; of those that end at
the same place, the one that begins first.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

import tokenizers

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WINDOW_HOLD = 8  # ids held back at most for a character that does not come


class IncrementalDecoder(Protocol):
    """State of one stream."""

    def push(self, ids: Sequence[int]) -> str: ...

    def place(self, token_id: int) -> tuple[int, str]:
        """`push` of one id, and the number of characters of the new text that stand before the one in which the id
        begins: those of held back bytes, if it does not go on with them."""

    def flush(self) -> str:
        """What was held back: the bytes of an unfinished character as U+FFFD."""


def special_ids(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids that are no text."""
    return frozenset(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)


class DecodeTable:
    """What a tokenizer's ids stand for; shared by all streams. `skipped` ids (special tokens) yield nothing, nor do
    ids beyond the vocabulary."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_ids = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.skipped = special_ids(tokenizer)
        parts = _decoder_parts(tokenizer)
        kinds = [part["type"] for part in parts]
        self.byte_level = kinds == ["ByteLevel"]
        self.literal = _is_literal(parts)
        self._byte_fallback = "ByteFallback" in kinds
        self._replacements = _replacements(parts) if self.literal else []
        self._bytes: dict[int, bytes] = {}
        self._is_byte: dict[int, bool] = {}
        self._char_to_byte = char_to_byte() if self.byte_level else {}

    def new_stream(self, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()) -> IncrementalDecoder:
        skipped = self.skipped - shown if skip_special_tokens else frozenset()
        if self.byte_level:
            return _ByteLevelStream(self, skipped)
        if self.literal:
            return _LiteralStream(self, skipped)
        if shown:
            return _WindowStream(self, False, skipped)
        return _WindowStream(self, skip_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._make_bytes(token_id)
        return found

    def is_byte(self, token_id: int) -> bool:
        """Whether a byte-fallback tokenizer spells a single byte with this id."""
        found = self._is_byte.get(token_id)
        if found is None:
            token = self.tokenizer.id_to_token(token_id) if 0 <= token_id < self.num_ids else None
            is_byte = self._byte_fallback and token is not None and _BYTE_TOKEN.fullmatch(token) is not None
            found = self._is_byte[token_id] = is_byte
        return found

    def _make_bytes(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id) if 0 <= token_id < self.num_ids else None
        if token is None:
            return b""
        if self.byte_level:
            if all(char in self._char_to_byte for char in token):
                return bytes(self._char_to_byte[char] for char in token)
            return token.encode()
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte.group(1), 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _decoder_parts(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder's steps in order, sequences of sequences made flat."""

    def flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
        if decoder["type"] == "Sequence":
            return [step for part in decoder["decoders"] for step in flat(part)]
        return [decoder]

    return flat(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder is not None else []


def _is_literal(parts: list[dict[str, Any]]) -> bool:
    """Whether a token's text is the token with characters replaced, or one byte, whatever its neighbours are: the
    decoders of sentencepiece. A strip at the beginning of the whole text is none of a text that goes on."""
    letters = "".join(
        {"Replace": "R", "Metaspace": "R", "ByteFallback": "B", "Fuse": "F", "Strip": "S"}.get(part["type"], "?")
        for part in parts
    )
    return (
        re.fullmatch("R+B?(FS?)?", letters) is not None
        and all("String" in part["pattern"] for part in parts if part["type"] == "Replace")
        and all(part["stop"] == 0 for part in parts if part["type"] == "Strip")
    )


def _replacements(parts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (part["replacement"], " ") if part["type"] == "Metaspace" else (part["pattern"]["String"], part["content"])
        for part in parts
        if part["type"] in ("Replace", "Metaspace")
    ]


def char_to_byte() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable Latin-1 bytes are themselves, the others follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class _ByteLevelStream:
    def __init__(self, table: DecodeTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        bytes_of, skipped = self._table.bytes_of, self._skipped
        return self._decoder.decode(b"".join([bytes_of(i) for i in ids if i not in skipped]))

    def place(self, token_id: int) -> tuple[int, str]:
        data = b"" if token_id in self._skipped else self._table.bytes_of(token_id)
        held = self._decoder.getstate()[0]
        before = len((held + data[:1]).decode(errors="replace")) - 1 if held and data else 0
        return before, self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _LiteralStream:
    """A token is its own text; but a run of byte tokens is text if it is valid UTF-8, else each byte is one U+FFFD."""

    def __init__(self, table: DecodeTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._pending = b""  # of the current run, not delivered
        self._run_is_invalid = False

    def push(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token_id in ids:
            if token_id in self._skipped:
                continue
            text = self._table.bytes_of(token_id)
            if self._table.is_byte(token_id):
                parts.append(self._push_byte(text))
            elif text:
                parts.append(self.flush())
                parts.append(text.decode())
        return "".join(parts)

    def place(self, token_id: int) -> tuple[int, str]:
        """A byte whose run turns out to be no text has its own U+FFFD, which it cannot know before."""
        held = len(self._pending)
        text = self.push((token_id,))
        goes_on = self._table.is_byte(token_id) and not self._run_is_invalid
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
        self._pending = b""
        self._run_is_invalid = False
        return text


class _WindowStream:
    """Any other decoder (WordPiece, CTC): decode the last few ids with and without the new ones and deliver the
    difference. Approximate: the first id is decoded as if it began the text, and rules of wider reach are missed."""

    def __init__(self, table: DecodeTable, skip_special_tokens: bool, skipped: frozenset[int] = frozenset()) -> None:
        self._table = table
        self._skip = skip_special_tokens
        self._skipped = skipped  # beside those
        self._context: list[int] = []  # delivered, so that joining rules see a left neighbour
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        num_ids, skipped = self._table.num_ids, self._skipped
        return "".join([self._push_one(one) for one in ids if 0 <= one < num_ids and one not in skipped])

    def place(self, token_id: int) -> tuple[int, str]:
        return 0, self.push((token_id,))

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._delta()
        if text.endswith(REPLACEMENT) and len(self._held) < _WINDOW_HOLD:
            return ""
        return self._deliver(text)

    def _delta(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._held)[len(before) :]

    def _deliver(self, text: str) -> str:
        self._context = self._held[-4:]
        self._held = []
        return text

    def _decode(self, ids: list[int]) -> str:
        return str(self._table.tokenizer.decode(ids, skip_special_tokens=self._skip)) if ids else ""

    def flush(self) -> str:
        return self._deliver(self._delta()) if self._held else ""


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
        self, decoder: IncrementalDecoder, stop: Sequence[str] = (), *, shown: frozenset[int] = frozenset()
    ) -> None:
        """`shown`: special tokens that `decoder` shows and that are text all the same, but for stop strings."""
        self._decoder = decoder
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
