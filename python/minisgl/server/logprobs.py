"""Log probabilities in OpenAI's two shapes: chat's list of tokens, completions' parallel lists.

Keeps true: every token has its bytes; a token that is no whole text is shown in a way that no other token shares.
Doesn't know: where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from minisgl.server.generation import ScoredToken
from minisgl.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[ScoredToken]) -> dict[str, Any]:
    """`choices[].logprobs` of chat: {"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    content = [
        {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*one) for one in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of completions, piece by piece: text offsets go on from one piece to the next."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def piece(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """{tokens, token_logprobs, top_logprobs, text_offset} of these tokens, in characters of the text so far."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._advance(token.token_id)
        return {
            "tokens": [self._text(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {self._text(token_id): logprob for token_id, logprob in token.top}
                if token.logprob is not None
                else None
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def _advance(self, token_id: int) -> None:
        """Characters are counted where they begin, so that a token inside of one has its character's offset + 1.
        Special tokens are no text."""
        if not self._tokenizer.is_special(token_id):
            self._offset += sum(byte & 0xC0 != 0x80 for byte in self._tokenizer.token_bytes(token_id))

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer, token_id)


def prompt_logprobs(tokenizer: Tokenizer, tokens: Iterable[ScoredToken]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token its own entry and the most likely ones, by id; the first has
    none."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"logprob": logprob, "decoded_token": token_text(tokenizer, token_id)}

    return [
        None
        if token.logprob is None
        else {str(one): entry(one, logprob) for one, logprob in ((token.token_id, token.logprob), *token.top)}
        for token in tokens
    ]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text, or its bytes spelled out where they are no whole text, as OpenAI shows them."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
