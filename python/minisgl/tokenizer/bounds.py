"""How few tokens a text can have, known without encoding it: bytes against the most bytes of a kind that one token
stands for.

Long texts in pieces that have, one after the other, the same ids as the whole.

A text may be cut before a space between two ASCII letters if the pre-tokenizer certainly splits there: then no token
reaches across, and neither side knows the other. That is known of pre-tokenizers made of the alternatives of GPT-2 and
its followers (`_ALTERNATIVES`): none of them matches a letter with a space behind it, looks back, or looks ahead from
anything but spaces.

Invariants: `min_tokens` is never more than what encoding gives. That rests on every byte of the normalized text being
covered by some token, so it is only said of tokenizers for which that is certain: BPE with all bytes in the vocabulary
(byte level or byte fallback) or one unknown token a character, Unigram with byte fallback, with normalizers and
pre-tokenizers that drop nothing. An added token that takes the spaces around it along covers any number of them: of a
text that names one nothing is said. For all other tokenizers there is no bound, and `None` says so. Where that is not
certain, for a tokenizer or a stretch of text, the text is not cut.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers
from tokenizers import models

from minisgl.tokenizer.decode import char_to_byte

CHUNK_CHARS = 1 << 16
# What pieces of a text can have more than the whole when they are normalized alone: marks that would join the last
# character of the piece before (none has more than four parts of four bytes), and a prefix that each piece gets.
JOINED_BYTES = 32
MAX_PREFIX_BYTES = 16
_LETTERS = bytes(range(ord("A"), ord("Z") + 1)) + bytes(range(ord("a"), ord("z") + 1))
_SPACES = b" \t\n\r"
_HIGH = bytes(range(128, 256))
_OTHERS = bytes(set(range(256)) - set(_LETTERS + _SPACES + _HIGH))
KINDS = (b"", _LETTERS, _SPACES, _HIGH, _OTHERS)  # the first stands for all bytes
_KEEPING_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "ByteLevel"}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts"}


def steps_of(component: Any) -> list[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, or of each step of a sequence of them."""

    def flat(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if config["type"] == "Sequence":
            for part in config.get("normalizers") or config.get("pretokenizers") or ():
                yield from flat(part)
        else:
            yield config

    return [] if component is None else list(flat(json.loads(component.__getstate__())))


def count_kinds(data: bytes) -> list[int]:
    return [len(data), *(len(data) - len(data.translate(None, kind)) for kind in KINDS[1:])]


class TokenBound:
    """Use `of`."""

    def __init__(
        self,
        longest: list[int],
        normalize: Callable[[str], str] | None,
        swallowing: tuple[str, ...],
    ) -> None:
        self._longest = longest  # by kind: the most bytes of it that a token stands for
        self._normalize = normalize  # None: it changes nothing
        self._swallowing = swallowing  # added tokens that take spaces along

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TokenBound | None:
        """None where a token can stand for any length of text."""
        normalizers, pre_tokenizers = steps_of(backend.normalizer), steps_of(backend.pre_tokenizer)
        byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers))
        pieces = _pieces_of_vocab(backend.model, backend.get_vocab(with_added_tokens=False), byte_level=byte_level)
        if pieces is None or not all(map(_keeps_all, normalizers)) or not all(map(_splits_only, pre_tokenizers)):
            return None
        is_same = not normalizers or [part["type"] for part in normalizers] == ["ByteLevel"]
        if not is_same and any(part["type"] == "ByteLevel" for part in normalizers):
            return None
        normalize = None if is_same else backend.normalizer.normalize_str
        added = backend.get_added_tokens_decoder().values()
        swallowing = [token for token in added if token.lstrip or token.rstrip]
        if normalizers and any(token.normalized for token in swallowing):
            return None
        contents = [token.content for token in added]
        contents += [] if normalize is None else [normalize(content) for content in contents]
        longest = [1] * len(KINDS)
        for piece in (*pieces, *(content.encode() for content in contents)):
            if len(piece) > min(longest):
                longest = [max(pair) for pair in zip(longest, count_kinds(piece), strict=True)]
        if any(part["type"] == "Metaspace" for part in pre_tokenizers):  # spaces become longer bytes of another kind
            longest[1:] = [longest[0]] * (len(KINDS) - 1)
        return cls(longest, normalize, tuple(token.content for token in swallowing))

    def min_tokens(self, text: str, most: int) -> int:
        """A number of tokens that `text` has at least; it is not looked at further once that is beyond `most`."""
        if len(text) * 4 <= most or any(token in text for token in self._swallowing):
            return 0
        totals = [0] * len(KINDS)
        found = 0
        for at in range(0, len(text), CHUNK_CHARS):
            chunk, joined = text[at : at + CHUNK_CHARS], 0
            if self._normalize is not None:
                chunk, joined = self._normalize(chunk), JOINED_BYTES
            counts = count_kinds(chunk.encode(errors="surrogatepass"))
            totals = [total + max(0, count - joined) for total, count in zip(totals, counts, strict=True)]
            found = max(-(-total // longest) for total, longest in zip(totals, self._longest, strict=True))
            if found > most:
                break
        return found


def _keeps_all(normalizer: dict[str, Any]) -> bool:
    """Whether it drops no character, and what it makes of one depends on its neighbours at most."""
    if normalizer["type"] == "Replace":
        old = normalizer["pattern"].get("String")
        return old is not None and len(old) == len(normalizer["content"]) == 1
    if normalizer["type"] == "Prepend":
        return len(normalizer["prepend"].encode()) <= MAX_PREFIX_BYTES
    return normalizer["type"] in _KEEPING_NORMALIZERS


def _splits_only(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    return kind in _KEEPING_PRE_TOKENIZERS and pre_tokenizer.get("behavior") != "Removed"


def _pieces_of_vocab(model: Any, vocab: dict[str, int], *, byte_level: bool) -> list[bytes] | None:
    """What each token stands for, in bytes; None if some text could be without a token of its own."""
    is_bpe = isinstance(model, models.BPE)
    if is_bpe and byte_level:
        bytes_of = char_to_byte()
        if not all(char in vocab for char in bytes_of):
            return None
        return [bytes([bytes_of[c] for c in token]) for token in vocab if all(c in bytes_of for c in token)]
    pieces = [token.encode() for token in vocab]
    settings = json.loads(model.__getstate__()) if not is_bpe else {}
    falls_back = bool(model.byte_fallback if is_bpe else settings.get("byte_fallback"))
    if falls_back and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return pieces
    if is_bpe and model.unk_token is not None and not model.fuse_unk:
        return [*pieces, *(bytes([byte]) * 4 for byte in b"a \x80.")]  # one token for any unknown character
    return None


PIECE_CHARS = 1 << 16
_CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")
_CROSSES = re.compile(r"[A-Za-z] |^ ")
_SPLITS_BY_CHARACTER = {"Digits", "Punctuation"}  # what they do at one place depends on nothing else
_ALTERNATIVES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"'(?i:[sdmt]|ll|ve|re)",
    r"'s|'t|'re|'ve|'m|'ll|'d",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r" ?\p{L}+",
    r" ?\p{N}+",
    r"\p{N}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)


def can_cut(backend: tokenizers.Tokenizer) -> bool:
    """Whether a cut before a space between ASCII letters changes no ids of `backend`."""
    if any(step["type"] not in ("NFC", "NFD", "NFKC", "NFKD") for step in steps_of(backend.normalizer)):
        return False
    for token in backend.get_added_tokens_decoder().values():
        reaches = token.lstrip or token.rstrip or token.single_word
        if reaches or _CROSSES.search(unicodedata.normalize("NFKC", token.content)):
            return False
    for part in steps_of(backend.pre_tokenizer):
        if _splits_words(part):
            return True
        if part["type"] not in _SPLITS_BY_CHARACTER:
            return False
    return False


def _splits_words(part: dict[str, Any]) -> bool:
    if part["type"] == "ByteLevel":
        return bool(part["use_regex"])
    if part["type"] != "Split" or part["behavior"] != "Isolated" or part["invert"]:
        return False
    rest: str = part["pattern"].get("Regex", "")
    while rest:
        known = [one for one in _ALTERNATIVES if rest == one or rest.startswith(f"{one}|")]
        if not known:
            return False
        rest = rest[len(max(known, key=len)) + 1 :]
    return bool(part["pattern"].get("Regex"))


def pieces(text: str, size: int) -> Iterator[str]:
    """`text` cut where that is safe, each piece as soon as it has `size` characters, which are two at least."""
    begin, at = 0, size
    while at < len(text):
        # a stretch at a time: one search through megabytes would hold the interpreter as long
        if cut := _CUT.search(text, at - 1, at + size):
            yield text[begin : cut.end()]
            begin, at = cut.end(), cut.end() + size
        else:
            at += size - 1
    yield text[begin:] if begin else text
