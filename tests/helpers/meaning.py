"""Questions with a certain answer for tests of meaning with the embedded model.

Each output token's logit is more than `MARGIN` above the next likeliest one in float32, which
tests/weights/test_gguf_smollm2.py measures; closer ones depend on a machine's rounding. All outputs end by themselves.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from minisgl.config import ConfigError
from minisgl.weights.sources import find_smollm2

MARGIN = 0.5  # of logits
MAX_TOKENS = 30  # more than any answer below has


def capital(country: str) -> str:
    return f"Name the capital of {country}."


CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Germany": "Berlin"}
FRANCE = capital("France")
BEGINNINGS = {"The capital of France is": (" Paris", 1), "1, 2, 3,": (" 4, 5, 6", 8), "1, 2, 3, 4,": (" 5, 6, 7", 8)}
"""Prompts with their continuation, and the number of its tokens that are certain."""


def told_capital(url: str, country: str, timeout_s: float) -> str:
    """Ask the server for the capital of a country; return its answer."""
    body = {
        "messages": [{"role": "user", "content": capital(country)}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=timeout_s).json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


def embedded_model() -> Path:
    """Return the embedded model's file. Skips the test, or the test module if called at its top, without one."""
    try:
        return find_smollm2()
    except ConfigError as error:
        pytest.skip(str(error), allow_module_level=True)
