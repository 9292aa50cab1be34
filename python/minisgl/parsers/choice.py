"""Which formats a model has for tool calls and for what it thinks, and what takes its answers apart by them.

Formats and parser are in the extension (`rust/minisgl-text/src/answer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from minisgl.parsers import ids
from minisgl.parsers.api import MessageParser, PlainParser

if TYPE_CHECKING:
    from minisgl._rust import AnswerTools, Thinking, ToolFormat

TokenId = Callable[[str], int | None]


def tool_format(name: str, template: str, token_id: TokenId) -> ToolFormat:
    """`name`: of `tool_call_parsers`. Raises `ValueError`."""
    from minisgl._rust import ToolFormat

    return ToolFormat(name, template, token_id)


def thinking(name: str, template: str) -> Thinking | None:
    """`name`: of `reasoning_parsers`; None: the model does not think. Raises `ValueError`."""
    from minisgl._rust import Thinking

    return Thinking.find(name, template)


def tool_call_parsers() -> list[str]:
    """All names, those of other servers among them. Without the extension there is no text, which others tell."""
    try:
        from minisgl._rust import ToolFormat
    except ImportError:
        return ["auto"]
    return ["auto", *ToolFormat.names()]


def reasoning_parsers() -> list[str]:
    """The same."""
    try:
        from minisgl._rust import Thinking
    except ImportError:
        return ["auto", "none"]
    return ["auto", "none", *Thinking.names()]


def answer_tools(schemas: Mapping[str, Any]) -> AnswerTools:
    """The tools of a request: the JSON schema of each one's parameters by its name."""
    from minisgl._rust import AnswerTools

    return AnswerTools(msgspec.json.encode(schemas).decode())


def new_parser(tools: ToolFormat | None, thinks: Thinking | None, known: AnswerTools | None = None) -> MessageParser:
    """`known`: the request's tools."""
    if tools is None and thinks is None:
        return PlainParser()
    from minisgl._rust import AnswerParser

    return AnswerParser(tools, thinks, known, ids.new_id)
