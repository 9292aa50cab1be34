"""The shapes of answers, for the OpenAPI page: what clients may rely on.

Tests hold real answers against them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel

FinishReason = Literal["stop", "length", "abort"]


class Answer(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Listed(Answer):
    """A page of a list, `data`."""

    object: Literal["list"]
    first_id: str
    last_id: str
    has_more: bool


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    error: ErrorDetail


class PromptTokensDetails(Answer):
    cached_tokens: int


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None  # of models that think first


class TokenLogprob(Answer):
    token: str
    logprob: float | None
    bytes: list[int]


class PromptLogprob(Answer):
    logprob: float
    decoded_token: str


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ContentLogprob]
    refusal: None


class CalledFunction(Answer):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallAnswer(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    """`content` is null beside calls alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallAnswer] | None = None  # only if there are some
    reasoning_content: str | None = None  # only of models that think first, as is `reasoning`, the same
    reasoning: str | None = None


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    token_ids: list[int] | None = None  # only with return_token_ids
    matched_stop: str | int | None = None  # only where one of the request's own stops ended it
    receipt: dict[str, Any] | None = None  # only with receipt


class ChatAnswer(Answer):
    """Streamed: server-sent events of `chat.completion.chunk` objects, `[DONE]` at the end."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None  # only with return_token_ids
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None  # only with prompt_logprobs


class TextLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    matched_stop: str | int | None = None  # only where one of the request's own stops ended it
    receipt: dict[str, Any] | None = None  # only with receipt
    token_ids: list[int] | None = None  # these two only with return_token_ids
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None  # only with prompt_logprobs


class CompletionAnswer(Answer):
    """Streamed: server-sent events of the same objects, `[DONE]` at the end."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class GenerateAnswer(Answer):
    """Streamed: JSON lines `{"text_delta": ...}`, then `{"event": "done", ...}`."""

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
    """To `text` and `input_ids`; several have a list of these. Streamed: each event has all of the text so far."""

    output_ids: list[int]
    meta_info: MetaInfo


class GenerateAnswers(RootModel[SglangAnswer | GenerateAnswer | list[SglangAnswer]]):
    """By what the prompt is called, and how many there are."""


class ModelInfo(Answer):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    served_model_name: str
    max_model_len: int
    vocab_size: int
    preferred_sampling_params: dict[str, Any] | None


class TokenPiece(Answer):
    id: int
    piece: str | list[int]


class TokenizeAnswer(Answer):
    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPiece]
    token_strs: list[str] | None = None  # only with return_token_strs


class DetokenizeAnswer(Answer):
    """`content`: the same, by llama.cpp's name."""

    prompt: str
    content: str


class EnginePrefix(Answer):
    engine: int
    state: Literal["warming", "ready", "refused", "failed"]
    hits: int


class PrefixAnswer(Answer):
    """`pages` are kept of `tokens`; `hits`: requests that found them in the cache; `reason` if it is refused."""

    id: str
    object: Literal["cache.prefix"]
    tokens: int
    pages: int
    pinned: bool
    state: Literal["warming", "ready", "refused", "failed"]
    reason: str | None = None
    hits: int
    engines: list[EnginePrefix]


class PrefixList(Answer):
    object: Literal["list"]
    data: list[PrefixAnswer]


class PrefixDeleted(Answer):
    id: str
    object: Literal["cache.prefix"]
    deleted: bool


class EngineFreed(Answer):
    engine: int
    freed_pages: int


class CacheAnswer(Answer):
    object: Literal["cache"]
    freed_pages: int
    engines: list[EngineFreed]


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Version(Answer):
    version: str


class Status(Answer):
    status: str


class Stats(Answer):
    """What both processes measured of themselves; times in seconds since the start. `engine` comes with its first
    step."""

    model: str
    simulated: str | None
    schedule_policy: str
    load: dict[str, float]
    http: dict[str, Any]
    engine: dict[str, Any] | None


class Health(Answer):
    status: str
    stats: dict[str, Any] | None = None
