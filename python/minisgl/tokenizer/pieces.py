"""Long texts in pieces that have, one after the other, the same ids as the whole.

A text may be cut before a space between two ASCII letters if the pre-tokenizer certainly splits there: then no token
reaches across, and neither side knows the other. That is known of pre-tokenizers made of the alternatives of GPT-2 and
its followers (`_ALTERNATIVES`): none of them matches a letter with a space behind it, looks back, or looks ahead from
anything but spaces.

Invariants: where that is not certain, for a tokenizer or a stretch of text, the text is not cut.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import tokenizers

from minisgl.tokenizer.bounds import steps_of

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
