"""Halves of surrogate pairs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.server.core.bodies import ChatMessage
from minisgl.server.core.surrogates import without_halves

UNITS = st.sampled_from(["\ud83d", "\ude00", "a", "\\", '"', "é", "\ud83d\ude00", "\U0001f600", "u", "d"])


@given(st.lists(UNITS, max_size=12).map("".join))
def test_lone_surrogates_are_replaced_and_pairs_kept(text: str) -> None:
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert json.loads(without_halves(json.dumps(text).encode())) == whole
    raw = json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert json.loads(without_halves(raw)).isprintable() is not None  # it is UTF-8 and JSON


@pytest.mark.parametrize(
    ("half", "left"), [(r"x\udfff", "x�"), (r"\ud83d\\ude00", "�\\ude00"), (r"\ud83d\ude00", "\U0001f600"), ("a", "a")]
)
def test_arguments_of_an_earlier_call_may_escape_a_half(half: str, left: str) -> None:
    call: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{half}"}}'}}
    message = ChatMessage(role="assistant", tool_calls=[call, {"function": {"arguments": {"a": 1}}}, {}])
    message.mend_arguments()
    [shown, *_] = message.for_template()["tool_calls"]
    assert json.loads(shown["function"]["arguments"]) == {"a": left}
