"""Tools of POST /v1/responses: their conversion to function tools, and of function calls to response items.

Invariants: to the model a tool in a namespace, or one with text input, is a function like any other; its call has the
name, namespace and type that the client knows. Errors name the tool's place in the client's body.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic_core

from minisgl.server.apis.responses.body import (
    CustomTool,
    HostedTool,
    NamespaceTool,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
    ResponseToolName,
)
from minisgl.server.core.errors import Names, bad_value
from minisgl.server.core.fields import present

INPUT = "input"
"""Name of the only argument of a custom tool."""
INPUT_SCHEMA = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
SHELL = "local_shell"


def flat_name(name: str, namespace: str | None) -> str:
    """Return the function name of a tool in a namespace, flattened as Codex does."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def custom_arguments(text: str) -> str:
    """Return the JSON arguments of a custom tool's call for its text input."""
    return msgspec.json.encode({INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """Return the text input in a custom call's JSON arguments, even if incomplete; else the raw arguments."""
    try:
        decoded = pydantic_core.from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = decoded.get(INPUT, "") if isinstance(decoded, dict) else None
    return text if isinstance(text, str) else arguments


@dataclass(frozen=True, slots=True)
class GivenTool:
    """A tool as the client defined it. `place`: its path in the body, such as "tools.0"."""

    place: str
    tool: ResponseTool | CustomTool
    namespace: str | None = None
    about: str | None = None  # description of the namespace, shown with its first tool

    @property
    def is_custom(self) -> bool:
        return isinstance(self.tool, CustomTool)

    @property
    def name(self) -> str:
        """Function name by which the model is shown the tool: flattened, with its namespace."""
        return flat_name(self.tool.name, self.namespace)

    def for_chat(self) -> dict[str, Any]:
        tool = self.tool
        given: dict[str, Any] = {"name": self.name, "description": self._description()}
        if isinstance(tool, CustomTool):
            given["parameters"] = INPUT_SCHEMA
        else:
            given |= {"parameters": tool.parameters, "strict": tool.strict}
        return {"type": "function", "function": present(given)}

    def _description(self) -> str | None:
        parts = [self.tool.description] if self.tool.description is not None else []
        if self.about:
            parts.append(f"Of all tools whose names begin like this one's: {self.about}")
        form = self.tool.format if isinstance(self.tool, CustomTool) else None
        if form is not None and form.definition:
            parts.append(f"The {INPUT} follows this grammar ({form.syntax or 'lark'}):\n{form.definition}")
        return "\n\n".join(parts) if parts else None

    def call(self, call_id: str, arguments: str) -> dict[str, Any]:
        """Return the Responses API's item for a call of this tool, without item id and status."""
        where = {} if self.namespace is None else {"namespace": self.namespace}
        head = {"call_id": call_id, "name": self.tool.name, **where}
        if self.is_custom:
            return {"type": "custom_tool_call", **head, INPUT: custom_input(arguments)}
        return {"type": "function_call", **head, "arguments": arguments}


class GivenTools:
    """All tools of a request and its tool choice."""

    def __init__(self, body: ResponsesRequest) -> None:
        given = list(_given(body))
        self._choice = body.tool_choice
        self.by_name = {one.name: one for one in given}
        self.shown = self._allowed(given)
        self.names: Names = [
            (rf"tools\.{i}\.function", one.place) for i, one in enumerate(self.shown) if one.place != f"tools.{i}"
        ]
        """Renamings of error fields for tools whose index in the chat request differs from the body."""

    def _allowed(self, given: list[GivenTool]) -> list[GivenTool]:
        """Return the tools that may be called; the model sees no others. Raises `ApiError` 400 for an unknown name."""
        choice = self._choice
        if choice is None or isinstance(choice, str) or choice.type != "allowed_tools":
            return given
        listed = [one for one in choice.tools or () if isinstance(one, ResponseToolName)]
        names = {flat_name(one.name, one.namespace) for one in listed}
        if unknown := names - self.by_name.keys():
            raise bad_value("tool_choice.tools", min(unknown), "must be the name of one of the tools")
        return [one for one in given if one.name in names]

    def for_chat(self) -> dict[str, Any]:
        """Return the fields `tools` and `tool_choice` of the chat request."""
        tools = [one.for_chat() for one in self.shown]
        choice: Any = self._choice
        if isinstance(choice, ResponseToolChoice):
            choice = choice.mode or "auto" if choice.type == "allowed_tools" else _named(choice)
        if not tools and choice == "auto":
            choice = None  # the chat API refuses "auto" without tools
        return {"tools": tools or None, "tool_choice": choice}


def _named(choice: ResponseToolChoice) -> dict[str, Any]:
    if choice.name is None:
        raise bad_value("tool_choice.name", None, f"required for {choice.type}")
    return {"type": "function", "function": {"name": flat_name(choice.name, choice.namespace)}}


def _given(body: ResponsesRequest) -> Iterator[GivenTool]:
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, NamespaceTool):
            about = tool.description
            for j, inner in enumerate(tool.tools):
                yield GivenTool(f"tools.{i}.tools.{j}", inner, tool.name, None if j else about)
        elif not isinstance(tool, HostedTool):
            yield GivenTool(f"tools.{i}", tool)
