"""The shapes of answers of /v1/messages, for the OpenAPI page."""

from __future__ import annotations

from typing import Any, Literal

from minisgl.server.answers import _Answer


class AnswerText(_Answer):
    type: Literal["text"]
    text: str


class AnswerThinking(_Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnswerToolUse(_Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(_Answer):
    """`input_tokens` are those that were not in the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(_Answer):
    """Streamed: server-sent events, `message_start` first and `message_stop` last."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerThinking | AnswerToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(_Answer):
    input_tokens: int


class AnthropicErrorDetail(_Answer):
    """`details`: of a refused `thread`, so that clients send the whole conversation instead."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorAnswer(_Answer):
    type: Literal["error"]
    error: AnthropicErrorDetail
