"""Which formats a model has for tool calls and for what it thinks: those that are asked for by name, or found in its
chat template and among its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from minisgl.parsers import formats
from minisgl.parsers.answer import AnswerParser, Thinking
from minisgl.parsers.api import MessageParser, PlainParser
from minisgl.parsers.formats import PythonicParser

TokenId = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`markers`: all that its parser looks for."""

    name: str
    parser: type[AnswerParser]
    markers: tuple[str, ...] = ()


TOOL_FORMATS = {
    found.name: found
    for found in (
        ToolFormat("hermes", formats.HermesParser, (formats.TOOL_CALL, formats.TOOL_CALL_END)),
        ToolFormat("llama3_json", formats.LlamaParser, (formats.PYTHON_TAG,)),
        ToolFormat("pythonic", PythonicParser, (formats.PYTHON_TAG,)),
        ToolFormat("mistral", formats.MistralParser, (formats.TOOL_CALLS, formats.ARGS, formats.CALL_ID)),
        ToolFormat("json", formats.JsonParser),
    )
}
THINK = Thinking("<think>", "</think>")
THINKING = {
    "qwen3": THINK,
    "deepseek_r1": replace(THINK, is_open=True),  # whether or not the prompt shows that it has begun
    "mistral": Thinking("[THINK]", "[/THINK]"),
}


def tool_format(name: str, template: str, token_id: TokenId) -> ToolFormat:
    """`name`: of `TOOL_FORMATS`, or auto."""
    if name == "auto":
        name = "json"
        if formats.TOOL_CALL in template:
            name = "hermes"
        elif formats.TOOL_CALLS in template or token_id(formats.TOOL_CALLS) is not None:
            name = "mistral"
        elif formats.PYTHON_TAG in template or "Environment: ipython" in template:
            name = "llama3_json"
    return TOOL_FORMATS[name]


def thinking(name: str, template: str) -> Thinking | None:
    """`name`: of `THINKING`, none or auto."""
    if name == "auto":
        found = (one for one in (THINK, THINKING["mistral"]) if one.end in template)
        return next(found, None)
    return THINKING.get(name)


def new_parser(tools: ToolFormat | None, thinks: Thinking | None, names: frozenset[str]) -> MessageParser:
    if tools is not None:
        return tools.parser(thinks, names)
    return PlainParser() if thinks is None else AnswerParser(thinks)
