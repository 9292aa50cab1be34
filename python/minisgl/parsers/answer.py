"""From the text of an answer to its parts: what the model thinks first, then content and tool calls.

A format of calls is a subclass. White space between text and a call, and around what the model thinks, counts as part
of the markers.

Invariants: what does not become a call is text, as it was, with its markers; a call begins once its name is known and
its arguments have begun: what comes of them after that is handed on as it comes, and a text that breaks off within
them leaves a call with what came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from minisgl.parsers import ids
from minisgl.parsers.api import CallArguments, CallBegun, Reasoning, Text
from minisgl.parsers.growing import GrowingText, Waits

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
_NAME = re.compile(r"[\w.-]")
OTHER_KEYS = ("type", "id")


def call_id() -> str:
    return f"call_{ids.new_id(24)}"


@dataclass(frozen=True, slots=True)
class Thinking:
    """The markers around what a model thinks. `is_open`: an answer begins within them; False: behind them."""

    begin: str
    end: str
    is_open: bool | None = None


def _encodable(text: str) -> str:
    """Raises `ValueError` for lone surrogates, which escapes can spell."""
    text.encode()
    return text


class _Trimmed:
    """A text whose last white space waits for what comes next."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._spaces: list[str] = []

    def push(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self._emit("".join(self._spaces) + body)
            self._spaces.clear()
        self._spaces.append(text[len(body) :])

    def take_spaces(self) -> list[str]:
        found, self._spaces = self._spaces, []
        return found

    def finish(self) -> None:
        if spaces := "".join(self.take_spaces()):
            self._emit(spaces)


class AnswerParser(GrowingText):
    """Without calls. `names` are those of the tools, for formats in which anything might look like a call."""

    def __init__(
        self,
        thinking: Thinking | None = None,
        names: frozenset[str] = frozenset(),
        new_id: Callable[[], str] = call_id,
    ) -> None:
        super().__init__()
        self._thinking = thinking
        self._names = names
        self._new_id = new_id
        self._num_calls = 0
        self._after_call = False
        self._text = _Trimmed(self._emit_text)

    def _run(self) -> Waits[None]:
        if self._thinking is not None:
            yield from self._think(self._thinking)
        yield from self._content()
        if not self._after_call:
            self._text.finish()

    def _emit_text(self, text: str) -> None:
        self._after_call = False
        self._emit(Text(text))

    def _content(self) -> Waits[None]:
        yield from self._until((), lambda text: self._emit(Text(text)))

    def _think(self, thinking: Thinking) -> Waits[None]:
        held: list[str] = []
        yield from self._space(held)
        if (yield from self._comes(thinking.begin)):
            self._take(len(thinking.begin))
        elif not thinking.is_open:
            self._give_back(held)
            return
        yield from self._space([])
        inner = _Trimmed(lambda text: self._emit(Reasoning(text)))
        if (yield from self._until((thinking.end,), inner.push)) is None:
            inner.finish()
            return
        self._take(len(thinking.end))
        yield from self._space([])

    # ----------------------------------------------------------------------------------------------------------- calls

    def _give_back(self, held: list[str]) -> None:
        """It is text."""
        for piece in held:
            self._text.push(piece)
        held.clear()

    def _hold(self, count: int) -> list[str]:
        """The next `count` characters with the white space before them: a call may begin with them."""
        return [*self._text.take_spaces(), self._take(count)]

    def _begin(self, name: str, held: list[str]) -> None:
        """What is `held` belonged to a call."""
        held.clear()
        self._after_call = True
        self._emit(CallBegun(self._num_calls, self._new_id(), name))
        self._num_calls += 1

    def _argue(self, text: str) -> None:
        self._emit(CallArguments(self._num_calls - 1, text))

    def _string(self, held: list[str]) -> Waits[str | None]:
        """A JSON string; None if something else comes."""
        if (yield from self._peek()) != '"':
            return None
        pieces: list[str] = []
        whole = yield from self._value(pieces.append)
        held += pieces
        try:
            return _encodable(json.loads("".join(pieces), strict=False)) if whole else None
        except ValueError:
            return None

    def _word(self, held: list[str]) -> Waits[str]:
        found: list[str] = []
        while _NAME.match((yield from self._peek())):
            found.append(self._take(1))
        held += found
        return "".join(found)

    def _call(self, held: list[str], *, known: bool) -> Waits[bool]:
        """An object with the name of a tool, one of `names` if it must be `known`, and its arguments. True if it has
        become a call; what does not belong to a call is in `held`."""
        held.append(self._take(1))
        name: str | None = None
        arguments: str | None = None
        begun = False
        while True:
            yield from self._space(held)
            key = yield from self._string(held)
            yield from self._space(held)
            if key is None or not (yield from self._comes(":")):
                return begun
            held.append(self._take(1))
            yield from self._space(held)
            if key in NAME_KEYS and name is None:
                name = yield from self._string(held)
                if not name or (known and name not in self._names):
                    return begun
            elif key in ARGUMENT_KEYS and arguments is None:
                if name is not None and (yield from self._peek()) == "{":
                    self._begin(name, held)
                    begun, arguments = True, ""
                    if not (yield from self._value(self._argue)):
                        return True
                elif (arguments := (yield from self._arguments(held))) is None:
                    return False
            elif (known and not begun and key not in OTHER_KEYS) or not (yield from self._value(held.append)):
                return begun
            yield from self._space(held)
            if (yield from self._comes(",")):
                held.append(self._take(1))
                continue
            if not (yield from self._comes("}")):
                return begun
            held.append(self._take(1))
            break
        if not begun:
            if name is None:
                return False
            self._begin(name, held)
            self._argue(arguments or "{}")
        held.clear()
        return True

    def _arguments(self, held: list[str]) -> Waits[str | None]:
        """Arguments that cannot be handed on as they come: before the name, or written as a string. Null is none."""
        pieces: list[str] = []
        whole = yield from self._value(pieces.append)
        held += pieces
        text = "".join(pieces)
        try:
            found = json.loads(text, strict=False) if whole else None
            if isinstance(found, str):
                text = _encodable(found.strip()) or "{}"
                found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if whole and found is None:
            return "{}"
        return text if isinstance(found, dict) else None

    def _calls(self, held: list[str], *, known: bool = False) -> Waits[bool]:
        """An object, several of them, or a list of them. Whether there was a call; what is none is text."""
        found = False
        yield from self._space(held)
        in_list = yield from self._comes("[")
        if in_list:
            held.append(self._take(1))
            yield from self._space(held)
        while (yield from self._comes("{")):
            if not (yield from self._call(held, known=known)):
                break
            found = True
            if held:
                break
            yield from self._space(held)
            if separator := (yield from self._which((",", ";"))):
                held.append(self._take(len(separator)))
                yield from self._space(held)
        if found and in_list and (yield from self._comes("]")):
            self._take(1)
            held.clear()
        self._give_back(held)
        return found
