"""How the model's answers are taken apart: its formats of tool calls and of what it thinks, found once.

Invariants: where a marker is one of the tokenizer's special tokens, which are no text, the parser's requests have it
shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from minisgl.parsers.answer import Thinking
from minisgl.parsers.choice import ToolFormat, thinking, tool_format
from minisgl.step import Int32Array
from minisgl.tokenizer import Tokenizer

NUM_LAST = 16  # ids of a prompt in which a marker is looked for


class Parsing:
    """`tool_call_parser`, `reasoning_parser`: names, or auto."""

    def __init__(self, tokenizer: Tokenizer, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser

    @cached_property
    def tool_format(self) -> ToolFormat:
        source = self._tokenizer.template_source(tools=True)
        return tool_format(self._tool_call_parser, source, self._tokenizer.token_id)

    @cached_property
    def thinking(self) -> Thinking | None:
        return thinking(self._reasoning_parser, self._tokenizer.template_source())

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the chat template does."""
        return "tools" in self._tokenizer.template_variables(tools=True)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Of the chat template."""
        return self._tokenizer.template_variables()

    def thinking_after(self, prompt: Int32Array, continued: str | None) -> Thinking | None:
        """For the answer to `prompt`, which may have opened or closed it. `continued`: the message that the answer
        goes on with."""
        found = self.thinking
        if found is None:
            return None
        if continued:
            is_open = continued.rfind(found.begin) > continued.rfind(found.end)
            return replace(found, is_open=True) if is_open else None
        last = self._tokenizer.decode(prompt[-NUM_LAST:].tolist(), skip_special_tokens=False).rstrip()
        if last.endswith(found.begin):
            return replace(found, is_open=True)
        return replace(found, is_open=False) if last.endswith(found.end) else found

    def shown(self, markers: Iterable[str]) -> frozenset[int]:
        """The special tokens among them."""
        ids = (self._tokenizer.token_id(marker) for marker in markers)
        return frozenset(i for i in ids if i is not None) & self._tokenizer.special_ids
