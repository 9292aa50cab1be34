"""How to sample and how to answer: the fields that all generating endpoints share.

Invariants: see bodies.py; bounds that `SamplingParams.check` holds are repeated here for the page only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag

from minisgl.config import MAX_PRIORITY
from minisgl.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_STRINGS,
    ParamError,
    SamplingParams,
)
from minisgl.server import refused
from minisgl.server.fields import Body, Int64, TokenId, described, text_or_list
from minisgl.server.structured import Structured

MAX_STOP_TOKEN_IDS = 256
MAX_ALLOWED_TOKEN_IDS = 16_384

Stop = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[list[StrictStr], Field(fail_fast=True, max_length=MAX_STOP_STRINGS), Tag("<list>")],
    Discriminator(text_or_list),
]


class StreamOptions(Body):
    include_usage: StrictBool | None = described("Send one more chunk with the usage before the end of the stream.")
    continuous_usage_stats: StrictBool | None = described("With `include_usage`: tell the usage so far in each chunk.")


class Sampling(Structured):
    """What all generating endpoints share."""

    NOT_YET: ClassVar[refused.Table] = refused.SHARED
    ALIASES: ClassVar[dict[str, str]] = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}

    model: StrictStr | None = described("The served model's name; another one is 404. Missing: the served one.")
    temperature: float | None = described(
        "0 is greedy: the most likely token, the lowest id on ties.", minimum=0, maximum=2
    )
    top_p: float | None = described(
        "Sample from the fewest most likely tokens whose probabilities reach this; 0 is greedy.", minimum=0, maximum=1
    )
    top_k: Int64 | None = described("Sample from the k most likely tokens; 0 and -1: from all.", minimum=-1)
    min_p: float | None = described(
        "Leave out tokens less likely than this share of the most likely one.", minimum=0, maximum=1
    )
    seed: Int64 | None = described(
        "The same seed gives the same text, whatever else is running. Missing: a random one."
    )
    n: Int64 | None = described("Answers per prompt; the prompt is computed once.", minimum=1, maximum=MAX_N)
    max_tokens: Int64 | None = described(
        "Limit of generated tokens; the context limits them in any case, and alone if this is -1.", minimum=-1
    )
    min_tokens: Int64 | None = described(
        "Before as many tokens neither a stop string nor a stop token ends it.", minimum=0
    )
    stop: Stop | None = described(f"Up to {MAX_STOP_STRINGS} texts that end the answer; they are not part of it.")
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = described(
        "Token ids that end the answer, besides the model's own; they are not part of its text."
    )
    ignore_eos: StrictBool | None = described("Go on after the model's own end-of-sequence tokens.")
    frequency_penalty: float | None = described(
        "Taken from a token's logit for each time that the answer has it already.", minimum=-2, maximum=2
    )
    presence_penalty: float | None = described(
        "Taken from a token's logit once the answer has it.", minimum=-2, maximum=2
    )
    repetition_penalty: float | None = described(
        "Divides positive logits of tokens that prompt or answer have, multiplies negative ones. 1: off.",
        exclusiveMinimum=0,
        maximum=10,
    )
    logit_bias: Annotated[dict[StrictStr, float], Field(max_length=MAX_LOGIT_BIAS)] | None = described(
        "Token id (as a string) to a number from -100 to 100 that is added to its logit."
    )
    allowed_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = described("None but these token ids are generated.")
    bad_words: Annotated[list[StrictStr], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = described(
        "Texts that are not generated, at the beginning of a text or after a space, as the tokens that spell them."
    )
    stream: StrictBool | None = described("Send the answer as it is generated.")
    stream_options: StreamOptions | None = described("Only with `stream`.")
    truncate_prompt_tokens: Int64 | None = described(
        "Keep as many of the prompt's last tokens; -1: as many as leave room for `max_tokens`. A prompt of more than "
        "eight contexts is too long all the same.",
        minimum=-1,
    )
    return_token_ids: StrictBool | None = described(
        "Report `prompt_token_ids` and the generated `token_ids`, in a stream with each chunk."
    )
    priority: Int64 | None = described(
        "Requests with smaller numbers go first, as in vLLM; 0 by default. A step of it is worth 64 later requests.",
        minimum=-MAX_PRIORITY,
        maximum=MAX_PRIORITY,
    )
    user: StrictStr | None = described("Accepted, without effect.")
    metadata: dict[str, Any] | None = described("Accepted, without effect.")
    store: StrictBool | None = described("Accepted, without effect: nothing is stored.")

    def to_sampling(self, max_tokens: int | None, defaults: Mapping[str, Any], **asked: Any) -> SamplingParams:
        """`defaults`: of the model, for what is missing here; `asked`: fields whose names or meanings differ between
        the endpoints. Raises `ParamError`."""
        if self.stream_options is not None and not self.stream:
            raise ParamError("stream_options", None, "needs stream: true")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": -1 if self.top_k == 0 else self.top_k,
            "seed": self.seed,
            "n": self.n,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": _logit_bias(self.logit_bias),
            "allowed_token_ids": None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            "bad_words": None if self.bad_words is None else tuple(self.bad_words),
            **asked,
        }
        fields = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        fields |= {"max_tokens": max_tokens, "stop": stop, "stop_token_ids": tuple(self.stop_token_ids or ())}
        return SamplingParams(**fields).check()

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise ParamError("logit_bias", key, "keys must be token ids")
    return {int(key): value for key, value in given.items()}


def shared_fields(asked: Sampling, but_for: Collection[str]) -> dict[str, Any]:
    """Those of `asked` that every generating endpoint has, and that are given."""
    given = {name: getattr(asked, name) for name in Sampling.model_fields if name not in but_for}
    return {name: value for name, value in given.items() if value is not None}
