"""Request bodies of a workload: made-up text with the right number of tokens for an unknown tokenizer.

The tokens of a text of common words grow linearly with its words. Two probes of the server give the line (tokens per
word, and what the chat template adds), which converts token counts to word counts. This works with any
OpenAI-compatible server that reports its usage.
Invariants: equal keys give equal text whose beginning does not depend on its length; bodies are JSON, encoded once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import msgspec
import numpy as np

from minisgl.bench.workloads import Key, LoadRequest, MadeUp, Message
from minisgl.config import ConfigError

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PROBES = (16, 256)  # words

# each a single token with its space in the usual vocabularies
_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said what "
    "its about than into them can only other time new some could these two may first then do any like my now over "
    "such our man me even most made after also did many off before must well back through years where much your "
    "way down should because long each just state those people too right good very work house school world still "
    "life under last both country night again never water small high same part place old great own found against "
    "city program music family"
)
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Line:
    """A linear estimate for a single message: num_tokens = overhead + per_word * words."""

    overhead: float = 0.0
    per_word: float = 1.0

    def words(self, num_tokens: float) -> int:
        return max(1, round(num_tokens / self.per_word))


def probe(count: Callable[[int], int]) -> Line:
    """Return the line through two values of `count(words)`, the tokens that the server counted in a prompt of `words`
    words. Raises `ConfigError`."""
    (few, many), (low, high) = PROBES, (count(PROBES[0]), count(PROBES[1]))
    if high <= low:
        raise ConfigError(
            f"the server counts {low} tokens in {few} words and {high} in {many}: prompt lengths cannot be controlled"
        )
    per_word = (high - low) / (many - few)
    return Line(max(0.0, low - few * per_word), per_word)


class Renderer:
    def __init__(
        self,
        model: str,
        endpoint: Endpoint,
        line: Line,
        extra: Mapping[str, Any] | None = None,
        context: int | None = None,
    ) -> None:
        """Create a renderer. `extra`: fields of every body; `context`: tokens of a prompt with its answer at most."""
        self.context = context
        self._endpoint = endpoint
        self._line = line
        self._fixed = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **(extra or {})}

    def body(self, request: LoadRequest) -> bytes:
        body: dict[str, Any] = {**self._fixed, "max_tokens": request.output_len}
        # the template's tokens are subtracted from the last message
        texts = [
            self._text(one, self._line.overhead if one is request.messages[-1] else 0.0) for one in request.messages
        ]
        if self._endpoint == "chat":
            roles = [message.role for message in request.messages]
            body["messages"] = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        else:
            body["prompt"] = "\n\n".join(texts)
        return msgspec.json.encode(body)

    def _text(self, message: Message, taken_off: float) -> str:
        """Render a message with `taken_off` fewer tokens. Parts are rounded together, so that many short ones add up;
        tokens are taken off the end, so that shared beginnings stay equal."""
        whole = sum(part.num_tokens for part in message.parts if isinstance(part, MadeUp))
        limit = self._line.words(whole - taken_off)
        texts, tokens, num_words = list[str](), 0, 0
        for part in message.parts:
            if isinstance(part, str):
                texts.append(part)
                continue
            tokens += part.num_tokens
            upto = min(limit, self._line.words(tokens))
            if upto > num_words:
                texts.append(words(part.key, upto - num_words))
                num_words = upto
        return " ".join(texts)


def words(key: Key, count: int) -> str:
    """Return the first `count` words of the text named `key`."""
    return " ".join(_words(key, 1 << max(6, (count - 1).bit_length()))[:count])


@lru_cache(maxsize=4096)
def _words(key: Key, count: int) -> tuple[str, ...]:
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest())
    drawn = np.random.default_rng(seed).random(count)  # one by one, so that a longer text has the same beginning
    return tuple(WORDS[i] for i in (drawn * len(WORDS)).astype(int))
