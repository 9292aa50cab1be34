"""Response models for the OpenAPI page: the fields that clients may rely on.

Tests check real responses against them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "abort"]


class Answer(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=(), defer_build=True)


class Listed(Answer):
    """Page of a list; the items are in `data`."""

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
    image_tokens: int | None = None  # only of a prompt with images


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None  # only of reasoning models


class TokenLogprob(Answer):
    token: str
    logprob: float | None
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]
