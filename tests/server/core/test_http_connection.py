"""Connections: how long they stay, HTTP/1.0, and clients that close their half of one after the request."""

from __future__ import annotations

import asyncio
import json
import re
import socket

import msgspec
import pytest

from minisgl.config import ConfigError, Limits, check_ranges
from minisgl.message import AbortRequest
from minisgl.server.core.http import ConnectionLimiter
from minisgl.step import FinishReason
from tests.helpers.server import CONFIG, EOS, Frontend, events, failed_step, frontend, one_token, read_all, read_until

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


def request(prompt: str, *headers: str, version: str = "1.1", **body: object) -> bytes:
    content = json.dumps({"prompt": prompt, **body})
    lines = (f"POST {TEXT} HTTP/{version}", "host: localhost", f"content-length: {len(content)}", *headers, "", content)
    return "\r\n".join(lines).encode()


def read_some(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        assert part, found
        found += part
    return found


def split(answer: bytes) -> tuple[str, str]:
    """Head in lower case, and body."""
    while answer.startswith(INTERIM):
        answer = answer.removeprefix(INTERIM)
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.decode().lower(), body.decode()


def exchange(server: Frontend, sent: bytes, *, half_close: bool = False) -> tuple[str, str]:
    with server.connect() as connection:
        if half_close:  # the end travels with the last bytes, so that no answer comes before it
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        connection.sendall(sent)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        return split(read_all(connection))


# ---------------------------------------------------------------------------------------------------------- keep-alive


@pytest.mark.python_front_end
def test_idle_connection_gets_the_keep_alive_timeout(server: Frontend) -> None:
    assert Limits().keep_alive_timeout == 75
    config = msgspec.structs.replace(CONFIG, limits=Limits(keep_alive_timeout=1000))
    with frontend(config=config) as longer:
        for one, least in ((server, 70.0), (longer, 990.0)):
            with one.connect(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n") as connection:
                assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
                one.wait_until(lambda one=one: any(it.timeout_keep_alive_task for it in one.connections))  # type: ignore[misc]
                (timer,) = (it.timeout_keep_alive_task for it in one.connections)
                assert one.on_loop(lambda timer=timer: timer.when() - asyncio.get_running_loop().time()) > least  # type: ignore[misc]


def test_keep_alive_timeout_zero_is_rejected() -> None:
    with pytest.raises(ConfigError, match="--keep-alive-timeout 0: must be at least 1"):
        check_ranges(Limits(keep_alive_timeout=0))


# ------------------------------------------------------------------------------------------------------------ HTTP/1.0


@pytest.mark.parametrize(
    ("stream", "asks"),
    [(False, []), (True, []), (True, ["connection: keep-alive"]), (False, ["connection: close"])],
)
def test_http_1_0_gets_no_chunks(server: Frontend, stream: bool, asks: list[str]) -> None:
    head, body = exchange(server, request("say:words", *asks, version="1.0", stream=stream))
    assert " 200 " in head and "transfer-encoding" not in head and "connection: close" in head
    if stream:
        assert "content-length" not in head
        *pieces, done = events(body)
        assert "".join(one["choices"][0]["text"] for one in pieces) == "words" and done == "[DONE]"
    else:
        assert json.loads(body)["choices"][0]["text"] == "words"


def test_a_stream_that_fails_in_http_1_0(server: Frontend) -> None:
    with server.connect(request("fails hang:ab", version="1.0", stream=True)) as connection:
        found = read_until(connection, b'b"')
        server.engine.send(failed_step(server.engine.wait_for_request("fails ").req_id, "went wrong"))
        *_, error, done = events(split(found + read_all(connection))[1])
    assert error["error"]["message"] == "went wrong" and done == "[DONE]"


def test_http_1_0_stays_open_if_asked(server: Frontend) -> None:
    with server.connect() as connection:
        for _ in range(3):
            connection.sendall(request("say:a", "connection: Keep-Alive", version="1.0"))
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += connection.recv(1)
            head = answer.decode().lower()
            assert "connection: keep-alive" in head and "connection: close" not in head
            length = int(head.partition("content-length: ")[2].split("\r\n")[0])
            assert json.loads(read_some(connection, length))["choices"][0]["text"] == "a"
        connection.sendall(request("say:b", version="1.0"))
        assert "connection: close" in split(read_all(connection))[0]


def test_http_1_0_needs_no_host(server: Frontend) -> None:
    head, body = exchange(server, b"GET /v1/models HTTP/1.0\r\n\r\n")
    assert " 200 " in head and json.loads(body)["object"] == "list"
    assert " 400 " in exchange(server, b"GET /v1/models HTTP/1.1\r\nconnection: close\r\n\r\n")[0]


# --------------------------------------------------------------------------------------------------------- half closed


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_and_then_the_end_is_answered(server: Frontend, stream: bool, version: str) -> None:
    """The engine waits for the end: one that comes behind the first token is a client that leaves."""
    marker = f"ends {version} {stream}"
    with server.connect(request(f"{marker} hang:", version=version, stream=stream)) as connection:
        connection.shutdown(socket.SHUT_WR)
        req_id = server.engine.wait_for_request(marker).req_id
        for char in b"words":
            server.engine.send(one_token(req_id, char))
        server.engine.send(one_token(req_id, EOS, FinishReason.STOP))
        head, body = split(read_all(connection))
    assert " 200 " in head and "connection: close" in head
    assert "".join(re.findall(r'"text":"(\w*)"', body)) == "words"
    assert not stream or "data: [DONE]" in body


@pytest.mark.parametrize("path", ["/livez", "/v1/models", "/metrics", "/nowhere"])
def test_other_routes_are_answered_too(server: Frontend, path: str) -> None:
    sent = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    assert (" 404 " if path == "/nowhere" else " 200 ") in exchange(server, sent, half_close=True)[0]


def test_pipelined_requests_and_then_the_end(server: Frontend) -> None:
    sent = b"".join(request(f"say:{i}") for i in range(4))
    with server.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)  # see exchange
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answers = [one for one in read_all(connection).split(b"HTTP/1.1 ")[1:] if one.startswith(b"200 ")]
    assert [json.loads(split(one)[1])["choices"][0]["text"] for one in answers] == list("0123")


def test_long_wait_after_half_close_sends_interim_responses(server: Frontend) -> None:
    """That is how those who are gone are found out."""
    with server.connect(request("patient hang:")) as connection:
        connection.shutdown(socket.SHUT_WR)
        waiting = server.engine.wait_for_request("patient ")
        assert read_some(connection, 3 * len(INTERIM)) == 3 * INTERIM
        assert server.num_live == 1
    server.engine.wait_for_end(AbortRequest, {waiting.req_id})


def test_reset_after_half_close_cancels_the_request(server: Frontend) -> None:
    with server.connect(request("leaves hang:")) as connection:
        connection.shutdown(socket.SHUT_WR)
        left = server.engine.wait_for_request("leaves ")
    server.engine.wait_for_end(AbortRequest, {left.req_id})
    server.wait_until(lambda: not server.connections)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_reset_right_after_the_request_cancels_it(server: Frontend, stream: bool, version: str) -> None:
    marker = f"at once {stream} {version} "
    with server.connect() as connection:
        server.wait_until(lambda: bool(server.connections) or server.gateway is not None)
        connection.sendall(request(marker + "hang:", version=version, stream=stream))
    server.wait_until(lambda: not server.connections and server.num_live == 0)
    server.engine.wait_for_end(AbortRequest, {one.req_id for one in server.engine.requests(marker)})


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}], ids=["fast", "passed on"])
def test_reset_with_the_first_token_cancels_the_stream(server: Frontend, more: dict[str, object]) -> None:
    """The answer has begun, so that nothing more is asked; what was written has come back."""
    marker = f"first {more} "
    with server.connect(request(marker + "hang:", stream=True, **more)) as connection:
        connection.shutdown(socket.SHUT_WR)
        left = server.engine.wait_for_request(marker)
        read_some(connection, len(INTERIM))
        server.engine.send(one_token(left.req_id, ord("x")))
        unread = b""
        while b"data: " not in unread:
            unread = connection.recv(1 << 16, socket.MSG_PEEK)
            if unread.startswith(INTERIM):
                read_some(connection, len(INTERIM))
    server.engine.wait_for_end(AbortRequest, {left.req_id})
    server.wait_until(lambda: not server.connections)


def test_half_close_within_a_request_is_a_disconnect(server: Frontend) -> None:
    whole = request("half say:a")
    for sent in (whole[:-1], whole[:40], b"GET /livez HTTP/1.1\r\nhost: localhost\r\n"):
        assert exchange(server, sent, half_close=True) == ("", "")
    assert not server.engine.requests("half ")


@pytest.mark.python_front_end  # the gateway's own tests have it
def test_connections_over_the_limit_get_503(monkeypatch: pytest.MonkeyPatch, front_end: str) -> None:
    """One address has three quarters of them."""
    monkeypatch.setattr(ConnectionLimiter, "MOST", 4)
    with frontend(front_end=front_end) as server:
        open_ = [server.connect() for _ in range(3)]
        for one in open_:
            one.sendall(request("say:a"))
            assert one.recv(65536).startswith(b"HTTP/1.1 200")
        with server.connect() as refused:
            head, body = split(read_all(refused))
        assert head.startswith("http/1.1 503") and json.loads(body)["error"]["code"] == "too_many_connections"
        open_.pop().close()

        def is_served() -> bool:
            with server.connect(request("say:a", "connection: close")) as one:
                return split(read_all(one))[0].startswith("http/1.1 200")

        while not is_served():  # the server has not seen yet that the other one has gone
            pass
        for one in open_:
            one.close()


def test_one_address_gets_three_quarters_of_connections() -> None:
    crowd = ConnectionLimiter(8)
    assert [crowd.enter("a") for _ in range(7)] == [True] * 6 + [False]
    assert [crowd.enter("b") for _ in range(3)] == [True, True, False]
    crowd.leave("a")
    assert crowd.enter("b") and not crowd.enter("a")
