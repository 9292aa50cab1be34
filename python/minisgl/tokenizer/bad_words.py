"""Words as token ids, for an engine that must not generate them.

Invariants: what vLLM's `bad_words` means: a word at the beginning of a text and after a space, each as the tokenizer
spells it. Another spelling of the same letters by smaller tokens is another sequence, and not found.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.tokenizer.tokenizer import Tokenizer


def bad_token_ids(tokenizer: Tokenizer, words: Sequence[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Sequences of ids below the model's `vocab_size`, each once. Raises `ValueError` for a word that is no Unicode."""
    spellings = []
    for word in words:
        bare = word.lstrip()
        spellings += [bare, f" {bare}"] if bare else [word]
    found = [tuple(ids.tolist()) for ids in tokenizer.encode_batch(spellings, add_special_tokens=False)]
    return tuple(dict.fromkeys(ids for ids in found if ids and max(ids) < vocab_size))
