"""Ids and times that stand in answers.

Invariants: an answer that another server goes on with (`server/core/resume.py`) has the ids there that it had here.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_HEX = "0123456789abcdef"


class Source:
    """Ids of one answer that may be taken up elsewhere: the same `seed` gives the same ids in the same order.
    `created`: when it was begun, in Unix seconds."""

    def __init__(self, seed: int, created: int) -> None:
        self.created = created
        self.choice = random.Random(seed).choice


_source: ContextVar[Source | None] = ContextVar("source", default=None)


@contextmanager
def of(source: Source | None) -> Iterator[None]:
    """Ids and times come from `source`; None: from chance and the clock."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def new_id(length: int = 32, alphabet: str = _HEX) -> str:
    source = _source.get()
    if source is None and alphabet is _HEX:
        return secrets.token_hex((length + 1) // 2)[:length]
    choice = secrets.choice if source is None else source.choice
    return "".join(choice(alphabet) for _ in range(length))


def created() -> int:
    """When the answer was begun, in Unix seconds."""
    source = _source.get()
    return int(time.time()) if source is None else source.created
