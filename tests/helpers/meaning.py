"""What tests of meaning ask the embedded model: only what it is sure of.

Each token of an answer lies more than `MARGIN` before the next likeliest one in float32, which
tests/weights/test_gguf_smollm2.py measures; nearer ones fall to how a machine rounds. Everything asked has an end.
"""

from __future__ import annotations

MARGIN = 0.5  # of logits
MAX_TOKENS = 30  # more than any answer below has


def capital(country: str) -> str:
    return f"Name the capital of {country}."


CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Germany": "Berlin"}
FRANCE = capital("France")
BEGINNINGS = {"The capital of France is": (" Paris", 1), "1, 2, 3,": (" 4, 5, 6", 8), "1, 2, 3, 4,": (" 5, 6, 7", 8)}
"""Plain texts: how they go on, of which so many tokens are sure."""
