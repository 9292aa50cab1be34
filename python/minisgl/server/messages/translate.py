"""From the bodies of Anthropic's API to a request of the chat API.

Invariants: errors name the fields that the client wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.server.bodies import ChatRequest
from minisgl.server.errors import Names, bad_value
from minisgl.server.messages.body import (
    AnthropicConversation,
    AnthropicMessage,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from minisgl.server.request import checked
from minisgl.server.sampling_fields import shared_fields

OWN = {"stop", "n", "stream", "stream_options", "user", "metadata", "store", "response_format"}
"""Fields of the sampling that mean something else here, or nothing."""
NAMES: Names = (
    (r"messages(\..*)?", "messages"),  # tools' results became messages of their own
    (r"response_format\.json_schema\.schema", "output_config.format.schema"),
    (r"response_format(\.json_schema)?", "output_config.format"),
    (r"tools\.(\d+)\.function\.parameters", r"tools.\1.input_schema"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
    (r"tool_choice\.function", "tool_choice"),
    (r"stop", "stop_sequences"),
)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(asked: AnthropicConversation) -> ChatRequest:
    """Raises `ApiError`."""
    fields: dict[str, Any] = {}
    if isinstance(asked, MessagesRequest):
        fields = shared_fields(asked, OWN)
        if stop := [*(asked.stop_sequences or ()), *_list(asked.stop)]:
            fields["stop"] = stop
    fields["messages"] = [*_system(asked), *(one for message in asked.messages for one in _messages(message))]
    given = {
        "continue_final_message": True if asked.messages[-1].role == "assistant" else None,
        "chat_template_kwargs": asked.chat_template_kwargs,
        "response_format": _format(asked),
        **_tools(asked),
        **_thinking(asked),
    }
    fields |= {name: value for name, value in given.items() if value is not None}
    return checked(fields, ChatRequest)


def _list(stop: str | Sequence[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else [*(stop or ())]


def _system(asked: AnthropicConversation) -> list[dict[str, Any]]:
    return [] if asked.system is None else [{"role": "system", "content": _text(asked.system, "\n")}]


def _text(content: str | Sequence[TextBlock], between: str = "") -> str:
    return content if isinstance(content, str) else between.join(block.text for block in content)


def _messages(message: AnthropicMessage) -> list[dict[str, Any]]:
    """Of the assistant one; of a user one for each result of a tool, and one for the rest."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts = [{"type": "text", "text": block.text} for block in message.content if isinstance(block, TextBlock)]
    found: dict[str, Any] = {"role": message.role, "content": texts[0]["text"] if len(texts) == 1 else texts or None}
    if message.role == "assistant":
        if thoughts := [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]:
            found["reasoning_content"] = "".join(thoughts)
        for block in message.content:
            if isinstance(block, ToolUseBlock):
                call = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
                found.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": call})
            elif isinstance(block, ToolResultBlock):
                raise bad_value("messages", block.type, "only a user's message has results of tools")
        return [found]
    for block in message.content:
        if isinstance(block, ToolUseBlock | ThinkingBlock):
            raise bad_value("messages", block.type, "only an assistant's message has such a block")
    results = [_result(block) for block in message.content if isinstance(block, ToolResultBlock)]
    return results + ([found] if texts or not results else [])


def _result(block: ToolResultBlock) -> dict[str, Any]:
    text = _text(block.content or "")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": f"Error: {text}" if block.is_error else text}


def _format(asked: AnthropicConversation) -> dict[str, Any] | None:
    found = (asked.output_config and asked.output_config.format) or asked.output_format
    if found is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": found.schema_, "strict": True}}


def _tools(asked: AnthropicConversation) -> dict[str, Any]:
    tools = []
    for tool in asked.tools or ():
        given = {"name": tool.name, "description": tool.description, "strict": tool.strict}
        function = {name: value for name, value in given.items() if value is not None}
        tools.append({"type": "function", "function": {**function, "parameters": tool.input_schema}})
    found: dict[str, Any] = {"tools": tools or None}
    if (choice := asked.tool_choice) is not None:
        if choice.type == "tool":
            if choice.name is None:
                raise bad_value("tool_choice.name", None, "required for tool")
            found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        elif tools:
            found["tool_choice"] = CHOICES[choice.type]
        elif choice.type == "any":
            raise bad_value("tool_choice", choice.type, "needs tools")
        if choice.disable_parallel_tool_use:
            found["parallel_tool_calls"] = False
    return found


def _thinking(asked: AnthropicConversation) -> dict[str, Any]:
    return {"reasoning_effort": "none"} if asked.thinking and asked.thinking.type == "disabled" else {}
