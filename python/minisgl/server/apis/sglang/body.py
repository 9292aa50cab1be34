"""Request and response bodies of POST /generate and of SGLang's other routes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, RootModel, StrictBool, StrictStr, Tag

from minisgl.sampling_params import BOUNDS, RANGES, ParamError
from minisgl.server.core import fields
from minisgl.server.core.answers import Answer, FinishReason, Usage
from minisgl.server.core.bodies import ModelBody, Texts, prompt_kind
from minisgl.server.core.fields import Int64, Items, TokenId, described, ranged
from minisgl.server.core.sampling_fields import Sampling

Ids = Annotated[
    Annotated[Items[TokenId], Tag("<ids>")]
    | Annotated[list[Items[TokenId]], Field(fail_fast=True, max_length=BOUNDS.max_prompts), Tag("<id_lists>")],
    Discriminator(lambda value: "<id_lists>" if prompt_kind(value) == "<id_lists>" else "<ids>"),
]


class GenerateSampling(Sampling):
    NOT_YET: ClassVar[fields.Table] = fields.GENERATE_SAMPLING
    # SGLang's name -> the name in `Sampling`
    NAMES: ClassVar[dict[str, str]] = {
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
    }

    max_new_tokens: Int64 | None = described("SGLang's name of `max_tokens`.", minimum=-1)
    min_new_tokens: Int64 | None = described("SGLang's name of `min_tokens`.", minimum=0)
    sampling_seed: Int64 | None = described("SGLang's name of `seed`.")


class GenerateRequest(GenerateSampling):
    """Body with one of `prompt`, `text` and `input_ids`. Fields of `sampling_params` may be at the top level, too."""

    NOT_YET: ClassVar[fields.Table] = fields.GENERATE

    prompt: StrictStr | None = described("A text.")
    text: Texts | None = described("SGLang's: a text, or several. The answer has SGLang's form.")
    input_ids: Ids | None = described("SGLang's: token ids, or several lists of them. The answer has SGLang's form.")
    sampling_params: (
        Annotated[
            Annotated[GenerateSampling, Tag("<object>")]
            | Annotated[
                list[GenerateSampling],
                Field(fail_fast=True, min_length=1, max_length=BOUNDS.max_prompts),
                Tag("<list>"),
            ],
            Discriminator(lambda value: "<list>" if isinstance(value, list) else "<object>"),
        ]
        | None
    ) = described(
        "Sampling parameters; with `prompt`, `n` must be 1. SGLang's: a list, one for each prompt; `n`, `stream` and "
        "what is reported must be the same in all."
    )
    rid: StrictStr | None = described("SGLang's: the `id` of the answer's `meta_info`.")
    return_logprob: StrictBool | None = described(
        "SGLang's: adds `output_token_logprobs` to `meta_info`, a triple of log probability, id and text "
        "for each token of the text. Not with `prompt`."
    )
    top_logprobs_num: Int64 | None = ranged(
        "logprobs",
        "With `return_logprob`: report this many most likely tokens at each position, as `output_top_logprobs`.",
    )
    logprob_start_len: Int64 | None = described(
        "With `return_logprob`: report the prompt's tokens from this position on, too, as "
        "`input_token_logprobs` and `input_top_logprobs`; -1, the default: none.",
        minimum=-1,
    )
    return_text_in_logprobs: StrictBool | None = described(
        "With `return_logprob`: put texts into the triples instead of null."
    )

    @property
    def from_prompt(self) -> int | None:
        """Index of the first prompt token whose log probability is reported; `None`: none is."""
        start = -1 if self.logprob_start_len is None else self.logprob_start_len
        return start if self.return_logprob and start >= 0 else None

    def logprob_fields(self) -> dict[str, int]:
        """Return the fields of log probabilities for `SamplingParams`. Raises `ParamError`."""
        for name, least in (("top_logprobs_num", 0), ("logprob_start_len", -1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ParamError(name, value, f"must be at least {least}")
        count = self.top_logprobs_num or 0
        if not RANGES["logprobs"].has(count):
            raise ParamError("top_logprobs_num", count, RANGES["logprobs"].words)
        if not self.return_logprob:
            return {}
        if self.prompt is not None:
            raise ParamError("return_logprob", True, "needs text or input_ids, as SGLang's answer does")
        return {"logprobs": count} | ({} if self.from_prompt is None else {"prompt_logprobs": count})


class AbortGenerate(ModelBody):
    rid: StrictStr | None = described(
        "End the requests to POST /generate with this `rid` (those with `text` or `input_ids`)."
    )
    abort_all: StrictBool | None = described("End all such requests of the caller's API key.")


class GenerateAnswer(Answer):
    """Completion of a `prompt`. A stream has JSON lines `{"text_delta": ...}`, then `{"event": "done", ...}`."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    prompt_token_ids: list[int] | None = None  # only with return_token_ids


class MetaInfo(Answer):
    id: str
    finish_reason: dict[str, Any] | None  # {type, matched} or {type, length}
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float


class SglangAnswer(GenerateAnswer):
    """Completion of `text` or `input_ids`; several prompts give a list. Each event of a stream has the whole text."""

    output_ids: list[int]
    meta_info: MetaInfo


class GenerateAnswers(RootModel[SglangAnswer | GenerateAnswer | list[SglangAnswer]]):
    """Response of `/generate`; its shape depends on the prompt's field, and on the number of prompts."""


class ModelInfo(Answer):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    served_model_name: str
    max_model_len: int
    vocab_size: int
    preferred_sampling_params: dict[str, Any] | None
