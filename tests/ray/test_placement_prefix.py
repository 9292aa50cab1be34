"""The text by whose beginning a replica is chosen: what a next turn repeats comes first, whatever it is sent as."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.ray.placement import MAX_BYTES, routing_fields


def common(one: dict[str, Any], other: dict[str, Any]) -> int:
    first, second = (routing_fields(json.dumps(body).encode()).prefix for body in (one, other))
    same = first[: len(second)] == second[: len(first)]
    return int(same.argmin()) if not same.all() else len(same)


def test_a_next_turn_has_the_last_one_as_its_beginning() -> None:
    messages = [{"role": "user", "content": "a" * 500}]
    longer = [*messages, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    before = {"temperature": 1, "model": "m", "messages": messages}
    after = {"messages": longer, "model": "m", "seed": 3}
    assert common(before, after) >= 500


def test_tools_and_the_system_text_come_first() -> None:
    tools = [{"type": "function", "function": {"name": "x" * 300}}]
    one = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    other = {"tools": tools, "messages": [{"role": "user", "content": "b"}]}
    assert common(one, other) > 300
    assert common({"system": "s" * 90, "messages": ["a"]}, {"messages": ["b"], "system": "s" * 90}) > 90


def test_an_image_goes_where_it_was_and_another_does_not() -> None:
    rng = random.Random(3)
    same, other = ("iVBORw0KGgo" + base64.b64encode(rng.randbytes(90_000)).decode() for _ in range(2))

    def chat(data: str, question: str) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return {"messages": [{"role": "user", "content": [image, {"type": "text", "text": question}]}]}

    assert common(chat(same, "What?"), chat(same, "Where?")) == MAX_BYTES
    assert common(chat(same, "What?"), chat(other, "What?")) < 150
    one, *others = ({"images": [data], "prompt": text} for data, text in ((same, "a"), (same, "b"), (other, "a")))
    assert [common(one, body) == MAX_BYTES for body in others] == [True, False]


@pytest.mark.parametrize("field", ["prompt", "input", "text", "input_ids", "instructions"])
def test_each_api_has_its_field(field: str) -> None:
    seen = routing_fields(json.dumps({"model": "m", field: "abc"}).encode())
    assert seen.model == "m"
    assert bytes(seen.prefix.tolist()) == b'"abc"'


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"messages":', b'{"model":3}', b"1"])
def test_unreadable_body_is_no_error(body: bytes) -> None:
    assert routing_fields(body).model is None
    assert not len(routing_fields(body).prefix)


def test_prefix_length_is_bounded() -> None:
    assert len(routing_fields(json.dumps({"prompt": "x" * 3 * MAX_BYTES}).encode()).prefix) == MAX_BYTES


@given(st.binary(max_size=300))
def test_any_bytes(body: bytes) -> None:
    routing_fields(body)
