"""Two texts as one prompt, which a cross encoder makes a score of.

A request for a score is one for an embedding with `SamplingParams.embedding` "score": it ends with its prompt, and its
embedding is what the model's head gives, a number for each of its labels, as little-endian float32: mostly one logit.
"""

from __future__ import annotations

import numpy as np

from minisgl.sampling_params import SCORE, SamplingParams
from minisgl.step import Int32Array
from minisgl.tokenizer import Tokenizer

SCORING = SamplingParams(max_tokens=1, temperature=0.0, seed=0, embedding=SCORE)


class Pairs:
    """Made once: what stands before, between and behind two texts, as the model's tokenizer says."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises `ValueError` where the tokenizer does not put two texts side by side."""
        one, other = (tokenizer.encode(text, add_special_tokens=False).tolist() for text in ("a", "b"))
        whole = tokenizer.encode_pair("a", "b").tolist()
        first = next((i for i in range(len(whole)) if whole[i : i + len(one)] == one), None)
        second = next((i for i in reversed(range(len(whole))) if whole[i : i + len(other)] == other), None)
        if first is None or second is None or not one or not other or second < first + len(one):
            raise ValueError("the tokenizer does not say how two texts stand side by side")
        parts = whole[:first], whole[first + len(one) : second], whole[second + len(other) :]
        self._before, self._between, self._behind = (np.array(part, np.int32) for part in parts)
        self.num_special = sum(map(len, parts))

    def prompt(self, one: Int32Array, other: Int32Array, most: int | None = None) -> Int32Array:
        """The ids of both, encoded without special tokens, as one prompt. Of more than `most` tokens the second text
        loses its end, and where that is not enough, the first."""
        if most is not None:
            room = max(0, most - len(self._before) - len(self._between) - len(self._behind))
            one = one[:room]
            other = other[: room - len(one)]
        return np.concatenate([self._before, one, self._between, other, self._behind])


def score(numbers: bytes) -> list[float]:
    """Of an embedding that was asked for with `SCORING`: by label."""
    found: list[float] = np.frombuffer(numbers, "<f4").astype(np.float64).tolist()
    return found
