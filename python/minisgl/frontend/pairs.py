"""Pairs of texts as one prompt, for scoring with a cross encoder or a judging language model (Qwen3-Reranker). A score
request is an embedding request with `SamplingParams.embedding` "score": it ends with its prompt, and its embedding is
the output of the model's head, one little-endian float32 per label, mostly a single logit."""

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
"""Text after both texts in the format of Qwen3-Reranker."""


def judging(instruction: str | None) -> str:
    """Return the text before both texts in the format of Qwen3-Reranker, which its model card
    (huggingface.co/Qwen/Qwen3-Reranker-0.6B) defines, as does vLLM
    (examples/pooling/score/template/qwen3_reranker.jinja). `instruction` is `None` for the card's."""
    instruct = INSTRUCTION if instruction is None else instruction
    return f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: {instruct}\n<Query>:"


def judged(query: str, document: str) -> tuple[str, str]:
    """Return both texts in that format. They are split before a space after a colon, where Qwen's tokenizer splits
    every text, so the token ids of the parts are those of the whole."""
    return f" {query}\n<Document>:", f" {document}"


class Pairs:
    """Special token ids before, between and after two texts."""

    def __init__(self, before: _Ids, between: _Ids, behind: _Ids) -> None:
        parts = before, between, behind
        self._before, self._between, self._behind = (np.array(part, np.int32) for part in parts)
        self.num_special = sum(map(len, parts))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Pairs:
        """Return the pair format of the model's tokenizer. Raises `ValueError` if it does not join two texts."""
        one, other = (tokenizer.encode(text, add_special_tokens=False).tolist() for text in ("a", "b"))
        whole = tokenizer.encode_pair("a", "b").tolist()
        first = next((i for i in range(len(whole)) if whole[i : i + len(one)] == one), None)
        second = next((i for i in reversed(range(len(whole))) if whole[i : i + len(other)] == other), None)
        if first is None or second is None or not one or not other or second < first + len(one):
            raise ValueError("the tokenizer defines no format for text pairs")
        return cls(whole[:first], whole[first + len(one) : second], whole[second + len(other) :])

    def prompt(self, one: Int32Array, other: Int32Array, most: int | None = None) -> Int32Array:
        """Join two texts' token ids, without special tokens, to one prompt. Over `most` tokens the second is truncated
        first, then the first."""
        if most is not None:
            room = max(0, most - len(self._before) - len(self._between) - len(self._behind))
            one = one[:room]
            other = other[: room - len(one)]
        return np.concatenate([self._before, one, self._between, other, self._behind])


def score(numbers: bytes) -> list[float]:
    """Return the scores, by label, from the bytes of an embedding for `SCORING`."""
    scores: list[float] = np.frombuffer(numbers, "<f4").astype(np.float64).tolist()
    return scores
