"""The bodies of POST /v1/messages and /v1/messages/count_tokens: Anthropic's names; sampling as in the chat API.

Invariants: a block or a tool of a kind that is not done here is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag

from minisgl.sampling_params import BOUNDS
from minisgl.server import fields
from minisgl.server.answers import Answer
from minisgl.server.bodies import Receipted
from minisgl.server.fields import Body, Int64, TextOrParts, described
from minisgl.server.sampling_fields import Sampling


class TextBlock(Body):
    type: Literal["text"]
    text: StrictStr


Texts = TextOrParts[TextBlock]


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: StrictStr


class RedactedBlock(Body):
    """Says nothing to this model."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: StrictStr
    name: StrictStr
    input: dict[str, Any]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: StrictStr
    content: Texts | None = None
    is_error: StrictBool | None = None


_KINDS = ("thinking", "redacted_thinking", "tool_use", "tool_result")


def _block_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in _KINDS else "<text>"


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(_block_kind),
]
Content = TextOrParts[Block]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Content


class AnthropicTool(Body):
    type: Literal["custom"] | None = None
    name: StrictStr
    description: StrictStr | None = None
    input_schema: dict[str, Any]
    strict: StrictBool | None = None


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: StrictStr | None = None
    disable_parallel_tool_use: StrictBool | None = None


class AnthropicThinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int64 | None = None


class AnthropicFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class AnthropicOutputConfig(Body):
    format: AnthropicFormat | None = None
    effort: StrictStr | None = None


class AnthropicConversation(Body):
    """What both have."""

    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=BOUNDS.max_messages)] = (
        Field(
            description="The conversation: texts, or lists of `text`, `thinking`, `tool_use` and `tool_result` blocks. "
            "The answer continues an assistant message at its end."
        )
    )
    system: Texts | None = described("A system message before all others.")
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True, max_length=BOUNDS.max_messages)] | None = described(
        "Tools that the model may call."
    )
    tool_choice: AnthropicToolChoice | None = described("`auto`, `any`, `tool` with its `name`, or `none`.")
    thinking: AnthropicThinking | None = described(
        "`disabled` turns thinking off if the chat template can. `budget_tokens` ends it."
    )
    output_config: AnthropicOutputConfig | None = described(
        "`format`: `json_schema` with a `schema`. `effort` as `reasoning_effort` in the chat API."
    )
    output_format: AnthropicFormat | None = described("The older name of `output_config.format`.")
    chat_template_kwargs: dict[str, Any] | None = described("More variables for the chat template.")


class MessagesRequest(Sampling, Receipted, AnthropicConversation):
    """Fields of the chat API that change how tokens are chosen may stand beside Anthropic's own."""

    NOT_YET: ClassVar[fields.Table] = fields.MESSAGES

    max_tokens: Int64 = Field(description="Limit of generated tokens.", json_schema_extra={"minimum": 1})
    stop_sequences: Annotated[list[StrictStr], Field(fail_fast=True, max_length=BOUNDS.max_stop_strings)] | None = (
        described(f"Up to {BOUNDS.max_stop_strings} texts that end the answer; `stop_sequence` says which one did.")
    )
    context_management: dict[str, Any] | None = described(
        "Accepted, without effect: the prompt has the whole conversation. The header `X-Minisgl-Ignored` names it."
    )


class CountTokensRequest(AnthropicConversation):
    NOT_YET: ClassVar[fields.Table] = fields.OF_CONVERSATION

    model: StrictStr | None = described("The served model's name; any other is 404. Default: the served model.")


class AnswerText(Answer):
    type: Literal["text"]
    text: str


class AnswerThinking(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnswerToolUse(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(Answer):
    """`input_tokens` are those that were not in the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Answer):
    """Streamed: server-sent events, `message_start` first and `message_stop` last."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerThinking | AnswerToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage
    receipt: dict[str, Any] | None = None  # only with receipt; of a stream in `message_delta`


class TokenCount(Answer):
    input_tokens: int


class AnthropicErrorDetail(Answer):
    """`details`: of a refused `thread`, so that clients send the whole conversation instead."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorAnswer(Answer):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str
