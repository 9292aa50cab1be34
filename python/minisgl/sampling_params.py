"""The sampling parameters of one request; the same object in the offline API, the messages and the engine.

Invariants: immutable, and valid once `check` has passed.
"""

from __future__ import annotations

import itertools
import json
import reprlib
from typing import Any

import msgspec


class Range(msgspec.Struct, frozen=True):
    """The range of a parameter: `least` (excluded if `is_open`) to `most` (None: no end), or `off`."""

    least: float
    most: float | None = None
    off: int | None = None
    is_open: bool = False

    def has(self, value: float) -> bool:
        above = value > self.least if self.is_open else value >= self.least
        return (above and (self.most is None or value <= self.most)) or value == self.off

    @property
    def words(self) -> str:
        least, most = f"{self.least:g}", "" if self.most is None else f"{self.most:g}"
        if self.is_open:
            return f"must be above {least} and at most {most}"
        if most:
            return f"must be between {least} and {most}"
        return f"must be {'' if self.off is None else f'{self.off} (off) or '}at least {least}"


RANGES: dict[str, Range] = {
    "max_tokens": Range(1),
    "min_tokens": Range(0),
    "temperature": Range(0, 2),
    "top_k": Range(1, off=-1),
    "top_p": Range(0, 1),
    "n": Range(1, 128),
    "logprobs": Range(0, 20),
    "prompt_logprobs": Range(0, 20),
    "min_p": Range(0, 1),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 10, is_open=True),
}
"""Range of each numeric field of `SamplingParams`, in the order of checking."""
LOGIT_BIAS = Range(-100, 100)
"""Range of the values of `logit_bias`."""


class Bounds(msgspec.Struct, frozen=True):
    """Limits on the size of one request, and answer lengths for requests that set none. The gateway gets them from the
    Python server (`server/gateway_config.py`)."""

    max_stop_strings: int = 64
    max_stop_chars: int = 4096  # characters of one stop string
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024  # token ids with a bias
    max_bad_words: int = 256
    max_bad_word_chars: int = 256  # characters of one bad word
    max_allowed_token_ids: int = 16_384
    max_values: int = 1 << 19  # JSON values of a body; more if the context has more tokens
    more_values: int = 1 << 12  # JSON values in addition to a prompt of token ids
    max_containers: int = 1 << 16  # lists, objects and fields of a body; parsed in 5 ms
    max_messages: int = 4096
    max_parts: int = 4096  # content parts of one message
    max_prompts: int = 256
    max_metadata: int = 16  # key-value pairs
    max_inputs: int = 1024  # inputs of an embeddings request
    max_choices: int = 1024  # choices of one request: prompts times n
    max_logprob_entries: int = 1 << 18  # of one request, about 20 MB of its response
    completion_tokens: int = 16  # default length at /v1/completions
    generate_tokens: int = 128  # default length at /generate


BOUNDS = Bounds()
LEAST_TEMPERATURE = 1e-5  # greedy below: float32 logits would overflow


class _Brief(reprlib.Repr):
    """A formatter for values in errors: as JSON, about 80 characters, at no more cost for large values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, str):
            return json.dumps(x[: self.maxstring], ensure_ascii=False)
        if x is None or isinstance(x, bool | float):
            return json.dumps(x)
        return super().repr1(list(x[: self.maxlist + 1]) if isinstance(x, tuple) else x, level)


_brief = _Brief()


class ParamError(ValueError):
    """A bad value in a request. The text has the field, the reason and the value, and can be sent to the client."""

    def __init__(self, field: str, value: object, reason: str, code: str | None = None) -> None:
        shown = _brief.repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"{field}: {reason} (got {shown})")
        self.field = field
        self.reason = reason
        self.code = code


POOLINGS = ("mean", "last", "cls")
"""Pooling of an embedding: the mean over all tokens, the last token, or the first token."""
SCORE = "score"
"""Value of `embedding` for a model with a score or classification head: the head's output."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request. `max_tokens` None is as many as the context leaves. `temperature` 0 is greedy
    (exact argmax), as is any below 1e-5, and `top_p` 0. `top_k` -1 is off.

    `seed` None is replaced by a random seed when the request is accepted. Before `min_tokens` generated tokens nothing
    ends the request: stop strings are ignored, and token ids that would end it are not sampled.

    Logits are changed in this order: `repetition_penalty` (prompt and output: a positive logit is divided by it, a
    negative one multiplied; Keskar et al. 2019), `frequency_penalty` times the count in the output, `presence_penalty`
    if it is in the output, `logit_bias`; then all but `allowed_token_ids` (empty: all) are masked, and ids that would
    complete one of `bad_words` or end the request before `min_tokens`, unless that masks all. Then temperature, `min_p`
    (relative to the most likely token's probability; Nguyen et al. 2024), `top_k`, `top_p`.

    `bad_words` are matched at the beginning of a text or after a space. The engine has no tokenizer: `with_bad_words`
    converts them to `bad_token_ids`, sequences that the output must not contain.

    `grammar` is a grammar of the library llguidance, as text. It masks all ids that it does not allow, before all of
    that. Only the model's own EOS ids end such a request, where the grammar ends, so neither `ignore_eos` nor
    `min_tokens` can be combined with it, nor `allowed_token_ids`: together they may mask every token.

    Logprobs are natural logarithms of the model's own distribution, before all of these changes.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # most likely tokens to report with each sampled one; None: no logprobs
    prompt_logprobs: int | None = None  # for prompt tokens but the first; computes the whole prompt
    grammar: str | None = None
    embedding: str | None = None  # return an embedding only: one of `POOLINGS`, or `SCORE`
    adapter: int = 0  # id of the LoRA adapter; 0: none

    def check(self) -> SamplingParams:
        """Return self if every field is valid. Raises `ParamError` for the first bad one."""
        need = _need
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None and not allowed.has(value):  # texts are built for errors only
                need(False, name, value, allowed.words)
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        need(fits, "min_tokens", self.min_tokens, "must not exceed max_tokens")
        need(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", self.seed, "must be a signed 64-bit integer")
        most = BOUNDS.max_stop_strings
        need(len(self.stop) <= most, "stop", self.stop, f"at most {most} stop strings")
        need(all(self.stop), "stop", self.stop, "stop strings must not be empty")
        need(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "must not be negative")
        if self.grammar is not None:
            need(not self.ignore_eos, "ignore_eos", True, "cannot stand beside a grammar: it ends there")
            reason = "cannot stand beside a grammar: it may end before"
            need(self.min_tokens == 0, "min_tokens", self.min_tokens, reason)
            reason = "cannot stand beside a grammar: together they may leave no token"
            need(not self.allowed_token_ids, "allowed_token_ids", self.allowed_token_ids, reason)
        pooling = self.embedding
        need(pooling in (None, SCORE, *POOLINGS), "embedding", pooling, f"must be one of {', '.join(POOLINGS)}")
        need(0 <= self.adapter < 2**31, "adapter", self.adapter, "must be an unsigned 31-bit integer")
        self._check_logits_processors()
        return self

    def _check_logits_processors(self) -> None:
        bias = self.logit_bias
        _need(len(bias) <= BOUNDS.max_logit_bias, "logit_bias", len(bias), f"at most {BOUNDS.max_logit_bias} token ids")
        for token, value in bias.items():
            _need(token >= 0, "logit_bias", token, "token ids must not be negative")
            _need(LOGIT_BIAS.has(value), f"logit_bias.{token}", value, LOGIT_BIAS.words)
        allowed = self.allowed_token_ids
        _need(all(token >= 0 for token in allowed), "allowed_token_ids", allowed, "must not be negative")
        words = self.bad_words
        _need(len(words) <= BOUNDS.max_bad_words, "bad_words", len(words), f"at most {BOUNDS.max_bad_words} words")
        for i, word in enumerate(words):
            fits = 0 < len(word) <= BOUNDS.max_bad_word_chars
            _need(fits, f"bad_words.{i}", word, f"must have 1 to {BOUNDS.max_bad_word_chars} characters")
        banned = self.bad_token_ids
        _need(all(ids and min(ids) >= 0 for ids in banned), "bad_token_ids", banned, "must be sequences of token ids")

    def beyond(self, vocab_size: int) -> tuple[str, int] | None:
        """Return the first (field, token id) whose id is outside of a vocabulary of `vocab_size`, or None."""
        fields = {name: getattr(self, name) for name in ("stop_token_ids", "logit_bias", "allowed_token_ids")}
        fields["bad_token_ids"] = itertools.chain.from_iterable(self.bad_token_ids)
        for name, ids in fields.items():
            for token in ids:
                if token >= vocab_size:
                    return name, token
        return None

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always chosen, without sampling."""
        return self.temperature < LEAST_TEMPERATURE or self.top_p == 0

    @property
    def depends_on_output(self) -> bool:
        """True if penalties or bad words make logits depend on the output. (A grammar does, too; not counted.)"""
        penalized = self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty
        return bool(penalized or self.bad_token_ids)

    @property
    def has_logits_processors(self) -> bool:
        """True if anything changes the logits before temperature."""
        return bool(
            self.repetition_penalty != 1.0
            or self.frequency_penalty
            or self.presence_penalty
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_token_ids
            or self.min_tokens
        )


def _need(ok: bool, field: str, value: object, reason: str) -> None:
    if not ok:
        raise ParamError(field, value, reason)


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index`: the request's `seed` plus golden-ratio steps modulo 2**64, signed."""
    return (seed + index * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
