"""A form in pieces: the same parts however it is cut, and bounds for whatever else comes."""

from __future__ import annotations

from itertools import pairwise

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.server.batches.multipart import MAX_HEADERS, MAX_PARTS, MultipartParser, PartHeader, boundary_of

BOUNDARY = b"bound"


def parts(body: bytes, cuts: list[int], boundary: bytes = BOUNDARY) -> list[tuple[str, str | None, bytes]]:
    """Raises `ValueError`."""
    reader, found = MultipartParser(boundary), list[tuple[str, str | None, bytes]]()
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    for begin, end in pairwise(places):
        for one in reader.push(body[begin:end]):
            if isinstance(one, PartHeader):
                found.append((one.name, one.filename, b""))
            else:
                assert one
                name, filename, content = found.pop()
                found.append((name, filename, content + one))
    if not reader.is_done:
        raise ValueError("no end")
    return found


CONTENT = st.binary(max_size=60) | st.lists(
    st.sampled_from([b"\r\n", b"--", b"\r\n--bou", b"--bound", b"\r", b"\n", b"\r\n--boun", b"x"]), max_size=6
).map(b"".join)


@settings(max_examples=100, deadline=None)
@given(st.lists(CONTENT, min_size=1, max_size=4), st.lists(st.integers(0, 600), max_size=8))
def test_parts_do_not_depend_on_chunking(contents: list[bytes], cuts: list[int]) -> None:
    contents = [one for one in contents if b"\r\n--bound" not in b"\r\n" + one]
    body = b"".join(
        b'--bound\r\nContent-Disposition: form-data; name="f%d"; filename="n"\r\n\r\n%b\r\n' % (i, one)
        for i, one in enumerate(contents)
    )
    assert parts(body + b"--bound--\r\n", cuts) == [(f"f{i}", "n", one) for i, one in enumerate(contents)]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                b"--bound",
                b"\r\n",
                b"--",
                b"a: b",
                b"Content-Disposition: form-data; name=x",
                b"\xff",
                b'"',
                b"=?utf-8?q?=",
                b";",
            ]
        ),
        max_size=20,
    ).map(b"".join),
    st.lists(st.integers(0, 300), max_size=4),
)
def test_invalid_forms_fail_alike_however_chunked(body: bytes, cuts: list[int]) -> None:
    outcomes = []
    for places in ([], cuts):
        try:
            outcomes.append(parts(body, places))
        except ValueError:
            outcomes.append([])
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("name", ["plain.jsonl", "with space.jsonl", "umläut.jsonl", 'quo"te.jsonl', "日本.jsonl"])
def test_bodies_of_real_clients_are_parsed(name: str) -> None:
    sent = httpx.Request("POST", "http://x", files={"file": (name, b"a\r\nb\n")}, data={"purpose": "batch"})
    boundary = boundary_of(sent.headers["content-type"])
    assert boundary is not None
    [purpose, file] = parts(sent.read(), [], boundary)
    assert purpose == ("purpose", None, b"batch") and file[0] == "file" and file[2] == b"a\r\nb\n"
    assert file[1] in (name, name.replace('"', "%22"))  # as browsers write it


def test_boundary_of_accepts_valid_boundaries_only() -> None:
    assert boundary_of("application/json") is None and boundary_of("") is None
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
    for wrong in ("multipart/form-data", "multipart/form-data; boundary=", f"multipart/form-data; boundary={'a' * 71}"):
        with pytest.raises(ValueError, match="boundary"):
            boundary_of(wrong)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"x" * (MAX_HEADERS + 20), "does not begin with its boundary"),
        (b"--bound\r\n" + b"a" * (MAX_HEADERS + 20), "more than 8192 bytes"),
        (b"--boundx\r\n", "neither a part nor the end"),
        (b"--bound\r\nA: b\r\n\r\nc", "no Content-Disposition"),
        (
            b'--bound\r\nContent-Disposition: form-data; name="a"\r\n\r\n' * (MAX_PARTS + 1),
            f"more than {MAX_PARTS} parts",
        ),
    ],
)
def test_headers_and_preamble_over_the_limit_are_refused(body: bytes, said: str) -> None:
    separated = body.replace(b"\r\n\r\n--", b"\r\n\r\n\r\n--")
    with pytest.raises(ValueError, match=said):
        parts(separated, list(range(0, len(separated), 100)))
