"""Prefixes before a server is ready: what cannot be one is said with its number."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl.frontend.prefixes import Prefix
from minisgl.frontend.warming import NotKept, warm
from minisgl.step import Int32Array


class Book:
    def __init__(self) -> None:
        self.ids: list[list[int]] = []

    def insert(self, ids: Int32Array, pin: bool) -> Prefix:
        self.ids.append(ids.tolist())
        return Prefix(len(self.ids), len(ids), pin)

    def is_settled(self, prefix: Prefix) -> bool:
        return True


def warmed(*texts: str | Int32Array) -> list[list[int]]:
    async def until(condition: Any) -> None:
        assert condition()

    book = Book()
    client: Any = SimpleNamespace(prefixes=book, until=until)
    tokenizer: Any = SimpleNamespace(encode=lambda text, most: np.arange(len(text), dtype=np.int32))
    asyncio.run(warm(client, tokenizer, texts, 8, lambda text, done, total: None))
    return book.ids


def test_texts_are_encoded_and_tokens_are_taken_as_they_are() -> None:
    assert warmed("abc", np.array([7, 8], np.int32)) == [[0, 1, 2], [7, 8]]


@pytest.mark.parametrize("long", ["abcdefgh", np.zeros(8, np.int32)], ids=["text", "tokens"])
def test_a_prefix_that_does_not_fit_is_named_by_its_number(long: str | Int32Array) -> None:
    with pytest.raises(NotKept, match=r"^--warm-prefix, number 2 of 2: 8 tokens: at most 7 fit$"):
        warmed("abc", long)
