"""A request's place in its grammar, by the library llguidance: in the extension, or without one its Python package,
which builds its tokenizer with the GIL held.

Invariants: nothing raises; an error stays; after the end of the sequence, which overlap runs one step beyond, it allows
ends alone and takes anything; ids that the engine or the tokenizer doesn't have are never allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from minisgl.grammar.slots import Matcher
from minisgl.step import Int32Array

if TYPE_CHECKING:
    from llguidance import LLMatcher

SILENT = 0  # a log level: else the library prints what users wrote


def make_matchers(tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> Callable[[str], Matcher]:
    """What makes one of a grammar; what is wrong with that is the matcher's error. Raises what is wrong with the
    tokenizer."""
    try:
        from minisgl._rust import GrammarMatcher as RustMatcher
        from minisgl._rust import GrammarTokenizer
    except ImportError:
        return _by_the_package(tokenizer_json, vocab_size, eos_ids)
    tokenizer = GrammarTokenizer(tokenizer_json, vocab_size, eos_ids)
    return lambda grammar: RustMatcher(tokenizer, grammar)


def _by_the_package(tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> Callable[[str], Matcher]:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    ends = list(eos_ids)
    try:
        tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=ends)
    except ValueError as error:
        if "too small" not in str(error):
            raise
        tokenizer = LLTokenizer(tokenizer_json, eos_token=ends)  # more ids than the model: their bits are left out
    limits = LLParserLimits(verbose_errors=False)

    def make(grammar: str) -> Matcher:
        made = LLMatcher(tokenizer, grammar, log_level=SILENT, limits=limits)
        return GrammarMatcher(made, tokenizer.vocab_size, vocab_size, eos_ids)

    return make


class GrammarMatcher:
    """`matcher` knows `num_ids` ids, at least the `vocab_size` of the engine."""

    def __init__(self, matcher: LLMatcher, num_ids: int, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._num_ids = num_ids
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._num_consumed = 0
        self._has_ended = False
        self.error = first_line(matcher.get_error()) if matcher.is_error() else ""
        self._ends = np.zeros(-(-vocab_size // 32), np.int32)
        bits = self._ends.view(np.uint32)
        for token in self._eos_ids:
            bits[token // 32] |= np.uint32(1 << token % 32)
        # of a tokenizer with more ids than the model
        self._whole = np.zeros(-(-num_ids // 32), np.int32) if num_ids > vocab_size else None
        self._last_bits = np.uint32((1 << (vocab_size % 32 or 32)) - 1)

    def restart(self, generated: Sequence[int]) -> None:
        if self.error:
            return
        if self._num_consumed:
            self._num_consumed, self._has_ended = 0, False
            if not self._matcher.reset():
                self._fail()
        for token in generated:
            self.consume(token)

    def fill(self, mask: Int32Array) -> None:
        if self.error or self._has_ended:
            mask[:] = self._ends
            return
        if (whole := self._whole) is None:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        else:
            self._matcher.unsafe_compute_mask_ptr(whole.ctypes.data, whole.nbytes)
            mask[:] = whole[: len(mask)]
            mask.view(np.uint32)[-1] &= self._last_bits
        if self._matcher.is_error():
            self._fail()
            mask[:] = self._ends

    def try_fill(self, mask: Int32Array, left_s: float) -> bool:
        """Without a bound: only the extension has one."""
        self.fill(mask)
        return True

    def prepare(self) -> None:
        """It is made in `fill`."""

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._num_ids, self._vocab_size, self._eos_ids)

    @property
    def num_bytes(self) -> int:
        return 0  # it does not tell

    def consume(self, token: int) -> None:
        if self.error or self._has_ended:
            return
        self._num_consumed += 1
        if not self._matcher.consume_token(token):
            self._fail()
        elif token in self._eos_ids:
            self._has_ended = self._matcher.is_stopped()

    def _fail(self) -> None:
        self.error = first_line(self._matcher.get_error()) or "its matcher has failed"


def first_line(text: str) -> str:
    """The library appends what its parser holds: the client's own text."""
    return text.partition("\n")[0].strip()
