"""Requests with a grammar, until it is compiled: the scheduler hears of them after that.

Invariants: each leaves once: compiled, refused, or told to end; without any a step pays for one look.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.slots import Matcher
from minisgl.message import AddRequest

Compiled = tuple[AddRequest, Matcher | None, str]


class Compiling:
    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._waiting: dict[int, AddRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def adapters(self) -> set[int]:
        """That those who wait name."""
        return {message.sampling.adapter for message in self._waiting.values()}

    def add(self, message: AddRequest) -> str:
        """Why it is refused at once; empty if it is not."""
        grammar = message.sampling.grammar
        assert grammar is not None
        if self._compiler is None:
            return "this engine knows none"
        if message.req_id in self._waiting:
            raise ValueError(f"request id {message.req_id} was used twice")
        self._waiting[message.req_id] = message
        self._compiler.submit(message.req_id, grammar)
        return ""

    def drop(self, req_id: int) -> bool:
        """Whether it was here."""
        if self._waiting.pop(req_id, None) is None:
            return False
        assert self._compiler is not None
        self._compiler.cancel(req_id)
        return True

    def take(self) -> Iterator[Compiled]:
        """Those that are done: the request without its text, its matcher, or why it has none."""
        if not self._waiting:
            return
        assert self._compiler is not None
        for one in self._compiler.take():
            message = self._waiting.pop(one.key)
            sampling = msgspec.structs.replace(message.sampling, grammar=None)
            yield msgspec.structs.replace(message, sampling=sampling), one.matcher, one.error

    def wait(self) -> None:
        """Until one is done. Only with some."""
        assert self._compiler is not None
        self._compiler.wait()
