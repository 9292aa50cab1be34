"""A request's way over replicas that die: what the client gets is one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.ray.relay import Call, Header, MarkReader, Relay
from minisgl.server.core.passing import Lost
from minisgl.server.core.resume import LINE, MARKS, NOTHING_NEW, Mark, Origin, Said, Tokens, lost
from tests.helpers.seconds import WAIT_S

CHAT = Call("POST", "/v1/chat/completions", [(b"x-a", b"b")], b"{}")
ORIGIN = Origin("m", 1, 2, 3, [9], [0])
OK = Header(200, [(b"content-type", b"text/event-stream")])
Part = Header | bytes | Exception


def mark(*tokens: int, first: bool = False) -> bytes:
    return LINE + msgspec.json.encode(Mark([Tokens(0, [*tokens])], ORIGIN if first else None)) + b"\n"


def answered(
    attempts: Sequence[Sequence[Part | float]], asked: Call = CHAT, retry_s: float = 60.0, longest_s: float = 60.0
) -> tuple[int, bytes, list[Call]]:
    """The status, the body, and what each replica was asked. A number is a wait for as many pings."""
    sent: list[Call] = []
    left = iter(attempts)

    async def attempt(asked: Call) -> AsyncIterator[Header | bytes]:
        sent.append(asked)
        for part in next(left):
            if isinstance(part, Exception):
                raise part
            if isinstance(part, float):
                async with asyncio.timeout(WAIT_S):
                    while body.count(b": ping\n\n") < part:
                        await asyncio.sleep(0)
            else:
                yield part

    body = bytearray()

    async def run() -> tuple[int, bytes]:
        status = 0
        async for one in Relay(asked, attempt, retry_s, longest_s).answer():
            if isinstance(one, Header):
                assert not status
                status = one.status
            else:
                assert status
                body.extend(one)
        return status, bytes(body)

    status, found = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    return status, found, sent


def said(asked: Call) -> Said:
    assert dict(asked.headers)[MARKS] == b"%d" % len(asked.said)
    return msgspec.json.decode(asked.said, type=Said)


def test_marks_are_taken_out() -> None:
    status, body, (asked,) = answered([[OK, b"a\n\n" + mark(1, first=True), b"b\n\n" + mark(2) + b"end"]])
    assert (status, body) == (200, b"a\n\nb\n\nend")
    assert dict(asked.headers) == {b"x-a": b"b", MARKS: b"0"}


def test_a_stream_goes_on_from_the_last_mark() -> None:
    died = [OK, b"a\n\n" + mark(1, first=True), b"b\n\n" + mark(2, 3), b"c\n", Lost("it died")]
    status, body, (_, second) = answered([died, [OK, b"c\n\n" + mark(4), b"end"]])
    assert (status, body) == (200, b"a\n\nb\n\nc\n\nend")
    assert said(second) == Said(ORIGIN, [[Tokens(0, [1])], [Tokens(0, [2, 3])]])


def test_request_survives_repeated_losses() -> None:
    first: list[Part] = [OK, b"0" + b"\n" + mark(0, first=True), Lost("died")]
    more: list[list[Part]] = [[OK, b"%d\n" % i + mark(i), Lost("died")] for i in range(1, 9)]
    _, body, asked = answered([first, *more, [OK, b"end"]])
    assert body == b"".join(b"%d\n" % i for i in range(9)) + b"end"
    assert [one.tokens for turn in said(asked[-1]).turns for one in turn] == [[i] for i in range(9)]


def test_an_engine_that_is_lost_says_so() -> None:
    _, body, asked = answered([[OK, b"a\n" + mark(1, first=True) + lost("it fell")], [OK, b"end"]])
    assert body == b"a\nend"
    assert len(asked) == 2


@pytest.mark.parametrize("first", [[Lost("x")], [OK, Lost("x")], [OK, b'{"half": ', Lost("x")], [], [Header(503, [])]])
def test_unanswered_request_is_sent_again(first: list[Part]) -> None:
    status, body, asked = answered([first, [Header(200, []), b'{"whole": 1}']])
    assert (status, body) == (200, b'{"whole": 1}')
    assert asked[0] == asked[1]


def test_ping_passes_before_the_first_token() -> None:
    waits = [OK, b": ping\n\n" + NOTHING_NEW]
    status, body, _ = answered([[*waits, 1.0, b"a\n\n" + mark(1, first=True), b": ping\n\n" + NOTHING_NEW, b"end"]])
    assert (status, body) == (200, b": ping\n\na\n\n: ping\n\nend")
    _, body, asked = answered([[*waits, 1.0, Lost("it died")], [*waits, b"a\n\n" + mark(1, first=True), b"end"]])
    assert body == b": ping\n\n: ping\n\na\n\nend" and asked[0] == asked[1], "it begins anew"
    assert answered([[*waits, 1.0, Lost("it died")]], retry_s=0.0)[1].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "kind", "ping"),
    [
        ("/v1/completions", b"text/event-stream", b": ping\n\n"),
        ("/v1/messages", b"text/event-stream; charset=utf-8", b'event: ping\ndata: {"type":"ping"}\n\n'),
        ("/generate", b"application/x-ndjson", b'{"text_delta":""}\n'),
    ],
)
def test_stream_that_no_replica_has_says_that_it_lives(path: str, kind: bytes, ping: bytes) -> None:
    async def attempt(asked: Call) -> AsyncIterator[Header | bytes]:
        if asked.said:
            await asyncio.Event().wait()  # as Serve's handle, while no replica has room
        yield Header(200, [(b"content-type", kind)])
        yield b"a\n" + mark(1, first=True)
        raise Lost("it died")

    async def run() -> list[Header | bytes]:
        parts = Relay(Call("POST", path, []), attempt, 60.0, longest_s=0.001).answer()
        return [await anext(parts) for _ in range(5)]

    assert asyncio.run(asyncio.wait_for(run(), WAIT_S))[1:] == [b"a\n", ping, ping, ping]


@pytest.mark.parametrize("status", [400, 404, 413, 429, 500])
def test_errors_of_the_server_are_the_answer(status: int) -> None:
    assert answered([[Header(status, []), b"why"]])[:2] == (status, b"why")


def test_error_without_a_replica_has_the_reason() -> None:
    status, body, _ = answered([[Lost("nobody is there")]], retry_s=0.0)
    assert status == 503
    assert msgspec.json.decode(body)["error"] == {
        "message": "nobody is there",
        "type": "server_error",
        "param": None,
        "code": "replica_lost",
    }


def test_a_stream_that_nobody_goes_on_with_ends_with_an_error() -> None:
    begun: list[Part] = [OK, b"a\n" + mark(1, first=True), Lost("it died")]
    _, body, _ = answered([begun], retry_s=0.0)
    assert body.startswith(b'a\ndata: {"error":{"message":"it died"')
    assert body.endswith(b"data: [DONE]\n\n")
    _, body, _ = answered([begun], msgspec.structs.replace(CHAT, path="/v1/messages"), retry_s=0.0)
    assert body.startswith(b'a\nevent: error\ndata: {"type":"error"')


def test_another_model_does_not_go_on() -> None:
    begun: list[Part] = [OK, b"a\n" + mark(1, first=True), Lost("it died")]
    _, body, asked = answered([begun, [Header(409, []), b"no"]])
    assert b"could not be taken up: the replica's server answered 409" in body
    assert len(asked) == 2


def test_full_replica_is_tried_again() -> None:
    begun: list[Part] = [OK, b"a\n" + mark(1, first=True), Lost("it died")]
    assert answered([begun, [Header(429, []), b"full"], [OK, b"end"]])[1] == b"a\nend"


def test_other_routes_are_passed_on_as_they_come() -> None:
    asked = Call("GET", "/stats/stream", [])
    status, body, (one,) = answered([[OK, b"a", LINE + b"b\n"]], asked)
    assert (status, body) == (200, b"a" + LINE + b"b\n")
    assert one == asked


def test_stream_without_marks_ends_where_its_replica_was_lost() -> None:
    with pytest.raises(Lost, match="it died"):
        answered([[OK, b"a", Lost("it died")]], Call("GET", "/stats/stream", []))
    assert answered([[Lost("it died")], [OK, b"a"]], Call("GET", "/stats/stream", []))[1] == b"a"


@given(st.lists(st.sampled_from([b"a", b"\n", b": ", b"x\n\n", LINE[:-1]])), st.lists(st.integers(1, 9)))
def test_marks_are_found_however_they_are_cut(between: list[bytes], sizes: list[int]) -> None:
    text = b"".join(between).replace(LINE, b"")
    text += b"\n" if text and not text.endswith(b"\n") else b""
    stream = text + mark(1) + text + mark(2) + text
    reader, found, data = MarkReader(), list[Mark](), b""
    cuts: Callable[[], int] = iter([*sizes, len(stream)]).__next__
    while stream:
        size = cuts()
        found += reader.push(stream[:size])
        data += reader.take()
        stream = stream[size:]
    assert [one.tokens[0].tokens for one in found] == [[1], [2]]
    assert data + reader.rest() == 3 * text
