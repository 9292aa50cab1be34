"""Request bodies: the fields that are known, with their types, defaults and meanings. The OpenAPI page is made of them.

Keeps true: strict types (no "1" for 1, no true for 1); null means the default; unknown fields are ignored, those that
would change the answer elsewhere are refused (refused.py); each field has a description.
Doesn't know: the model, its vocabulary and context; how a bad body is reported (request.py).

Bounds that `SamplingParams.check` holds are repeated here for the page only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictBool, StrictInt, StrictStr, Tag

from minisgl.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRINGS,
    ParamError,
    SamplingParams,
)
from minisgl.server import refused

TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Int64 = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
T = TypeVar("T")
# the first bad item is enough: to list a million findings takes long, and the event loop stands still meanwhile
Items = Annotated[list[T], Field(fail_fast=True)]
MAX_STOP_TOKEN_IDS = 256
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of one message


def _text_or_list(value: object) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


def _prompt_kind(value: object) -> str:
    """By the first element, so that a bad one later is reported as what it should have been."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else None
    return "<texts>" if isinstance(first, str) else "<id_lists>" if isinstance(first, list) else "<ids>"


Stop = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[list[StrictStr], Field(fail_fast=True, max_length=MAX_STOP_STRINGS), Tag("<list>")],
    Discriminator(_text_or_list),
]
Prompt = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[list[StrictStr], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("<texts>")]
    | Annotated[Items[TokenId], Tag("<ids>")]
    | Annotated[list[Items[TokenId]], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("<id_lists>")],
    Discriminator(_prompt_kind),
]


def _field(description: str, **bounds: Any) -> Any:
    return Field(default=None, description=description, json_schema_extra=bounds or None)


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())

    # field -> values that ask for nothing; anything else is refused until a later version can do it
    NOT_YET: ClassVar[refused.Table] = {}


class StreamOptions(Body):
    include_usage: StrictBool | None = _field("Send one more chunk with the usage before the end of the stream.")
    continuous_usage_stats: StrictBool | None = _field("Tell the usage so far in each chunk.")


class ResponseFormat(Body):
    type: StrictStr = Field(
        description="Only `text`: structured output is refused.", json_schema_extra={"const": "text"}
    )


class Sampling(Body):
    """What all generating endpoints share."""

    NOT_YET: ClassVar[refused.Table] = refused.SHARED

    model: StrictStr | None = _field("The served model's name; another one is 404. Missing: the served one.")
    temperature: float | None = _field(
        "0 is greedy: the most likely token, the lowest id on ties.", minimum=0, maximum=2
    )
    top_p: float | None = _field(
        "Sample from the fewest most likely tokens whose probabilities reach this; 0 is greedy.", minimum=0, maximum=1
    )
    top_k: Int64 | None = _field("Sample from the k most likely tokens; 0 and -1: from all.", minimum=-1)
    min_p: float | None = _field(
        "Leave out tokens less likely than this share of the most likely one.", minimum=0, maximum=1
    )
    seed: Int64 | None = _field("The same seed gives the same text, whatever else is running. Missing: a random one.")
    n: Int64 | None = _field("Answers per prompt; the prompt is computed once.", minimum=1, maximum=MAX_N)
    max_tokens: Int64 | None = _field("Limit of generated tokens; the context limits them in any case.", minimum=0)
    min_tokens: Int64 | None = _field(
        "Before as many tokens neither a stop string nor a stop token ends it.", minimum=0
    )
    stop: Stop | None = _field(f"Up to {MAX_STOP_STRINGS} texts that end the answer; they are not part of it.")
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = _field(
        "Token ids that end the answer, besides the model's own; they are not part of its text."
    )
    ignore_eos: StrictBool | None = _field("Go on after the model's own end-of-sequence tokens.")
    frequency_penalty: float | None = _field(
        "Taken from a token's logit for each time that the answer has it already.", minimum=-2, maximum=2
    )
    presence_penalty: float | None = _field("Taken from a token's logit once the answer has it.", minimum=-2, maximum=2)
    repetition_penalty: float | None = _field(
        "Divides positive logits of tokens that prompt or answer have, multiplies negative ones. 1: off.",
        exclusiveMinimum=0,
        maximum=10,
    )
    logit_bias: Annotated[dict[StrictStr, float], Field(max_length=MAX_LOGIT_BIAS)] | None = _field(
        "Token id (as a string) to a number from -100 to 100 that is added to its logit."
    )
    allowed_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = _field("None but these token ids are generated.")
    bad_words: Annotated[list[StrictStr], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = _field(
        "Texts that are not generated, at the beginning of a text or after a space, as the tokens that spell them."
    )
    stream: StrictBool | None = _field("Send the answer as it is generated.")
    stream_options: StreamOptions | None = _field("Only with `stream`.")
    truncate_prompt_tokens: Int64 | None = _field(
        "Keep as many of the prompt's last tokens; -1: as many as leave room for `max_tokens`. A prompt of more than "
        "eight contexts is too long all the same.",
        minimum=-1,
    )
    return_token_ids: StrictBool | None = _field(
        "Report `prompt_token_ids` and the generated `token_ids`, in a stream with each chunk."
    )
    priority: Annotated[StrictInt, Field(ge=-(2**31) + 1, lt=2**31)] | None = _field(
        "Requests with smaller numbers go first; 0 by default."
    )
    user: StrictStr | None = _field("Accepted, without effect.")
    metadata: dict[str, Any] | None = _field("Accepted, without effect.")
    store: StrictBool | None = _field("Accepted, without effect: nothing is stored.")
    response_format: ResponseFormat | None = _field("Plain text is the only format.")

    def to_sampling(self, max_tokens: int | None, defaults: Mapping[str, Any], **asked: Any) -> SamplingParams:
        """`defaults`: of the model, for what is missing here; `asked`: fields whose names or meanings differ between
        the endpoints. Raises `ParamError`."""
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
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise ParamError("logit_bias", key, "keys must be token ids")
    return {int(key): value for key, value in given.items()}


class TextPart(Body):
    type: Literal["text"]
    text: StrictStr


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: StrictStr

    @property
    def text(self) -> str:
        return self.refusal


def _part_kind(value: object) -> str:
    return "<refusal>" if isinstance(value, dict) and value.get("type") == "refusal" else "<text>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")], Discriminator(_part_kind)
]
Content = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS), Tag("<list>")],
    Discriminator(_text_or_list),
]


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="`developer` is rendered as `system`."
    )
    content: Content | None = _field(
        "A text, or a list of text parts, an assistant's of refusals too; only an assistant's may be missing."
    )
    refusal: StrictStr | None = _field("An assistant's: rendered as text, after the content.")
    name: StrictStr | None = _field("For templates that show names.")
    tool_calls: Items[dict[str, Any]] | None = _field("An assistant's calls, for templates that show them.")
    tool_call_id: StrictStr | None = _field("The call that a tool's message answers.")

    @property
    def has_refusal(self) -> bool:
        parts = self.content if isinstance(self.content, list) else []
        return self.refusal is not None or any(isinstance(part, RefusalPart) for part in parts)

    def num_chars(self) -> int:
        """Of all that a template may show, about."""
        texts = [part.text for part in self.content] if isinstance(self.content, list) else [self.content]
        texts += [self.refusal, self.name, self.tool_call_id]
        of_calls = len(msgspec.json.encode(self.tool_calls)) if self.tool_calls else 0
        return sum(len(text or "") for text in texts) + of_calls

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it. They know no developer: it is the newer name of system."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        if isinstance(self.content, list):
            texts = [part.text for part in self.content] + ([self.refusal] if self.refusal else [])
            message["content"] = [{"type": "text", "text": text} for text in texts]
        else:
            message["content"] = (self.content or "") + (self.refusal or "")
        for name in ("name", "tool_calls", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class Conversation(Body):
    messages: Messages | None = _field("A conversation, rendered by the chat template.")
    add_generation_prompt: StrictBool | None = _field(
        "End the prompt with the beginning of an assistant's message; true unless `continue_final_message`."
    )
    continue_final_message: StrictBool | None = _field("The answer goes on with the last message.")
    chat_template_kwargs: dict[str, Any] | None = _field(
        "More variables for the chat template, such as Qwen's `enable_thinking`."
    )

    def template_variables(self) -> dict[str, Any]:
        """Of the request, for the chat template."""
        return self.chat_template_kwargs or {}


class ChatRequest(Sampling, Conversation):
    NOT_YET: ClassVar[refused.Table] = refused.CHAT

    messages: Messages | None = _field("The conversation.")
    prompt: StrictStr | None = _field("In place of `messages`: a text, continued as it is, without the template.")
    reasoning_effort: StrictStr | None = _field(
        "Only `none`: `enable_thinking` in `chat_template_kwargs` is false unless it is given."
    )
    max_completion_tokens: Int64 | None = _field(
        "The newer name of `max_tokens`, before which it goes. Default: the model's `max_new_tokens`, else what is "
        "left of the context.",
        minimum=1,
    )
    logprobs: StrictBool | None = _field("Report the log probability of each token of the answer.")
    top_logprobs: Int64 | None = _field(
        "Report as many most likely tokens in each place; needs `logprobs`.", minimum=0, maximum=MAX_LOGPROBS
    )

    prompt_logprobs: Int64 | None = _field(
        "The same for the prompt's tokens, as `prompt_logprobs` of the answer or of its first chunk.",
        minimum=0,
        maximum=MAX_LOGPROBS,
    )

    def num_logprobs(self) -> int | None:
        """How many alternatives to report; None for no log probabilities. Raises `ParamError`."""
        count = self.top_logprobs
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise ParamError("top_logprobs", count, f"must be between 0 and {MAX_LOGPROBS}")
        if not self.logprobs:
            if count:
                raise ParamError("top_logprobs", count, "needs logprobs to be true")
            return None
        return count or 0

    def template_variables(self) -> dict[str, Any]:
        variables = super().template_variables()
        return variables if self.reasoning_effort is None else {"enable_thinking": False, **variables}

    def limit(self) -> int | None:
        """max_completion_tokens is the newer name; None: the model's default, else what is left."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Sampling):
    NOT_YET: ClassVar[refused.Table] = refused.COMPLETION
    DEFAULT_MAX_TOKENS: ClassVar[int] = 16

    prompt: Prompt = Field(description="A text, several texts, token ids, or several lists of token ids.")
    echo: StrictBool | None = _field(
        "Begin the answer with the prompt, special tokens included; with `logprobs` its tokens are reported too. "
        "Allows `max_tokens` 0."
    )
    logprobs: Int64 | None = _field(
        "Report the log probability of each token, and as many most likely ones in its place; `top_logprobs` has the "
        "token itself too. `text_offset` are places in the text that is returned, of the character in which a token "
        "begins.",
        minimum=0,
        maximum=MAX_LOGPROBS,
    )
    prompt_logprobs: Int64 | None = _field(
        "The same for the prompt's tokens, as `prompt_logprobs` of each choice.", minimum=0, maximum=MAX_LOGPROBS
    )
    best_of: Int64 | None = _field(
        "Generate as many and return the `n` with the highest log probability per token; not in a stream.",
        minimum=1,
        maximum=MAX_N,
    )

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class GenerateSampling(Sampling):
    NOT_YET: ClassVar[refused.Table] = refused.GENERATE_SAMPLING
    # other names -> those of `Sampling`
    NAMES: ClassVar[dict[str, str]] = {
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
    }

    max_new_tokens: Int64 | None = _field("SGLang's name of `max_tokens`.", minimum=1)
    min_new_tokens: Int64 | None = _field("SGLang's name of `min_tokens`.", minimum=0)
    sampling_seed: Int64 | None = _field("SGLang's name of `seed`.")


class GenerateRequest(GenerateSampling):
    """One of `prompt`, `text` and `input_ids`. Each field of `sampling_params` may stand beside it instead."""

    NOT_YET: ClassVar[refused.Table] = refused.GENERATE
    DEFAULT_MAX_TOKENS: ClassVar[int] = 128

    prompt: StrictStr | None = _field("A text.")
    text: StrictStr | None = _field("SGLang's name of `prompt`.")
    input_ids: Items[TokenId] | None = _field("Token ids.")
    sampling_params: GenerateSampling | None = _field("How to sample; `n` must be 1.")


class TokenizeRequest(Conversation):
    """Either `prompt` or `messages`."""

    model: StrictStr | None = _field("The served model's name.")
    prompt: StrictStr | None = _field("A text.")
    add_special_tokens: StrictBool | None = _field("Add the tokenizer's special tokens to a text; true by default.")
    return_token_strs: StrictBool | None = _field("Report each token's text too.")


class DetokenizeRequest(Body):
    model: StrictStr | None = _field("The served model's name.")
    tokens: Items[TokenId] = Field(description="Token ids.")
    skip_special_tokens: StrictBool | None = _field("Leave special tokens out of the text; false by default.")
