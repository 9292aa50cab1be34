"""Response models of OpenAI's API and of vLLM's additions, for the OpenAPI page. Tests check real responses against
them."""

from __future__ import annotations

from typing import Any, Literal

from minisgl.server.core.answers import Answer, ContentLogprob, FinishReason, Usage


class PromptLogprob(Answer):
    logprob: float
    decoded_token: str


class ChatLogprobs(Answer):
    content: list[ContentLogprob]
    refusal: None


class CalledFunction(Answer):
    """Function call; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallAnswer(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    """Message of the assistant. `content` is null if there are only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallAnswer] | None = None  # only if there are some
    reasoning_content: str | None = None  # only of reasoning models; `reasoning` is equal
    reasoning: str | None = None


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    token_ids: list[int] | None = None  # only with return_token_ids
    matched_stop: str | int | None = None  # stop string or token id that ended the choice
    receipt: dict[str, Any] | None = None  # only with receipt


class ChatAnswer(Answer):
    """Chat completion. A stream has server-sent events of `chat.completion.chunk` objects, with `[DONE]` at the end."""

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
    matched_stop: str | int | None = None  # stop string or token id that ended the choice
    receipt: dict[str, Any] | None = None  # only with receipt
    token_ids: list[int] | None = None  # this and the next only with return_token_ids
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None  # only with prompt_logprobs


class CompletionAnswer(Answer):
    """Completion. A stream has server-sent events of such objects, with `[DONE]` at the end."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TokenPiece(Answer):
    id: int
    piece: str | list[int]


class TokenizeAnswer(Answer):
    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPiece]
    token_strs: list[str] | None = None  # only with return_token_strs


class DetokenizeAnswer(Answer):
    """Text of token ids; `content` equals `prompt`, by llama.cpp's name."""

    prompt: str
    content: str


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int
    vision: bool | None = None  # true if the model sees images


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class EmbeddingObject(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # str if `encoding_format` is base64


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Answer):
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
