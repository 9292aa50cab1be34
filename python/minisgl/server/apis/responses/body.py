"""The body of POST /v1/responses, with OpenAI's names and sampling as in the chat API, and its response models.

Invariants: an item or a part of a type that the model cannot be shown is left out and named in a header, and so is a
tool that OpenAI's servers run; a tool of any other unsupported type is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag

from minisgl.sampling_params import BOUNDS
from minisgl.server.core import fields
from minisgl.server.core.answers import Answer, ContentLogprob, Listed
from minisgl.server.core.bodies import Receipted
from minisgl.server.core.fields import (
    Body,
    Int64,
    LeftOut,
    Picture,
    TextOr,
    TextOrParts,
    described,
    ranged,
    runs_on_servers,
    type_of,
)
from minisgl.server.core.sampling_fields import Sampling


class ResponsePart(Body):
    """Text part of a message or of a function's output, in OpenAI's Responses API."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: StrictStr | None = None
    refusal: StrictStr | None = None


class InputImage(Picture):
    type: Literal["input_image"]
    image_url: Any = described("A data URL or base64. Other URLs need `--image-hosts`.", type="string")
    detail: Any = described(
        "`low`: few tokens for the image; `high`, `auto`: as many as the model takes.", type="string"
    )
    file_id: Any = described("Refused: there are no stored images.", type="string")


TEXTS = ("input_text", "output_text", "text", "refusal")


def _part_kind(value: object) -> str:
    kind = type_of(value)
    if kind in TEXTS or not isinstance(kind, str):
        return "<text>"
    return "<image>" if kind == "input_image" else "<left out>"


Content = TextOrParts[
    Annotated[
        Annotated[ResponsePart, Tag("<text>")]
        | Annotated[InputImage, Tag("<image>")]
        | Annotated[LeftOut, Tag("<left out>")],
        Discriminator(_part_kind),
    ]
]


class MessageItem(Body):
    type: Literal["message"] | None = None
    id: StrictStr | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(Body):
    type: Literal["function_call"]
    id: StrictStr | None = None
    call_id: StrictStr
    name: StrictStr
    namespace: StrictStr | None = None
    arguments: StrictStr


class CustomCallItem(Body):
    type: Literal["custom_tool_call"]
    id: StrictStr | None = None
    call_id: StrictStr
    name: StrictStr
    namespace: StrictStr | None = None
    input: StrictStr


class ShellAction(Body):
    type: Literal["exec"] | None = None
    command: Annotated[list[StrictStr], Field(fail_fast=True, max_length=BOUNDS.max_parts)]
    env: dict[StrictStr, StrictStr] | None = None
    timeout_ms: Int64 | None = None
    user: StrictStr | None = None
    working_directory: StrictStr | None = None


class ShellCallItem(Body):
    type: Literal["local_shell_call"]
    id: StrictStr | None = None
    call_id: StrictStr | None = None
    action: ShellAction


class ShellOutputItem(Body):
    """Output of a local shell call; `id` is that of the call."""

    type: Literal["local_shell_call_output"]
    id: StrictStr
    output: StrictStr


Outputs = Literal["function_call_output", "custom_tool_call_output"]


class OutputItem(Body):
    type: Outputs
    id: StrictStr | None = None
    call_id: StrictStr
    output: Content


class UnreadItem(LeftOut):
    """Item that the model is not shown: of OpenAI's own tools, readable by them only, or of an unknown type."""

    id: StrictStr | None = None


class ReasoningPart(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: StrictStr


class ReasoningItem(Body):
    type: Literal["reasoning"]
    id: StrictStr | None = None
    summary: Annotated[list[ReasoningPart], Field(fail_fast=True, max_length=BOUNDS.max_parts)] | None = None
    content: Annotated[list[ReasoningPart], Field(fail_fast=True, max_length=BOUNDS.max_parts)] | None = None


class ReferenceItem(Body):
    """Reference by id to an item of a stored response."""

    type: Literal["item_reference"]
    id: StrictStr


_KINDS_OF_ITEMS: dict[object, str] = {
    "function_call": "<function_call>",
    "custom_tool_call": "<custom_tool_call>",
    "local_shell_call": "<local_shell_call>",
    "local_shell_call_output": "<local_shell_call_output>",
    "reasoning": "<reasoning>",
    "item_reference": "<item_reference>",
    "message": "<message>",
    **dict.fromkeys(get_args(Outputs), "<output>"),
}


def _item_kind(value: object) -> str:
    kind = type_of(value)
    says = isinstance(value, dict) and "role" in value
    if isinstance(value, dict) and kind is None and not says and "id" in value:
        return "<item_reference>"
    other = "<message>" if says else "<unread>"
    return _KINDS_OF_ITEMS.get(kind, other) if isinstance(kind, str) else "<message>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[ShellCallItem, Tag("<local_shell_call>")]
    | Annotated[ShellOutputItem, Tag("<local_shell_call_output>")]
    | Annotated[OutputItem, Tag("<output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ReferenceItem, Tag("<item_reference>")]
    | Annotated[UnreadItem, Tag("<unread>")],
    Discriminator(_item_kind),
]
Input = TextOr[Annotated[list[Item], Field(fail_fast=True, max_length=BOUNDS.max_messages)]]


class ResponseTool(Body):
    type: Literal["function"]
    name: StrictStr
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class CustomFormat(Body):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: StrictStr | None = None


class CustomTool(Body):
    """Custom tool of OpenAI's Responses API, whose input is text instead of JSON arguments."""

    type: Literal["custom"]
    name: StrictStr
    description: StrictStr | None = None
    format: CustomFormat | None = None


class HostedTool(LeftOut):
    """Tool that only OpenAI's servers run; the model is not shown it."""


def _tool_kind(value: object) -> str:
    kind = type_of(value)
    return "<hosted>" if runs_on_servers(kind) else f"<{kind}>" if kind in ("custom", "namespace") else "<function>"


Functions = Annotated[
    Annotated[ResponseTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    Discriminator(lambda value: "<custom>" if _tool_kind(value) == "<custom>" else "<function>"),
]


class NamespaceTool(Body):
    type: Literal["namespace"]
    name: StrictStr
    description: StrictStr | None = None
    tools: Annotated[list[Functions], Field(fail_fast=True, max_length=BOUNDS.max_messages)]


AnyTool = Annotated[
    Annotated[ResponseTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(_tool_kind),
]


class ResponseToolName(Body):
    type: Literal["function", "custom"]
    name: StrictStr
    namespace: StrictStr | None = None


AllowedTool = Annotated[
    Annotated[ResponseToolName, Tag("<function>")] | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(lambda value: "<hosted>" if _tool_kind(value) == "<hosted>" else "<function>"),
]


class ResponseToolChoice(Body):
    type: Literal["function", "custom", "allowed_tools"]
    name: StrictStr | None = None
    namespace: StrictStr | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedTool], Field(fail_fast=True, max_length=BOUNDS.max_messages)] | None = None


class ResponseTextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: StrictStr | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None
    description: StrictStr | None = None


class ResponseText(Body):
    format: ResponseTextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseReasoning(Body):
    effort: StrictStr | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(Sampling, Receipted):
    """Body of POST /v1/responses. Fields of the chat API that change sampling may be used with OpenAI's own."""

    NOT_YET: ClassVar[fields.Table] = fields.RESPONSES
    IGNORED: ClassVar[fields.Table] = {name: fields.IGNORED[name] for name in ("max_tool_calls", "stream_options")}
    ALIASES: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("n_predict", "num_predict", "max_completion_tokens"), "max_output_tokens"),
        "repeat_penalty": "repetition_penalty",
        "stop_sequences": "stop",
    }

    input: Input | None = described(
        "A text, or a list of items: messages, `reasoning`, `function_call`, `custom_tool_call`, `local_shell_call`, "
        "their outputs, and `item_reference` to an item of a stored answer. The model is not shown others, such as "
        "those of OpenAI's own tools and its compactions; the header `X-Minisgl-Ignored` names them."
    )
    instructions: StrictStr | None = described(
        "A system message before all others; it does not apply to later answers."
    )
    previous_response_id: StrictStr | None = described("Continues from the input and output of that stored answer.")
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=BOUNDS.max_messages)] | None = described(
        "Functions, `custom` tools and `namespace`s of both, which the model may call. Tools that only OpenAI's "
        "servers run are left out; the header `X-Minisgl-Ignored` names them."
    )
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<text>")]
            | Annotated[ResponseToolChoice, Tag("<object>")],
            Discriminator(lambda value: "<object>" if isinstance(value, dict) else "<text>"),
        ]
        | None
    ) = described("`none`, `auto`, `required`, a function, a custom tool, or `allowed_tools`.")
    parallel_tool_calls: StrictBool | None = described("Allow several calls in one answer; true by default.")
    text: ResponseText | None = described(
        "`format`: `text`, `json_object` or `json_schema`; `verbosity` as in the chat API."
    )
    reasoning: ResponseReasoning | None = described("`effort` as `reasoning_effort` in the chat API.")
    max_output_tokens: Int64 | None = described("Limit of generated tokens, reasoning included.", minimum=1)
    max_tool_calls: Int64 | None = described("Without effect: it limits built-in tools, and there are none.")
    top_logprobs: Int64 | None = ranged("logprobs", "Report this many most likely tokens at each position of the text.")
    include: list[StrictStr] | None = described(
        "`message.output_text.logprobs` reports log probabilities; other values have no effect."
    )
    truncation: Literal["auto", "disabled"] | None = described(
        "`auto` drops the oldest messages of a conversation that is too long. By default that is an error."
    )
    store: StrictBool | None = described("Keep the answer for `previous_response_id` and `GET`; true by default.")
    background: StrictBool | None = described("Only false: there is no background mode.")
    metadata: Annotated[dict[StrictStr, StrictStr], Field(max_length=BOUNDS.max_metadata)] | None = described(
        f"Up to {BOUNDS.max_metadata} texts by name, returned in the answer."
    )
    user: StrictStr | None = described("Returned in the answer, without effect.")
    safety_identifier: StrictStr | None = described("Returned in the answer, without effect.")
    prompt_cache_key: StrictStr | None = described(
        "Returned in the answer, without effect: the cache finds prefixes by itself."
    )
    chat_template_kwargs: dict[str, Any] | None = described("More variables for the chat template.")


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ContentLogprob]


class OutputMessage(Answer):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class OutputCall(Answer):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["completed", "incomplete"]


class OutputCustomCall(Answer):
    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    name: str
    input: str


class OutputReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Answer):
    type: Literal["reasoning"]
    id: str
    summary: list[dict[str, Any]]
    content: list[OutputReasoningText]
    status: Literal["completed", "incomplete"]


class InputTokensDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class ResponseAnswer(Answer):
    """Response object. A stream's events run from `response.created` to `.completed`, `.incomplete` or `.failed`."""

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
    output: list[OutputMessage | OutputCall | OutputCustomCall | OutputReasoning]
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
    receipt: dict[str, Any] | None = None  # only with receipt


class ResponseDeleted(Answer):
    id: str
    object: Literal["response"]
    deleted: bool


class InputTokens(Answer):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(Listed):
    data: list[dict[str, Any]]
