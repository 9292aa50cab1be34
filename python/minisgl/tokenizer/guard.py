"""Guards for request texts in a prompt: only the chat template creates markers; texts that it shows never become any.

A marker is an added token that is special or looks like one of turns, calls or reasoning (`guarded.rs`, `is_marker`).
Where a text spells one, a guard character is inserted after its first character before the template renders it. It is
removed afterwards; its offset is kept, and no added token is matched across it.

Invariants: a conversation that spells no marker is rendered and encoded as if there were no guards. The guard character
is printable, without case, no white space, and occurs neither in the conversation nor in the template.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jinja2 import nodes

CHARS = [chr(code) for code in range(0xA500, 0xA60D)]  # the syllables of Vai
_SEARCHES = ("split", "rsplit", "partition", "rpartition")


class Marks(Protocol):
    """Interface to a tokenizer's markers: `TextTokenizer` or `ReferenceTokenizer`."""

    def has_markers(self, value: Any, /) -> bool: ...

    def guarded(self, text: str, guard: str, kept: list[str], /) -> str: ...


class Prompt(str):
    """A rendered conversation. No added token is matched across `guards`, ascending character offsets."""

    guards: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str, guard: str) -> str:
        """Return `text` without the guard characters; `guard` is empty if there are none."""
        if not guard or guard not in text:
            return text
        parts = text.split(guard)
        prompt = cls("".join(parts))
        prompt.guards = tuple(itertools.accumulate(map(len, parts[:-1])))
        return prompt


def guards_of(text: str) -> tuple[int, ...]:
    return text.guards if isinstance(text, Prompt) else ()


def searched(tree: nodes.Template) -> list[str]:
    """Return the strings that a template searches for in texts: an assistant's content keeps these markers."""
    compared = (
        (compare.expr, *(operand.expr for operand in compare.ops))
        for compare in tree.find_all(nodes.Compare)
        if any(operand.op in ("in", "notin") for operand in compare.ops)
    )
    called = (
        call.args
        for call in tree.find_all(nodes.Call)
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCHES
    )
    operands = itertools.chain(*compared, *called)
    texts = (node.value.strip() for node in operands if isinstance(node, nodes.Const) and isinstance(node.value, str))
    return sorted(set(filter(None, texts)))


def guarded(marks: Marks, messages: Sequence[Mapping[str, Any]], others: Any, kept: list[str], source: str) -> Any:
    """Return the guard character and guarded copies of messages and others. `kept`: markers that stay in an assistant's
    content. Raises `ValueError` if every guard character is in use, `RecursionError` for too deep nesting."""
    texts = [source, *_texts((messages, others))]
    guard = next((char for char in CHARS if not any(char in text for text in texts)), None)
    if guard is None:
        raise ValueError("they spell a special token and use all syllables of Vai, so that none is left to escape it")

    def plainly(text: str) -> str:
        return marks.guarded(text, guard, [])

    def of_assistant(text: str) -> str:
        return marks.guarded(text, guard, kept)

    def of_message(message: Mapping[str, Any]) -> dict[str, Any]:
        is_assistant = message.get("role") == "assistant"
        return {
            key: value
            if key == "role"
            else _mapped(value, of_assistant if is_assistant and key == "content" else plainly)
            for key, value in message.items()
        }

    return guard, [of_message(message) for message in messages], _mapped(others, plainly)


def _texts(value: Any) -> Iterator[str]:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            left += one


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(one, change) for one in value]
    return value
