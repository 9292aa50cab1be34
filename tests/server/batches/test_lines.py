"""A batch's input: what is refused, with which words, and in what order lines are asked."""

from __future__ import annotations

import io
import json
import random
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.server.batches import lines
from minisgl.server.batches.lines import BadLine, BatchLine, check_file, prefix, read_lines, windows

MOST = 2000
GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hello"}}


def check(data: bytes) -> lines.CheckedFile:
    return check_file(io.BytesIO(data), MOST)


def written(*changes: dict[str, Any]) -> bytes:
    """Good lines, but for these."""
    found = [{**GOOD, "custom_id": f"line {i}", **change} for i, change in enumerate(changes)]
    return b"".join(json.dumps({k: v for k, v in one.items() if v is not ...}).encode() + b"\n" for one in found)


def test_check_returns_endpoint_and_line_count() -> None:
    assert check(written({}, {}, {})) == lines.CheckedFile("/v1/completions", 3)
    assert check(b"\n" + written({}).rstrip() + b"\r\n\n").num_lines == 1
    assert [one.number for one in read_lines(io.BytesIO(b"\n\n" + written({}, {})), MOST)] == [3, 4]


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"custom_id": ...}, "custom_id", "custom_id: required"),
        ({"custom_id": 7}, "custom_id", "custom_id: must be text (got 7)"),
        ({"custom_id": ""}, "custom_id", 'custom_id: must have from 1 to 512 characters (got "")'),
        (
            {"custom_id": "line 0"},
            "custom_id",
            'custom_id: must differ from those of earlier lines (got "line 0")',
        ),
        ({"method": "GET"}, "method", 'method: must be POST (got "GET")'),
        ({"url": "/v1/models"}, "url", "url: must be one of /v1/chat/completions, /v1/completions, /v1/embeddings, "),
        ({"url": "/v1/embeddings"}, "url", "url: the lines before it say /v1/completions: a batch has one endpoint"),
        ({"body": ...}, "body", "body: required"),
        ({"body": [1]}, "body", "body: must be a JSON object (got [1])"),
        ({"body": {"stream": True}}, "body.stream", "body.stream: batches do not stream: leave it out (got true)"),
        ({"body": {"prompt": "a" * MOST}}, "", f"must have at most {MOST} bytes (--max-body-bytes)"),
    ],
)
def test_a_bad_line_is_named(change: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(BadLine) as caught:
        check(written({}, {}, change, {}))
    assert (caught.value.line, caught.value.field) == (3, field)
    assert str(caught.value).startswith(f"line 3: {said}")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "line 1: the file has no requests"),
        (b"\n \n", "line 1: the file has no requests"),
        (b"[1]\n", "line 1: must be a JSON object"),
        (b"{\n", "line 1: not valid JSON: Input data was truncated"),
        (b"\xff\xfe", "line 1: is not text in UTF-8: byte 0 cannot be read"),
        (b'{"custom_id": "\xff"}', "line 1: is not text in UTF-8: byte 15 cannot be read"),
        (b'{"body": ' + b"[" * 1000 + b"]" * 1000 + b"}", "line 1: "),
    ],
)
def test_invalid_json_lines_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(BadLine, match=f"^{re.escape(said)}"):
        check(data)


def test_empty_lines_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_ROWS", 3)
    with pytest.raises(BadLine, match="line 4: a file has at most 3 lines, empty ones too"):
        check_file(io.BytesIO(b"\n" * 1000), 999)


def test_file_with_too_many_lines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINES", 2)
    with pytest.raises(BadLine, match="line 3: a file has at most 2 requests"):
        check(written({}, {}, {}))


# ------------------------------------------------------------------------------------------------------ hostile files


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("POST"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([*GOOD, "body", "stream", "x"])
ODD_LINES = st.builds(
    lambda change, at: {**GOOD, "custom_id": f"c{at}", **change},
    st.dictionaries(FIELDS, VALUES, max_size=2),
    st.integers(0, 9),
)
AS_BYTES = ODD_LINES.map(lambda one: json.dumps(one).encode())


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A line with bytes cut out, put in or changed."""
    line = bytearray(draw(AS_BYTES))
    for _ in range(draw(st.integers(0, 3))):
        at, end = draw(st.integers(0, len(line))), draw(st.integers(0, 5))
        line[at : at + end] = draw(
            st.binary(max_size=5) | st.sampled_from([b'"', b"\n", b"[" * 300, b"\\u", b"}", b"\x00", b"1e999"])
        )
    return bytes(line)


def refused_or_whole(data: bytes) -> bool:
    """Whether it was read: then every line is, once; else one is named."""
    try:
        found = check(data)
    except BadLine as error:
        assert 1 <= error.line <= data.count(b"\n") + 1
        assert str(error).startswith(f"line {error.line}: ") and len(str(error)) < 1000
        return False
    read = [line for window in windows(io.BytesIO(data), MOST, ()) for line in window]
    assert len({line.custom_id for line in read}) == len(read) == found.num_lines
    for line in read:
        assert line.url == found.url and isinstance(json.loads(line.body), dict)
    return True


@settings(max_examples=100, deadline=None)
@given(st.lists(AS_BYTES | damaged() | st.binary(max_size=50), max_size=6), st.sampled_from([b"\n", b"\r\n", b"\n\n"]))
def test_a_hostile_file_is_refused_by_line_or_read_whole(parts: list[bytes], end: bytes) -> None:
    refused_or_whole(end.join(parts))


ODD: tuple[Any, ...] = (..., None, True, 0, -1e308, "", "POST", "\ud800", [], {}, {"stream": 1}, [[[]]], "x" * 600)
ODD_BYTES = (
    b'"',
    b"\\",
    b"\n",
    b"\r",
    b"\x00",
    b"\xff",
    b"\xc3",
    b"{",
    b"}",
    b"[" * 300,
    b",",
    b"1e999",
    b"NaN",
    b"\\ud8",
)


@pytest.mark.slow
def test_ten_thousand_hostile_files(times: int) -> None:
    chance, num_read = random.Random(1), 0
    for _ in range(10_000 * times):
        changes = [{chance.choice([*GOOD, "x"]): chance.choice(ODD)} if chance.random() < 0.2 else {} for _ in range(3)]
        data = bytearray(written(*changes))
        for _ in range(chance.choice([0, 0, 1, 2, 8])):
            at, end = chance.randrange(len(data) + 1), chance.choice([0, 0, 1, 5, 80])
            data[at : at + end] = chance.choice(ODD_BYTES) if chance.random() < 0.7 else chance.randbytes(4)
        num_read += refused_or_whole(bytes(data))
    assert 1000 * times < num_read < 9000 * times, "they are all of one kind"


# --------------------------------------------------------------------------------------------------------------- order


def test_windows_sort_lines_by_common_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "WINDOW_LINES", 20)
    system = ["You are a cook.", "You are a clerk.", "You are a king."]
    asks = [
        {
            "body": {
                "max_tokens": i,
                "messages": [{"role": "system", "content": text}, {"role": "user", "content": f"{i}"}],
            }
        }
        for i, text in enumerate(system * 15)
    ]
    random.Random(1).shuffle(asks)
    data = written(*({**one, "url": "/v1/chat/completions"} for one in asks))
    found = list(windows(io.BytesIO(data), MOST, {1, 2, 45}))
    assert sorted(line.number for window in found for line in window) == list(range(3, 45))
    assert [len(window) for window in found] == [20, 20, 2]
    for window in found:
        heads = [json.loads(line.body)["messages"][0]["content"] for line in window]
        assert sum(one != other for one, other in pairwise(heads)) <= 2, heads


def test_a_window_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "WINDOW_BYTES", 3000)
    data = written(*({"body": {"prompt": "a" * 1000}} for _ in range(7)))
    assert [len(window) for window in windows(io.BytesIO(data), MOST, ())] == [3, 3, 1]


def test_prefix_covers_all_prompt_fields() -> None:
    def of(body: dict[str, Any]) -> bytes:
        return prefix(BatchLine(1, "a", "/v1/chat/completions", json.dumps(body).encode()))

    alike = [{"temperature": i, "messages": [{"role": "user", "content": "x"}], "user": str(i)} for i in range(2)]
    assert of(alike[0]) == of(alike[1])
    assert of({"model": "a", "prompt": "x"}) != of({"model": "b", "prompt": "x"})
    assert prefix(BatchLine(1, "a", "/v1/completions", b'{"prompt": ')) == b""


def test_lone_surrogates_are_replaced() -> None:
    """Clients that cut texts send it; it is no end of a batch."""
    line = rb'{"custom_id": "a\ud83d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x\udfff"}}'
    (found,) = read_lines(io.BytesIO(line), 1000)
    assert (found.custom_id, json.loads(found.body)) == ("a\ufffd", {"prompt": "x\ufffd"})
