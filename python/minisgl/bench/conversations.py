"""Request files with text: conversations in ShareGPT's format, a JSON list or JSON lines of objects with
`conversations`, a list of turns with `from` (human, gpt, ...) and `value`.

Unusable conversations (without a question and an answer to it) are counted, never dropped silently; a file of another
format is refused with the position and the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.config import ConfigError

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
}
LOOKED_AT = 4096  # bytes read to tell such a file from a trace


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation: pairs of question and original answer, and a system prompt, which may be empty."""

    system: str
    turns: tuple[tuple[str, str], ...]


def is_request_file(path: Path) -> bool:
    """Return True if the file begins like a request file, and not like a trace. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            start = file.read(LOOKED_AT).decode("utf-8", "replace").removeprefix("\ufeff").lstrip()
    except OSError as error:
        raise ConfigError(f"--workload {path.name}: {error.strerror}") from error
    return start.startswith("[") or (start.startswith("{") and '"conversations"' in start)


def read_conversations(path: Path) -> tuple[list[Conversation], int]:
    """Return the usable conversations, and the number of unusable ones. Raises `ConfigError`."""
    usable, unusable = list[Conversation](), 0
    try:
        for position, item in _objects(path):
            turns = _turns(position, item)
            if (conversation := _conversation(turns)) is None:
                unusable += 1
            else:
                usable.append(conversation)
    except OSError as error:
        raise ConfigError(f"--workload {path.name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--workload {path.name}: {error}") from error
    if not usable:
        raise ConfigError(f"--workload {path.name}: no conversation has a question with an answer after it")
    return usable, unusable


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        yield from ((f"conversation {i}", one) for i, one in enumerate(json.loads(text), 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number}: not JSON: {error}") from error


def _turns(position: str, item: Any) -> list[tuple[str, str]]:
    """Return the turns of a conversation as (role, text). Raises `ValueError`, which begins with `place`."""
    given = item.get("conversations") if isinstance(item, dict) else None
    if not isinstance(given, list):
        raise ValueError(f"{position}: has no list `conversations`: must be as in ShareGPT's files")
    turns = []
    for i, turn in enumerate(given, 1):
        says = turn.get("from") if isinstance(turn, dict) else None
        text = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(says, str) or says not in ROLES:
            raise ValueError(f"{position}, turn {i}: `from` {says!r}: must be one of {', '.join(ROLES)}")
        if not isinstance(text, str):
            raise ValueError(f"{position}, turn {i}: `value` {text!r}: must be text")
        turns.append((ROLES[says], text))
    return turns


def _conversation(turns: list[tuple[str, str]]) -> Conversation | None:
    """Return the part in which questions and answers alternate, or None if it is empty. (Files that split long
    conversations have parts that begin with an answer.)"""
    system = turns[0][1] if turns and turns[0][0] == "system" else ""
    rest = turns[1:] if system else turns
    pairs = []
    for (asks, question), (answers, answer) in zip(rest[::2], rest[1::2], strict=False):
        if (asks, answers) != ("user", "assistant") or not question or not answer:
            break
        pairs.append((question, answer))
    return Conversation(system, tuple(pairs)) if pairs else None
