"""The shapes of answers of /v1/responses, for the OpenAPI page."""

from __future__ import annotations

from typing import Any, Literal

from minisgl.server.answers import ContentLogprob, _Answer


class OutputText(_Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ContentLogprob]


class OutputMessage(_Answer):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class OutputCall(_Answer):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["completed", "incomplete"]


class OutputReasoningText(_Answer):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(_Answer):
    type: Literal["reasoning"]
    id: str
    summary: list[dict[str, Any]]
    content: list[OutputReasoningText]
    status: Literal["completed", "incomplete"]


class InputTokensDetails(_Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(_Answer):
    reasoning_tokens: int


class ResponseUsage(_Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(_Answer):
    reason: Literal["max_output_tokens"]


class ResponseAnswer(_Answer):
    """Streamed: named server-sent events, `response.created` first and `response.completed`, `.incomplete` or `.failed`
    last."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall | OutputReasoning]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage


class ResponseDeleted(_Answer):
    id: str
    object: Literal["response"]
    deleted: bool


class InputTokens(_Answer):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(_Answer):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool
