"""From the body of POST /v1/responses to a request of the chat API.

Invariants: reasoning, text and calls that follow each other are one message of the assistant, as templates want it;
errors name the fields that the client wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.parsers import ids
from minisgl.server.bodies import ChatRequest
from minisgl.server.errors import Names, bad_value
from minisgl.server.request import checked
from minisgl.server.responses.body import (
    CallItem,
    Content,
    Item,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ReferenceItem,
    ResponsesRequest,
)
from minisgl.server.sampling_fields import shared_fields

LOGPROBS = "message.output_text.logprobs"
OWN = {"max_tokens", "n", "stream", "stream_options", "user", "metadata", "store", "response_format"}
"""Fields of the sampling that mean something else here, or nothing."""
NAMES: Names = (
    (r"messages(\..*)?", "input"),
    (r"response_format\.json_schema\.schema", "text.format.schema"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"max_completion_tokens", "max_output_tokens"),
    (r"max_tokens", "max_output_tokens"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
    (r"tool_choice\.function", "tool_choice"),
    (r"reasoning_effort", "reasoning.effort"),
)


def new_id(prefix: str) -> str:
    return f"{prefix}_{ids.new_id()}"


def to_chat(asked: ResponsesRequest, messages: Sequence[dict[str, Any]]) -> ChatRequest:
    """Raises `ApiError`."""
    fields = shared_fields(asked, OWN)
    fields["messages"] = [*_instructions(asked), *messages]
    given = {
        "max_completion_tokens": asked.max_output_tokens,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "chat_template_kwargs": asked.chat_template_kwargs,
        "response_format": _format(asked),
        **_tools(asked),
        **_logprobs(asked),
        **_reasoning(asked),
    }
    fields |= {name: value for name, value in given.items() if value is not None}
    return checked(fields, ChatRequest)


def _instructions(asked: ResponsesRequest) -> list[dict[str, Any]]:
    return [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]


def _format(asked: ResponsesRequest) -> dict[str, Any] | None:
    found = asked.text.format if asked.text else None
    if found is None or found.type == "text":
        return None
    if found.type == "json_object":
        return {"type": "json_object"}
    if found.schema_ is None:
        raise bad_value("text.format.schema", None, "required for json_schema")
    given = {"name": found.name, "strict": found.strict, "description": found.description}
    schema = {name: value for name, value in given.items() if value is not None}
    return {"type": "json_schema", "json_schema": {"name": "answer", **schema, "schema": found.schema_}}


def _tools(asked: ResponsesRequest) -> dict[str, Any]:
    tools = []
    for tool in asked.tools or ():
        given = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
        function = {name: value for name, value in given.items() if value is not None}
        tools.append({"type": "function", "function": function})
    choice: Any = asked.tool_choice
    if choice is not None and not isinstance(choice, str):
        if choice.type == "function":
            if choice.name is None:
                raise bad_value("tool_choice.name", None, "required for function")
            choice = {"type": "function", "function": {"name": choice.name}}
        else:
            tools, choice = _allowed(tools, asked), choice.mode or "auto"
    if not tools and choice == "auto":
        choice = None  # chats refuse it
    return {"tools": tools or None, "tool_choice": choice}


def _allowed(tools: list[dict[str, Any]], asked: ResponsesRequest) -> list[dict[str, Any]]:
    """Of the tools those that may be called: the model does not hear of the others."""
    assert asked.tool_choice is not None and not isinstance(asked.tool_choice, str)
    names = {one.name for one in asked.tool_choice.tools or ()}
    if unknown := names - {tool["function"]["name"] for tool in tools}:
        raise bad_value("tool_choice.tools", min(unknown), "no such function in tools")
    return [tool for tool in tools if tool["function"]["name"] in names]


def _logprobs(asked: ResponsesRequest) -> dict[str, Any]:
    if asked.top_logprobs is None and LOGPROBS not in (asked.include or ()):
        return {}
    return {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}


def _reasoning(asked: ResponsesRequest) -> dict[str, Any]:
    return {"reasoning_effort": asked.reasoning.effort if asked.reasoning else None}


# ----------------------------------------------------------------------------------------------------------- items


def kept_items(given: str | Sequence[Item]) -> list[dict[str, Any] | ReferenceItem]:
    """The input as it is kept and shown: every item with its id, but for references, still to be looked up."""
    if isinstance(given, str):
        given = [MessageItem(role="user", content=given)]
    return [item if isinstance(item, ReferenceItem) else _kept(item) for item in given]


def _kept(item: Item) -> dict[str, Any]:
    match item:
        case MessageItem():
            kind = "output_text" if item.role == "assistant" else "input_text"
            head = {"type": "message", "id": item.id or new_id("msg"), "status": "completed", "role": item.role}
            return {**head, "content": _parts(item.content, kind)}
        case CallItem():
            call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            return {"type": item.type, "id": item.id or new_id("fc"), "status": "completed", **call}
        case OutputItem():
            output = item.output if isinstance(item.output, str) else _parts(item.output, "input_text")
            head = {"type": item.type, "id": item.id or new_id("fco"), "status": "completed"}
            return {**head, "call_id": item.call_id, "output": output}
        case ReasoningItem():
            parts = {"summary": item.summary or [], "content": item.content or []}
            shown = {name: [{"type": one.type, "text": one.text} for one in found] for name, found in parts.items()}
            return {"type": "reasoning", "id": item.id or new_id("rs"), **shown}
        case _:
            raise AssertionError(f"a reference is looked up before: {item}")


def _parts(content: Content, kind: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_text_part(kind, content)]
    return [
        {"type": "refusal", "refusal": part.refusal or ""}
        if part.type == "refusal"
        else _text_part(kind, part.text or "")
        for part in content
    ]


def _text_part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def messages_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of items as they are kept, the messages of the chat API."""
    found: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}  # of the assistant, while it may have more to say

    def go_on(*unless: str) -> dict[str, Any]:
        """The assistant's message, a new one if it has any of these."""
        nonlocal answer
        if not answer or any(name in answer for name in unless):
            answer = {"role": "assistant"}
            found.append(answer)
        return answer

    for item in items:
        match item["type"], item.get("role"):
            case "reasoning", _:
                text = "".join(part["text"] for part in item["content"] or item["summary"])
                if text:
                    go_on("reasoning_content", "content", "tool_calls")["reasoning_content"] = text
            case "message", "assistant":
                go_on("content", "tool_calls")["content"] = _content(item["content"])
            case "function_call", _:
                call = {"name": item["name"], "arguments": item["arguments"]}
                calls = go_on().setdefault("tool_calls", [])
                calls.append({"id": item["call_id"], "type": "function", "function": call})
            case "function_call_output", _:
                answer = {}
                output = item["output"]
                text = (
                    output
                    if isinstance(output, str)
                    else "".join(part.get("text", part.get("refusal")) for part in output)
                )
                found.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
            case _, role:
                answer = {}
                found.append({"role": role, "content": _content(item["content"])})
    return found


def _content(parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if len(parts) == 1 and "text" in parts[0]:
        return str(parts[0]["text"])
    return [
        {"type": "text", "text": part["text"]} if "text" in part else {"type": "refusal", "refusal": part["refusal"]}
        for part in parts
    ]
