"""The shapes of answers, for the OpenAPI page: what clients may rely on.

Tests hold real answers against them.
Doesn't know: how answers are made; they are written as plain dicts, which is faster.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "abort"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorDetail(_Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Answer):
    error: ErrorDetail


class PromptTokensDetails(_Answer):
    cached_tokens: int


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(_Answer):
    token: str
    logprob: float | None
    bytes: list[int]


class PromptLogprob(_Answer):
    logprob: float
    decoded_token: str


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Answer):
    content: list[ContentLogprob]
    refusal: None


class AssistantMessage(_Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None  # only with return_token_ids


class ChatAnswer(_Answer):
    """Streamed: server-sent events of `chat.completion.chunk` objects, `[DONE]` at the end."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None  # only with return_token_ids
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None  # only with prompt_logprobs


class TextLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None  # these two only with return_token_ids
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None  # only with prompt_logprobs


class CompletionAnswer(_Answer):
    """Streamed: server-sent events of the same objects, `[DONE]` at the end."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class GenerateAnswer(_Answer):
    """Streamed: JSON lines `{"text_delta": ...}`, then `{"event": "done", ...}`."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    prompt_token_ids: list[int] | None = None  # only with return_token_ids


class TokenizeAnswer(_Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None  # only with return_token_strs


class DetokenizeAnswer(_Answer):
    prompt: str


class ModelCard(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(_Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Version(_Answer):
    version: str


class Status(_Answer):
    status: str


class Stats(_Answer):
    """What both processes measured of themselves; times in seconds since the start. `engine` comes with its first
    step."""

    model: str
    simulated: str | None
    http: dict[str, Any]
    engine: dict[str, Any] | None


class Health(_Answer):
    status: str
    stats: dict[str, Any] | None = None
