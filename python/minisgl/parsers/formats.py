"""The formats in which models write tool calls.

Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, also with a list in it. Llama 3:
`{"name": ..., "parameters": {...}}` at the beginning or after `<|python_tag|>`. Mistral: `[TOOL_CALLS]` and a list of
objects, in newer models a name, `[ARGS]` and an object. Models without a format of their own are told to write plain
JSON. Pythonic calls have a file of their own.
"""

from __future__ import annotations

import string
from collections.abc import Callable

from minisgl.parsers import ids
from minisgl.parsers.answer import AnswerParser, Thinking
from minisgl.parsers.growing import Waits

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MISTRAL_ID = string.ascii_letters + string.digits


class HermesParser(AnswerParser):
    def _content(self) -> Waits[None]:
        while (yield from self._until((TOOL_CALL,), self._text.push)) is not None:
            held = self._hold(len(TOOL_CALL))
            if (yield from self._calls(held)):
                yield from self._space(held)
                if (yield from self._comes(TOOL_CALL_END)):
                    self._take(len(TOOL_CALL_END))
                    held.clear()
                self._give_back(held)


class JsonParser(AnswerParser):
    """An answer that begins with `{` may be a call, if it names a tool."""

    def _content(self) -> Waits[None]:
        held: list[str] = []
        yield from self._space(held)
        yield from self._calls(held, known=True)
        yield from self._rest()

    def _rest(self) -> Waits[None]:
        yield from self._until((), self._text.push)


class LlamaParser(JsonParser):
    def _rest(self) -> Waits[None]:
        while (yield from self._until((PYTHON_TAG,), self._text.push)) is not None:
            yield from self._calls(self._hold(len(PYTHON_TAG)))


def mistral_id() -> str:
    """Templates of Mistral refuse ids of other lengths."""
    return ids.new_id(9, _MISTRAL_ID)


class MistralParser(AnswerParser):
    def __init__(
        self,
        thinking: Thinking | None = None,
        names: frozenset[str] = frozenset(),
        new_id: Callable[[], str] = mistral_id,
    ) -> None:
        super().__init__(thinking, names, new_id)

    def _content(self) -> Waits[None]:
        while (yield from self._until((TOOL_CALLS,), self._text.push)) is not None:
            held = self._hold(len(TOOL_CALLS))
            yield from self._space(held)
            char = yield from self._peek()
            if char and char in "[{":
                yield from self._calls(held)
            elif not (yield from self._named(held)):
                self._give_back(held)

    def _named(self, held: list[str]) -> Waits[bool]:
        name = yield from self._word(held)
        if (yield from self._comes(CALL_ID)):
            held.append(self._take(len(CALL_ID)))
            yield from self._word(held)
        if not name or not (yield from self._comes(ARGS)):
            return False
        held.append(self._take(len(ARGS)))
        yield from self._space(held)
        if (yield from self._peek()) != "{":
            return False
        self._begin(name, held)
        yield from self._value(self._argue)
        return True
