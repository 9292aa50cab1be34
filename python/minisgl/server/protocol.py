"""Request bodies: what is accepted, with which types and defaults.

Keeps true: strict types (no "1" for 1, no true for 1); null means the default; unknown fields are ignored; a known
field that this version cannot honour is refused unless its value asks for nothing.
Doesn't know: the model, its vocabulary and context.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic_core
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    Tag,
    ValidationError,
)

from minisgl.sampling_params import MAX_LOGPROBS, ParamError, SamplingParams
from minisgl.server.errors import ApiError, bad_value

TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Int64 = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
T = TypeVar("T")
# the first bad item is enough: to list a million findings takes long, and the event loop stands still meanwhile
Items = Annotated[list[T], Field(fail_fast=True)]
MAX_STOP_TOKEN_IDS = 256


def _text_or_list(value: object) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


def _prompt_kind(value: object) -> str:
    """By the first element, so that a bad one later is reported as what it should have been."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else None
    return "<texts>" if isinstance(first, str) else "<id_lists>" if isinstance(first, list) else "<ids>"


Stop = Annotated[
    Annotated[StrictStr, Tag("<text>")] | Annotated[Items[StrictStr], Tag("<list>")], Discriminator(_text_or_list)
]
Prompt = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[Items[StrictStr], Tag("<texts>")]
    | Annotated[Items[TokenId], Tag("<ids>")]
    | Annotated[Items[Items[TokenId]], Tag("<id_lists>")],
    Discriminator(_prompt_kind),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())

    # field -> values that ask for nothing; anything else is refused until a later version can do it
    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {}


class StreamOptions(_Body):
    include_usage: StrictBool | None = None


class ResponseFormat(_Body):
    type: StrictStr


class _Sampling(_Body):
    """What chat and text completions share."""

    model: StrictStr | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    seed: Int64 | None = None
    n: Int64 | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: StrictBool | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[StrictStr, float] | None = None  # by token id, which JSON spells as a string
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[StrictInt, Field(ge=-(2**31) + 1, lt=2**31)] | None = None
    user: StrictStr | None = None
    metadata: dict[str, Any] | None = None
    store: StrictBool | None = None
    response_format: ResponseFormat | None = None

    def sampling_params(self, max_tokens: int | None, **asked: Any) -> SamplingParams:
        """`asked`: fields whose names or meanings differ between the endpoints. Raises `ParamError`."""
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
            **asked,
        }
        return SamplingParams(
            max_tokens=max_tokens,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            **{name: value for name, value in given.items() if value is not None},
        ).check()

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise ParamError("logit_bias", key, "keys must be token ids")
    return {int(key): value for key, value in given.items()}


_NOT_YET: dict[str, tuple[Any, ...]] = {
    "regex": (),
    "json_schema": (),
    "ebnf": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
}


class TextPart(_Body):
    type: Literal["text"]
    text: StrictStr


Content = Annotated[
    Annotated[StrictStr, Tag("<text>")] | Annotated[Items[TextPart], Tag("<list>")], Discriminator(_text_or_list)
]


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: StrictStr | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_call_id: StrictStr | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it. They know no developer: it is the newer name of system."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        if isinstance(self.content, list):
            message["content"] = [{"type": "text", "text": part.text} for part in self.content]
        else:
            message["content"] = self.content or ""
        for name in ("name", "tool_calls", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message


class ChatRequest(_Sampling):
    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_NOT_YET,
        "tools": ([],),
        "tool_choice": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "audio": (),
    }

    messages: Items[ChatMessage]
    max_completion_tokens: Int64 | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Int64 | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

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

    def limit(self) -> int | None:
        """max_completion_tokens is the newer name; None: what is left of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(_Sampling):
    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_NOT_YET,
        "suffix": ("",),
    }
    DEFAULT_MAX_TOKENS: ClassVar[int] = 16

    prompt: Prompt
    echo: StrictBool | None = None
    logprobs: Int64 | None = None
    prompt_logprobs: Int64 | None = None
    best_of: Int64 | None = None

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class GenerateSampling(_Sampling):
    """`max_new_tokens` is SGLang's name for max_tokens."""

    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = _NOT_YET
    max_new_tokens: Int64 | None = None


class GenerateRequest(_Body):
    DEFAULT_MAX_TOKENS: ClassVar[int] = 128

    prompt: StrictStr | None = None
    input_ids: Items[TokenId] | None = None
    sampling_params: GenerateSampling | None = None
    stream: StrictBool | None = None


class TokenizeRequest(_Body):
    """Either `prompt` or `messages`."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Items[ChatMessage] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: StrictBool | None = None


class DetokenizeRequest(_Body):
    model: StrictStr | None = None
    tokens: Items[TokenId]
    skip_special_tokens: StrictBool | None = None


B = TypeVar("B", bound=_Body)


def parse(body: bytes, model: type[B]) -> B:
    """Bytes to a checked body; every failure is an `ApiError` 400 that names the field."""
    try:
        data = pydantic_core.from_json(body)  # NaN is let in here, for the field that holds it to be named
    except ValueError as error:
        raise ApiError(400, f"body: not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, f"body: must be a JSON object, not {type(data).__name__}", code="invalid_json")
    _refuse_not_yet(data, model)
    if isinstance(inner := data.get("sampling_params"), dict):
        _refuse_not_yet(inner, GenerateSampling, "sampling_params.")
    try:
        found = model.model_validate(data)
    except ValidationError as error:
        raise _explain(error) from error
    _check_response_format(found)
    return found


def _check_response_format(body: _Body) -> None:
    found = body.sampling_params if isinstance(body, GenerateRequest) else body
    if isinstance(found, _Sampling) and found.response_format and found.response_format.type != "text":
        reason = "only 'text' is supported by this version: structured output is not"
        raise bad_value("response_format", found.response_format.type, reason, "unsupported_value")


def _refuse_not_yet(data: dict[str, Any], model: type[_Body], prefix: str = "") -> None:
    for field, nothing in model.NOT_YET.items():
        value = data.get(field)
        if value is not None and not any(value == one and type(value) is type(one) for one in nothing):
            raise bad_value(prefix + field, value, "not supported by this version", "unsupported_value")


def _explain(error: ValidationError) -> ApiError:
    """Pydantic's first finding, under the name that clients know."""
    found = error.errors(include_url=False, include_context=False)[0]
    # the tags of unions are in the path too; they are no identifiers
    field = ".".join(str(part) for part in found["loc"] if isinstance(part, int) or part.isidentifier()) or "body"
    if found["type"] == "missing":
        return ApiError(400, f"{field}: required", param=field, code="missing_required_parameter")
    return bad_value(field, found["input"], found["msg"][0].lower() + found["msg"][1:])


__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerateRequest",
    "ParamError",
    "TokenizeRequest",
    "parse",
]
