"""Tokenizer with fill-in-the-middle tokens."""

from __future__ import annotations

from tokenizers import AddedToken

from minisgl.tokenizer import Tokenizer
from tests.helpers.text import echo_library

MARKERS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>")


def with_markers() -> Tokenizer:
    """Return the echo engine's tokenizer with the tokens `MARKERS` added."""
    backend = echo_library()
    backend.add_tokens([AddedToken(text, normalized=False) for text in MARKERS])
    return Tokenizer.from_json(backend.to_str())
