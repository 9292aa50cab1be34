"""What is no HTTP, or hardly: raw sockets. Each ends with an error in our shape or a closed connection, none with a
hang, and the server goes on."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl.server.core.http import MAX_HEAD_BYTES
from tests.helpers.server import Frontend, read_all, read_until

GOOD = b'{"prompt": "say:on"}'


@pytest.fixture
def raw(server: Frontend) -> Iterator[socket.socket]:
    with server.connect() as connection:
        yield connection
    with server.http() as http:
        assert http.post("/v1/completions", content=GOOD).json()["choices"][0]["text"] == "on"


def read_error(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    head, _, body = read_all(connection, or_reset=True).partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


def request(body: bytes = GOOD, *headers: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"host: localhost", *(headers or (b"content-length: %d" % len(body),))]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # somebody speaks TLS
        b"hello?\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        request(GOOD, b"content-length: -5"),
        request(GOOD, b"content-length: 5", b"content-length: 6"),
        request(GOOD, b"content-length: " + b"9" * 100),
        request(GOOD, b"content-length: \xb2"),
        request(b"zz\r\n" + GOOD, b"transfer-encoding: chunked"),
        request(b"fffffffffffffffffff\r\n" + GOOD, b"transfer-encoding: chunked"),
    ],
    ids=range(10),
)
def test_broken_framing_is_a_400(raw: socket.socket, sent: bytes) -> None:
    raw.sendall(sent)
    status, error = read_error(raw)
    assert status == 400 and error["code"] == "invalid_http" and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nx: ", b"GET /", b"GET /health HTTP/1.1\r\n"])
def test_endless_headers_are_431(raw: socket.socket, start: bytes) -> None:
    raw.sendall(start)
    piece = b"a: b\r\n" if start.endswith(b"\r\n") else b"aaaaaa"
    with contextlib.suppress(OSError):  # any of these calls may find it refused; a reset may lose the response
        for _ in range(2 * MAX_HEAD_BYTES // 600):
            raw.sendall(piece * 100)
        raw.shutdown(socket.SHUT_WR)
    answer = read_all(raw, or_reset=True)
    assert answer == b"" or b" 431 " in answer.split(b"\r\n")[0]


def test_a_large_head_below_the_limit_is_fine(raw: socket.socket) -> None:
    headers = [b"h%d: %s" % (i, b"v" * 1000) for i in range(40)]
    raw.sendall(request(GOOD, b"connection: close", b"content-length: %d" % len(GOOD), *headers))
    assert read_all(raw, or_reset=True).startswith(b"HTTP/1.1 200 ")


def test_heads_of_many_requests_are_counted_apart(raw: socket.socket) -> None:
    """A connection that is kept alive sends more head bytes in all than one head may have."""
    padding = b"pad: " + b"v" * 30_000
    for _ in range(6):
        head = request(GOOD, b"content-length: %d" % len(GOOD), padding)
        raw.sendall(head[:20_000])
        raw.sendall(head[20_000:])
        assert read_until(raw, b'"usage"').startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_in_order(raw: socket.socket) -> None:
    bodies = [b'{"prompt": "say:%d"}' % i for i in range(5)]
    last = request(bodies[-1], b"content-length: %d" % len(bodies[-1]), b"connection: close")
    raw.sendall(b"".join(request(body) for body in bodies[:-1]) + last)
    answers = read_all(raw, or_reset=True).split(b"HTTP/1.1 200 OK")[1:]
    assert [json.loads(one.partition(b"\r\n\r\n")[2])["choices"][0]["text"] for one in answers] == list("01234")


def test_a_body_byte_by_byte_is_fine(raw: socket.socket) -> None:
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(len(sent := request(GOOD, b"content-length: %d" % len(GOOD), b"connection: close"))):
        raw.sendall(sent[at : at + 1])
    assert read_all(raw, or_reset=True).startswith(b"HTTP/1.1 200 ")


def test_disconnect_within_the_body_reaches_no_engine(server: Frontend) -> None:
    before = len(server.engine.received)
    server.connect(request(GOOD, b"content-length: 1000")).close()
    with server.http() as http:
        http.post("/v1/completions", content=GOOD)
    assert len(server.engine.received) == before + 1


def test_upgrades_are_ignored(raw: socket.socket) -> None:
    raw.sendall(request(GOOD, b"content-length: %d" % len(GOOD), b"connection: close, upgrade", b"upgrade: h2c"))
    assert read_all(raw, or_reset=True).split(b"\r\n")[0].split()[1] in (b"200", b"400")


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://evil.example/livez", 403),
        (b"http://localhost@evil.example:80/livez", 403),
        (b"http://localhost/livez", 200),
    ],
)
def test_the_host_of_an_absolute_target_counts(raw: socket.socket, target: bytes, status: int) -> None:
    raw.sendall(b"GET " + target + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert read_all(raw).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("trailer", [b"x-request-id: from-trailer", b"host: evil.example", b"content-type: text/plain"])
@pytest.mark.parametrize("cut", [False, True])
def test_trailers_are_no_headers(raw: socket.socket, trailer: bytes, cut: bool) -> None:
    """Whoever checks heads before this server has not seen them."""
    headers = (b"transfer-encoding: chunked", b"x-request-id: mine", b"connection: close")
    head, body = request(b"", *headers), b"%x\r\n%b\r\n0\r\n%b\r\n\r\n" % (len(GOOD), GOOD, trailer)
    raw.sendall(head if cut else head + body)
    if cut:
        raw.sendall(body)
    answer = read_all(raw, or_reset=True)
    assert answer.startswith(b"HTTP/1.1 200") and b"x-request-id: mine" in answer


@pytest.mark.parametrize("hosts", [(b"host: evil", b"host: localhost"), (b"host: localhost", b"host: localhost")])
def test_more_than_one_host_is_a_400(raw: socket.socket, hosts: tuple[bytes, ...]) -> None:
    raw.sendall(b"\r\n".join((b"GET /v1/models HTTP/1.1", *hosts, b"connection: close", b"", b"")))
    status, error = read_error(raw)
    assert status == 400 and error["message"].startswith("Host: given more than once")
