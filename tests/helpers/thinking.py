"""Model that thinks and calls tools: a tokenizer with or without special tokens for the markers, a chat template after
Qwen3's, and the bytes by which a prompt requests markers from a scripted engine."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from minisgl.tokenizer import Tokenizer
from tests.helpers.text import echo_library

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
BYTES = "\x01\x02\x03\x04"
"""Bytes that stand for `MARKERS` in a scripted reply, since a marker itself in a prompt may be a token."""

TEMPLATE = (Path(__file__).parent / "thoughts_and_calls.jinja").read_text(encoding="utf-8")


def thinking_tokenizer(*, has_tokens: bool) -> Tokenizer:
    """Return the echo engine's tokenizer with a chat template. `has_tokens`: the markers are tokens."""
    backend = echo_library()
    names = ("<|im_start|>", "<|im_end|>", *MARKERS) if has_tokens else ("<|im_start|>", "<|im_end|>")
    backend.add_tokens([AddedToken(text, normalized=False, special=text[1] == "|") for text in names])
    return Tokenizer.from_json(backend.to_str(), {}, {"default": TEMPLATE})


def marked_ids(tokenizer: Tokenizer) -> dict[int, list[int]]:
    """Return the tokens that the engine sends for each of `BYTES`."""
    return {ord(byte): tokenizer.encode(text, False).tolist() for byte, text in zip(BYTES, MARKERS, strict=True)}
