"""Fill-in-the-middle prompts from the text before and after a gap, for models whose tokenizer has the marker tokens.

Invariants: only ids placed here are markers. Text that spells a special token is encoded as plain text: it is split
inside the spelling, since not all tokenizers mark these tokens as special.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.step import Int32Array
from minisgl.tokenizer.reference import NotEncodable, TooManyTokens
from minisgl.tokenizer.tokenizer import Tokenizer

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True)
class Family:
    """Fill-in-the-middle markers of a model family. `layout`: markers and the two texts in order. `ends`: tokens that
    end a middle, where the tokenizer has them."""

    layout: tuple[str, ...]
    ends: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(part for part in self.layout if part not in (BEFORE, AFTER))


FAMILIES = (
    # Qwen2.5-Coder and later; CodeGemma spells them so too. The ends are those of Qwen's own examples, and CodeGemma's.
    Family(
        ("<|fim_prefix|>", BEFORE, "<|fim_suffix|>", AFTER, "<|fim_middle|>"),
        (
            "<|fim_prefix|>",
            "<|fim_suffix|>",
            "<|fim_pad|>",
            "<|repo_name|>",
            "<|file_sep|>",
            "<|file_separator|>",
            "<|endoftext|>",
            "<|im_end|>",
        ),
    ),
    # StarCoder
    Family(("<fim_prefix>", BEFORE, "<fim_suffix>", AFTER, "<fim_middle>"), ("<|endoftext|>",)),
    # DeepSeek-Coder
    Family(("<｜fim▁begin｜>", BEFORE, "<｜fim▁hole｜>", AFTER, "<｜fim▁end｜>")),
    # CodeLlama
    Family(("▁<PRE>", BEFORE, "▁<SUF>", AFTER, "▁<MID>"), ("▁<EOT>",)),
    # Codestral
    Family(("[SUFFIX]", AFTER, "[PREFIX]", BEFORE)),
)
_LEAD = "☺"  # temporary prefix that keeps a text's first token without space, as in the models' own tokenizers


class FillIn:
    """Encoder of fill-in-the-middle prompts for one tokenizer. Create it with `of`."""

    def __init__(self, tokenizer: Tokenizer, family: Family) -> None:
        self._tokenizer, self._layout = tokenizer, family.layout
        self._ids = {text: _id(tokenizer, text) for text in family.markers}
        ends = (tokenizer.token_id(text) for text in family.ends)
        self.end_ids = tuple(sorted({token for token in ends if token is not None}))
        """Ids of tokens that end the middle."""
        special = tokenizer.special_ids.union(self._ids.values(), self.end_ids)
        spelled = {tokenizer.token_bytes(token).decode("utf-8", "replace") for token in special}
        spelled |= {*family.markers, *family.ends}
        self._never = frozenset(self._ids.values())
        self._spelled = re.compile("|".join(f"(?={re.escape(text)})" for text in sorted(spelled) if len(text) > 1))
        first = tokenizer.encode("a", add_special_tokens=False)
        self._adds_space = len(first) > 0 and tokenizer.token_bytes(int(first[0])).startswith(b" ")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FillIn | None:
        """Return the encoder for a tokenizer; `None` if it has no fill-in-the-middle tokens."""
        for family in FAMILIES:
            if all(tokenizer.token_id(text) is not None for text in family.markers):
                return cls(tokenizer, family)
        return None

    @property
    def last_marker(self) -> int:
        """Highest marker id in every prompt."""
        return max(self._ids.values())

    def encode(self, before: str, after: str, *, most: int) -> Int32Array:
        """Return the prompt for the text around the gap. Raises `NotEncodable`, and `TooManyTokens` beyond `most`."""
        parts = [self._tokenizer.leading_ids]
        for part in self._layout:
            if part == BEFORE:
                parts.append(self._text(before, most, adds_space=self._adds_space))
            elif part == AFTER:
                parts.append(self._text(after, most, adds_space=False))
            else:
                parts.append(np.array([self._ids[part]], np.int32))
        whole = np.concatenate(parts)
        if len(whole) > most:
            raise TooManyTokens(len(whole))
        return whole

    def _text(self, text: str, most: int, *, adds_space: bool) -> Int32Array:
        parts: list[Int32Array] = [np.zeros(0, np.int32)]
        for at, piece in enumerate(self._cut(text)):
            parts.append(self._piece(piece, most, adds_space=adds_space and not at))
        ids = np.concatenate(parts)
        if not self._never.isdisjoint(ids.tolist()):
            raise NotEncodable("the text is encoded as a fill-in-the-middle token")
        return ids

    def _piece(self, text: str, most: int, *, adds_space: bool) -> Int32Array:
        if adds_space or not self._adds_space:
            return self._tokenizer.encode(text, add_special_tokens=False, most=most)
        lead = self._tokenizer.encode(_LEAD, add_special_tokens=False)
        ids = self._tokenizer.encode(_LEAD + text, add_special_tokens=False, most=most + len(lead))
        if not np.array_equal(ids[: len(lead)], lead):
            raise NotEncodable("the tokenizer merges it with the preceding text")
        return ids[len(lead) :]

    def _cut(self, text: str) -> Sequence[str]:
        """Split a text after the first character of each spelling of a special token, overlapping ones included."""
        cuts = [match.start() + 1 for match in self._spelled.finditer(text)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]


def _id(tokenizer: Tokenizer, text: str) -> int:
    token_id = tokenizer.token_id(text)
    assert token_id is not None
    return token_id
