"""Which formats a model has for tool calls and for what it thinks, and what takes its answers apart by them.

Formats and parser are in the extension (`rust/minisgl-text/src/answer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from minisgl.extension import _rust, why_missing
from minisgl.parsers import ids
from minisgl.parsers.api import MessageParser, PlainParser

if TYPE_CHECKING:
    from minisgl._rust import AnswerTools, Thinking, ToolFormat

TokenId = Callable[[str], int | None]


def tool_format(name: str, template: str, token_id: TokenId) -> ToolFormat:
    """`name`: of `tool_call_parsers`. Raises `ValueError`."""
    return _rust.ToolFormat(name, template, token_id)


def thinking(name: str, template: str) -> Thinking | None:
    """`name`: of `reasoning_parsers`; None: the model does not think, or nothing can take it apart from the answer
    because the extension is missing. Raises `ValueError`."""
    return None if why_missing() else _rust.Thinking.find(name, template)


def tool_call_parsers() -> list[str]:
    """Return all names, those of other servers among them; without the extension only `auto`."""
    return ["auto", *(() if why_missing() else _rust.ToolFormat.names())]


def reasoning_parsers() -> list[str]:
    """Return all names, those of other servers among them; without the extension only `auto` and `none`."""
    return ["auto", "none", *(() if why_missing() else _rust.Thinking.names())]


def answer_tools(schemas: Mapping[str, Any]) -> AnswerTools:
    """The tools of a request: the JSON schema of each one's parameters by its name."""
    return _rust.AnswerTools(msgspec.json.encode(schemas).decode())


def new_parser(tools: ToolFormat | None, thinks: Thinking | None, known: AnswerTools | None = None) -> MessageParser:
    """`known`: the request's tools."""
    if tools is None and thinks is None:
        return PlainParser()
    return _rust.AnswerParser(tools, thinks, known, ids.new_id)
