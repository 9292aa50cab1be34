"""Test of whether a grammar accepts a text, by the library itself on an alphabet of bytes."""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    """Return true if `text` is a complete output of the grammar."""
    matcher = LLMatcher(_bytes(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.validate_tokens(data) == len(data) and matcher.consume_tokens(data) and matcher.is_accepting()
