"""Bodies of POST /v1/messages and /v1/messages/count_tokens, with Anthropic's names; sampling as in the chat API.

Invariants: a block of a type that the model cannot be shown is left out and named in a header, and so is a tool that
Anthropic's servers run; a tool of any other unsupported type is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag

from minisgl.sampling_params import BOUNDS
from minisgl.server.core import fields
from minisgl.server.core.answers import Answer
from minisgl.server.core.bodies import Receipted
from minisgl.server.core.fields import Body, Int64, LeftOut, Picture, TextOrParts, described, runs_on_servers, type_of
from minisgl.server.core.sampling_fields import Sampling


class TextBlock(Body):
    type: Literal["text"]
    text: StrictStr


Texts = TextOrParts[TextBlock]


class ImageBlock(Picture):
    type: Literal["image"]
    source: Any = described(
        "`base64` with `data`, or `url` with a `url`, which needs `--image-hosts` unless it is a data URL.",
        type="object",
    )


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: StrictStr


class RedactedBlock(Body):
    """Redacted thinking, which is not shown to the model."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: StrictStr
    name: StrictStr
    input: dict[str, Any]


Result = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")] | Annotated[LeftOut, Tag("<left out>")],
    Discriminator(lambda value: _kind(value, ("image",))),
]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: StrictStr
    content: TextOrParts[Result] | None = None
    is_error: StrictBool | None = None


_KINDS = ("image", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _kind(value: object, kinds: Sequence[str]) -> str:
    kind = type_of(value)
    if kind in kinds or kind == "text" or not isinstance(kind, str):
        return f"<{kind}>" if kind in kinds else "<text>"
    return "<left out>"


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[LeftOut, Tag("<left out>")],
    Discriminator(lambda value: _kind(value, _KINDS)),
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


AnyTool = Annotated[
    Annotated[AnthropicTool, Tag("<custom>")] | Annotated[LeftOut, Tag("<left out>")],
    Discriminator(lambda value: "<left out>" if runs_on_servers(type_of(value)) else "<custom>"),
]


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
    """Fields that the bodies of /v1/messages and /v1/messages/count_tokens share."""

    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=BOUNDS.max_messages)] = (
        Field(
            description="The conversation: texts, or lists of `text`, `image`, `thinking`, `tool_use` and "
            "`tool_result` blocks. Other blocks, for most models images too, are left out; a note stands in their "
            "place, and the header `X-Minisgl-Ignored` names them. "
            "The answer continues an assistant message at its end."
        )
    )
    system: Texts | None = described("A system message before all others.")
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=BOUNDS.max_messages)] | None = described(
        "Tools that the model may call. Tools that Anthropic's servers run are left out; the header "
        "`X-Minisgl-Ignored` names them."
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
    """Body of POST /v1/messages. Fields of the chat API that change sampling may be used with Anthropic's own."""

    NOT_YET: ClassVar[fields.Table] = fields.MESSAGES
    IGNORED: ClassVar[fields.Table] = {**Sampling.IGNORED, "stream_options": fields.IGNORED["stream_options"]}
    ALIASES: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("n_predict", "num_predict", "max_output_tokens", "max_completion_tokens"), "max_tokens"),
        "repeat_penalty": "repetition_penalty",
    }

    max_tokens: Int64 = Field(
        description="Limit of generated tokens. 0: the prompt is computed for the cache, and the answer is empty.",
        json_schema_extra={"minimum": 0},
    )
    stop_sequences: Annotated[list[StrictStr], Field(fail_fast=True, max_length=BOUNDS.max_stop_strings)] | None = (
        described(f"Up to {BOUNDS.max_stop_strings} texts that end the answer; `stop_sequence` says which one did.")
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
    """Token counts. `input_tokens` excludes tokens that were cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Answer):
    """Message of a complete response. A stream has server-sent events, from `message_start` to `message_stop`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerThinking | AnswerToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage
    receipt: dict[str, Any] | None = None  # if `receipt` is set; a stream has it in `message_delta`


class TokenCount(Answer):
    input_tokens: int


class AnthropicErrorDetail(Answer):
    """Anthropic's error. `details`: for a refused `thread`, so that clients send the whole conversation instead."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorAnswer(Answer):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str
