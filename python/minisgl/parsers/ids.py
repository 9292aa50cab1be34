"""Ids and creation times in responses.

Invariants: a response that another server continues (`server/core/resume.py`) keeps its ids.
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
    """Source of the ids of a response that another server may continue: the same `seed` gives the same ids in the same
    order. `created` is its start in Unix seconds."""

    def __init__(self, seed: int, created: int) -> None:
        self.created = created
        self.choice = random.Random(seed).choice


_source: ContextVar[Source | None] = ContextVar("source", default=None)


@contextmanager
def of(source: Source | None) -> Iterator[None]:
    """Take ids and times from `source` in the `with` block; `None`: from random bits and the clock."""
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
    """Return the start of the response in Unix seconds."""
    source = _source.get()
    return int(time.time()) if source is None else source.created
