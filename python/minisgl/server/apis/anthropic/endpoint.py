"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's bodies become chat requests; the output becomes a
message of blocks, or a stream of events.

Invariants: errors name the fields that the client wrote; the joined deltas of a block equal the block of a complete
response.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from minisgl.frontend.output_processor import Delta
from minisgl.parsers import ids
from minisgl.server.apis.anthropic.body import (
    AnthropicConversation,
    AnthropicMessage,
    Block,
    CountTokensRequest,
    ImageBlock,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from minisgl.server.core.bodies import ChatRequest
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import ApiError, Names, bad_value, renamed, renamed_field
from minisgl.server.core.fields import LeftOut, Place, present
from minisgl.server.core.formatter import json_response, receipt_field
from minisgl.server.core.generation import Generation
from minisgl.server.core.history import History, plain
from minisgl.server.core.request import HttpRequest, checked
from minisgl.server.core.sampling_fields import shared_fields
from minisgl.server.core.sections import Change, Closed, Grown, Opened, Section
from minisgl.server.core.streams import EVENT_PING, sse
from minisgl.server.core.turn import SectionFormatter, Turn, chat_turn

OWN = {"stop", "n", "stream", "stream_options", "user", "metadata", "store", "response_format"}
"""Sampling fields that are not copied to the chat request, because they differ or do not exist here."""
NAMES: Names = (
    (r"messages(\..*)?", "messages"),  # tool results became messages of their own
    (r"response_format\.json_schema\.schema", "output_config.format.schema"),
    (r"response_format(\.json_schema)?", "output_config.format"),
    (r"tools\.(\d+)\.function\.parameters", r"tools.\1.input_schema"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
    (r"tool_choice\.function", "tool_choice"),
    (r"stop", "stop_sequences"),
    (r"thinking_budget", "thinking.budget_tokens"),
    (r"reasoning_effort", "output_config.effort"),
)
_BILLING_LINES = re.compile(r"\A(?:x-anthropic-billing-header:.*(?:\n|\Z))+", re.ASCII | re.IGNORECASE)
"""Billing headers that agents put at the beginning of a system prompt."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: AnthropicConversation) -> ChatRequest:
    """Convert an Anthropic body into a chat request. Raises `ApiError`."""
    fields: dict[str, Any] = {}
    if isinstance(body, MessagesRequest):
        fields = shared_fields(body, OWN)
        if stop := [*(body.stop_sequences or ()), *_list(body.stop)]:
            fields["stop"] = stop
    places = (f"messages.{i}.content" for i in range(len(body.messages)))
    messages = map(_messages, body.messages, places)
    fields["messages"] = [*_system(body), *itertools.chain.from_iterable(messages)]
    given = {
        "continue_final_message": True if body.messages[-1].role == "assistant" else None,
        "chat_template_kwargs": body.chat_template_kwargs,
        "response_format": _format(body),
        **_tools(body),
        **_thinking(body),
    }
    fields |= present(given)
    return checked(fields, ChatRequest)


def _list(stop: str | Sequence[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else [*(stop or ())]


def _system(body: AnthropicConversation) -> list[dict[str, Any]]:
    if body.system is None:
        return []
    given = _text(body.system, "\n")
    text = _BILLING_LINES.sub("", given)
    return [{"role": "system", "content": text}] if text or not given else []


def _text(content: str | Sequence[TextBlock], between: str = "") -> str:
    return content if isinstance(content, str) else between.join(block.text for block in content)


def _messages(message: AnthropicMessage, place: str = "") -> list[dict[str, Any]]:
    """Convert one message, with its content at `place`, into messages of the chat API: for a user one per tool result,
    and one for the rest; for an assistant as many as its blocks need to keep their order."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return _answer(message.content)
    for block in message.content:
        if isinstance(block, ToolUseBlock | ThinkingBlock):
            raise bad_value("messages", block.type, "only an assistant message may have such a block")
    blocks = [(block, f"{place}.{i}") for i, block in enumerate(message.content)]
    results = [_result(block, at) for block, at in blocks if isinstance(block, ToolResultBlock)]
    texts = [_part(block, at) for block, at in blocks if isinstance(block, TextBlock | LeftOut)]
    content = plain(texts) if texts else None
    return results + ([{"role": message.role, "content": content}] if texts or not results else [])


def _answer(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    history = History()
    for block in blocks:
        match block:
            case TextBlock() | LeftOut():
                history.say([_part(block)], may_append=True)
            case ThinkingBlock():
                history.reason(block.thinking, may_append=True)
            case ToolUseBlock():
                call = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
                history.call({"id": block.id, "type": "function", "function": call})
            case ToolResultBlock():
                raise bad_value("messages", block.type, "only a user message may have tool results")
    return history.done() or [{"role": "assistant", "content": None}]


def _result(block: ToolResultBlock, place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "tool", "tool_call_id": block.tool_use_id}
    if isinstance(block.content, list) and any(isinstance(one, LeftOut) for one in block.content):
        error = [{"type": "text", "text": "Error:"}] if block.is_error else []
        parts = [_part(one, f"{place}.content.{i}") for i, one in enumerate(block.content)]
        return {**message, "content": [*error, *parts]}
    text = block.content if isinstance(block.content, str) else "".join(one.text for one in block.content or ())
    return {**message, "content": f"Error: {text}" if block.is_error else text}


def _part(block: TextBlock | LeftOut, place: str = "") -> dict[str, Any]:
    """Convert a block into a part of the chat API. Documents and search results become their texts; other types keep
    their type, and the chat leaves them out."""
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    if isinstance(block, ImageBlock):
        source = block.source if isinstance(block.source, dict) else {}
        given = {"base64": source.get("data"), "url": source.get("url")}.get(str(source.get("type")), block.source)
        return {"type": "image", "image_url": given, "place": Place(f"{place}.source")}
    text = "\n".join(_texts_in(block.model_extra or {}))
    shows = text and block.type in ("document", "search_result")
    return {"type": "text", "text": text} if shows else {"type": block.type}


def _texts_in(block: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a document or a search result."""
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    inner = source.get("content") or block.get("content")
    body = source.get("data") if source.get("type") == "text" else inner
    listed = body if isinstance(body, list) else [{"text": body}]
    texts = [text for one in listed if isinstance(one, dict) and isinstance(text := one.get("text"), str) and text]
    for name in ("title", "context") if texts else ():
        if isinstance(text := block.get(name), str) and text:
            yield text
    yield from texts


def _check_results(messages: Sequence[AnthropicMessage]) -> None:
    """Check that every tool result belongs to a call before it. Raises `ApiError`."""
    calls = set[str]()
    for i, message in enumerate(messages):
        for j, block in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(block, ToolUseBlock):
                calls.add(block.id)
            elif isinstance(block, ToolResultBlock) and block.tool_use_id not in calls:
                name = f"messages.{i}.content.{j}.tool_use_id"
                raise bad_value(name, block.tool_use_id, "no tool_use block before it has this id")


def _format(body: AnthropicConversation) -> dict[str, Any] | None:
    output_format = (body.output_config and body.output_config.format) or body.output_format
    if output_format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": output_format.schema_, "strict": True}}


def _tools(body: AnthropicConversation) -> dict[str, Any]:
    tools: list[dict[str, Any]] = []
    for tool in body.tools or ():
        if isinstance(tool, LeftOut):
            tools.append({"type": tool.type})
            continue
        function = present({"name": tool.name, "description": tool.description, "strict": tool.strict})
        tools.append({"type": "function", "function": {**function, "parameters": tool.input_schema}})
    fields: dict[str, Any] = {"tools": tools or None}
    if (choice := body.tool_choice) is not None:
        if choice.type == "tool":
            if choice.name is None:
                raise bad_value("tool_choice.name", None, "required for tool")
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        elif any("function" in tool for tool in tools):
            fields["tool_choice"] = CHOICES[choice.type]
        elif choice.type == "any":
            raise bad_value("tool_choice", choice.type, "needs tools")
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    return fields


def _thinking(body: AnthropicConversation) -> dict[str, Any]:
    if body.thinking is not None and body.thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    return {
        "reasoning_effort": body.output_config and body.output_config.effort,
        "thinking_budget": body.thinking and body.thinking.budget_tokens,
    }


class MessagesFormatter(SectionFormatter):
    def __init__(self, context: ServerContext, body: MessagesRequest, turn: Turn) -> None:
        super().__init__(context, turn, body.stream, body.priority)
        model_name = context.served.check(body.model)
        self._head = {"id": f"msg_{ids.new_id()}", "type": "message", "role": "assistant", "model": model_name}
        self._has_begun = False

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        self.changes(choices[0])
        content = [_block(section) for section in self._sections.whole()]
        end = {**self._stop(generation), "usage": _usage(generation), **receipt_field(generation, 0)}
        return {**self._head, "content": content, **end}

    def _stop(self, generation: Generation) -> dict[str, Any]:
        matched = generation.matched_stop(0)
        if matched is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        called = "tool_use" if self._choice.calls_tools else "end_turn"
        reason = "max_tokens" if self._choice.finish_reason == "length" else called
        return {"stop_reason": reason, "stop_sequence": None}

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        frames = []
        if not self._has_begun:
            self._has_begun = True
            begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            message = {**self._head, **begun, "usage": {**_usage(generation), "output_tokens": 0}}
            frames += [_event("message_start", message=message), EVENT_PING]
        for delta in deltas:
            frames += map(_frame, self.changes(delta))
        return b"".join(frames)

    def ping(self) -> bytes:
        return EVENT_PING

    def end(self, generation: Generation) -> bytes:
        more = receipt_field(generation, 0)
        delta = _event("message_delta", delta=self._stop(generation), usage=_usage(generation), **more)
        return delta + _event("message_stop")

    def error(self, error: ApiError) -> bytes:
        return _event(**error.anthropic_body())


def _usage(generation: Generation) -> dict[str, Any]:
    given: dict[str, Any] = generation.usage()
    cached = given["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": given["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": given["completion_tokens"],
    }


def _event(type: str, **fields: Any) -> bytes:
    return sse({"type": type, **fields}, type)


def _block(section: Section) -> dict[str, Any]:
    if section.kind == "call":
        return {"type": "tool_use", "id": section.call_id, "name": section.name, "input": section.arguments}
    if section.kind == "reasoning":
        return {"type": "thinking", "thinking": section.text, "signature": ""}
    return {"type": "text", "text": section.text}


def _frame(change: Change) -> bytes:
    section = change.section
    if isinstance(change, Opened):
        begun = _block(Section(section.index, section.kind, section.call_id, section.name))
        return _event("content_block_start", index=section.index, content_block=begun)
    if isinstance(change, Grown):
        return _event("content_block_delta", index=section.index, delta=_delta(section, change.text))
    assert isinstance(change, Closed)
    return _event("content_block_stop", index=section.index)


def _delta(section: Section, text: str) -> dict[str, str]:
    if section.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    if section.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


async def messages_endpoint(context: ServerContext, body: MessagesRequest, request: HttpRequest) -> MessagesFormatter:
    turn = await _turn(context, body, request)
    turn.ignored = tuple(renamed_field(NAMES, name) if "." in name else name for name in turn.ignored)
    return MessagesFormatter(context, body, turn)


async def count_tokens_endpoint(context: ServerContext, body: CountTokensRequest, request: HttpRequest) -> Response:
    """Count the tokens of a conversation, cached ones included, as POST /v1/messages would."""
    turn = await _turn(context, body, request, only_counts=True)
    return json_response({"input_tokens": len(turn.prompts[0])})


async def _turn(
    context: ServerContext, body: AnthropicConversation, request: HttpRequest, *, only_counts: bool = False
) -> Turn:
    await context.prompts.run_work(lambda: _check_results(body.messages), request.is_large)
    with renamed(NAMES):
        chat = await context.prompts.run_work(lambda: to_chat(body), request.is_large)
        return await chat_turn(context, chat, least_tokens=0, only_counts=only_counts)
