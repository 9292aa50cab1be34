"""A text that grows, and its parts."""

from __future__ import annotations

from minisgl.parsers.api import CallArguments, CallBegun, Reasoning, Text
from minisgl.parsers.growing import GrowingText, Waits
from tests.server.messages.test_endpoint import NeverAppended


class _Emits(GrowingText):
    def _run(self) -> Waits[None]:
        for text in "abc":
            self._emit(Text(NeverAppended(text)))
        self._emit(Reasoning("r"))
        for index in (0, 1):
            self._emit(CallBegun(index, "id", "name"))
            for text in "xyz":
                self._emit(CallArguments(index, NeverAppended(text)))
        yield


def test_neighbours_of_a_kind_are_joined_once() -> None:
    assert _Emits().push("go") == [
        Text("abc"),
        Reasoning("r"),
        *(one for index in (0, 1) for one in (CallBegun(index, "id", "name"), CallArguments(index, "xyz"))),
    ]
