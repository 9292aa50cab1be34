"""What all bodies are made of."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.server.core import fields
from minisgl.server.core.fields import ENOUGH_CHARS, chars_of

TEXT = st.text(alphabet="abc", max_size=9)
JSON = st.recursive(
    TEXT | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=40,
)


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_characters_are_about_those_of_json(value: Any) -> None:
    written = len(json.dumps(value, separators=(",", ":")))
    assert written / 3 <= chars_of(value) <= 2 * written + 2


def test_a_large_value_is_not_counted_to_its_end() -> None:
    class Untouched(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError

    assert chars_of([Untouched([1]), "x" * ENOUGH_CHARS]) > fields.ENOUGH_CHARS
