"""Formats of a model's tool calls and reasoning, and the parsers for them. Formats and parser are in the extension
(`rust/minisgl-text/src/answer`)."""

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
    """Return the tool-call format `name`, one of `tool_call_parsers`. Raises `ValueError` for an unknown name."""
    return _rust.ToolFormat(name, template, token_id)


def thinking(name: str, template: str) -> Thinking | None:
    """Return the reasoning format `name`, one of `reasoning_parsers`; `None` if the model does not reason or the
    extension is missing. Raises `ValueError` for an unknown name."""
    return None if why_missing() else _rust.Thinking.find(name, template)


def tool_call_parsers() -> list[str]:
    """Return all names of tool-call formats, including those of other servers; without the extension only `auto`."""
    return ["auto", *(() if why_missing() else _rust.ToolFormat.names())]


def reasoning_parsers() -> list[str]:
    """Return all names of reasoning formats, with those of other servers; without the extension `auto` and `none`."""
    return ["auto", "none", *(() if why_missing() else _rust.Thinking.names())]


def answer_tools(schemas: Mapping[str, Any]) -> AnswerTools:
    """Return the tools of a request, given the JSON schemas of their parameters by name."""
    return _rust.AnswerTools(msgspec.json.encode(schemas).decode())


def new_parser(tools: ToolFormat | None, thinks: Thinking | None, known: AnswerTools | None = None) -> MessageParser:
    """Create a parser. `known` are the request's tools."""
    if tools is None and thinks is None:
        return PlainParser()
    return _rust.AnswerParser(tools, thinks, known, ids.new_id)
