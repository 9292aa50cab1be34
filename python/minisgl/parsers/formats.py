"""The formats in which models write tool calls.

Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, also with a list in it. Llama 3: `{"name":
..., "parameters": {...}}` at the beginning or after `<|python_tag|>`. Mistral: `[TOOL_CALLS]` and a list of objects, in
newer models a name, `[ARGS]` and an object. Models without a format of their own are told to write plain JSON. Pythonic
calls have a file of their own.

Tool calls as a list of Python calls: `[get_weather(city='Paris', days=3), now()]`, as Llama 3.2 and 4 write them.

Invariants: see answer.py; arguments are literals, which become JSON; a call is known when its parentheses are closed.
"""

from __future__ import annotations

import ast
import json
import string
import warnings
from collections.abc import Callable
from typing import Any

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


MAX_DEPTH = 64
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}


class PythonicParser(JsonParser):
    """An answer that begins with `[` may be a list of calls, if they name tools. Objects are calls, too: answers by a
    grammar have them."""

    def _content(self) -> Waits[None]:
        held: list[str] = []
        yield from self._space(held)
        if (yield from self._comes(PYTHON_TAG)):
            held.append(self._take(len(PYTHON_TAG)))
            yield from self._space(held)
        found = False
        if (yield from self._comes("{")):
            yield from self._calls(held, known=True)
        elif (yield from self._comes("[")):
            held.append(self._take(1))
            found = yield from self._listed(held)
        if found and (yield from self._comes("]")):
            self._take(1)
            held.clear()
        self._give_back(held)
        yield from self._rest()

    def _listed(self, held: list[str]) -> Waits[bool]:
        found = False
        while True:
            yield from self._space(held)
            name = yield from self._word(held)
            if name not in self._names or not (yield from self._comes("(")):
                return found
            pieces: list[str] = []
            whole = yield from self._value(pieces.append, python=True)
            held += pieces
            text = python_arguments("".join(pieces)) if whole else None
            if text is None:
                return found
            self._begin(name, held)
            self._argue(text)
            found = True
            yield from self._space(held)
            if not (yield from self._comes(",")):
                return found
            held.append(self._take(1))


def python_arguments(text: str) -> str | None:
    """JSON of `(name=literal, ...)`; None if that is not what it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes
            call = ast.parse("f" + text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            return None
        found = {keyword.arg: _literal(keyword.value, MAX_DEPTH) for keyword in call.keywords}
        if len(found) != len(call.keywords):
            return None
        written = json.dumps(found, ensure_ascii=False, allow_nan=False)
        written.encode()
        return written
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr, depth: int) -> Any:
    if not depth:
        raise ValueError("too deep")
    match node:
        case ast.Constant(value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.Name(name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if isinstance(value, int | float):
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [_literal(item, depth - 1) for item in items]
        case ast.Dict(keys, values):
            names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if len(names) == len(keys):
                return {name: _literal(value, depth - 1) for name, value in zip(names, values, strict=True)}
    raise ValueError("no literal")
