"""Two texts as one prompt, which a cross encoder makes a score of, or a language model that judges: Qwen3-Reranker.

A request for a score is one for an embedding with `SamplingParams.embedding` "score": it ends with its prompt, and its
embedding is what the model's head gives, a number for each of its labels, as little-endian float32: mostly one logit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl.sampling_params import SCORE, SamplingParams
from minisgl.step import Int32Array
from minisgl.tokenizer import Tokenizer

SCORING = SamplingParams(max_tokens=1, temperature=0.0, seed=0, embedding=SCORE)


_Ids = Sequence[int] | Int32Array
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
JUDGED = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""What stands behind both texts where a model judges them."""


def judging(instruction: str | None) -> str:
    """What stands before both texts of Qwen3-Reranker, whose model card (huggingface.co/Qwen/Qwen3-Reranker-0.6B) has
    the form, as has vLLM (examples/pooling/score/template/qwen3_reranker.jinja). `instruction`: None: the card's."""
    asked = INSTRUCTION if instruction is None else instruction
    return f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: {asked}\n<Query>:"


def judged(query: str, document: str) -> tuple[str, str]:
    """Both texts as they are in that form. It is cut where Qwen's tokenizer cuts any text, before a space behind a
    colon, so the ids of the parts are those of the whole."""
    return f" {query}\n<Document>:", f" {document}"


class Pairs:
    """What stands before, between and behind two texts."""

    def __init__(self, before: _Ids, between: _Ids, behind: _Ids) -> None:
        parts = before, between, behind
        self._before, self._between, self._behind = (np.array(part, np.int32) for part in parts)
        self.num_special = sum(map(len, parts))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Pairs:
        """As the model's tokenizer says. Raises `ValueError` where it does not put two texts side by side."""
        one, other = (tokenizer.encode(text, add_special_tokens=False).tolist() for text in ("a", "b"))
        whole = tokenizer.encode_pair("a", "b").tolist()
        first = next((i for i in range(len(whole)) if whole[i : i + len(one)] == one), None)
        second = next((i for i in reversed(range(len(whole))) if whole[i : i + len(other)] == other), None)
        if first is None or second is None or not one or not other or second < first + len(one):
            raise ValueError("the tokenizer does not say how two texts stand side by side")
        return cls(whole[:first], whole[first + len(one) : second], whole[second + len(other) :])

    def prompt(self, one: Int32Array, other: Int32Array, most: int | None = None) -> Int32Array:
        """The ids of both, encoded without special tokens, as one prompt. Of more than `most` tokens the second text
        loses its end, and where that is not enough, the first."""
        if most is not None:
            room = max(0, most - len(self._before) - len(self._between) - len(self._behind))
            one = one[:room]
            other = other[: room - len(one)]
        return np.concatenate([self._before, one, self._between, other, self._behind])


def score(numbers: bytes) -> list[float]:
    """The scores, by label, in the bytes of an embedding that was asked for with `SCORING`."""
    found: list[float] = np.frombuffer(numbers, "<f4").astype(np.float64).tolist()
    return found
