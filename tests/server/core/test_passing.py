"""A request passed on to a server that a test plays: what that is sent, and what is taken of its answer, and when."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from minisgl.server.core.passing import Lost, ask, request_bytes
from tests.helpers.seconds import WAIT_S


def test_a_path_goes_on_as_it_came_and_names_no_other_server() -> None:
    for path in (b"//other:80/x", b"/%2Fother/x?y=%2F", b"/\\other", b"/x@other/"):
        sent = b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % path
        assert request_bytes("HEAD", path, [(b"te", b"x")]) == sent


def test_a_server_waits_for_who_takes_nothing_and_all_whole_chunks_are_taken_before_its_end() -> None:
    num_written, size, most = 0, 1 << 16, 1 << 10

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_written
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for num_written in range(1, most + 1):  # noqa: B007 the test reads it
            writer.write(b"%x\r\n%b\r\n" % (size, b"x" * size))
            await writer.drain()
        writer.write(b"9\r\nhalf")
        writer.close()

    async def run() -> None:
        async with asyncio.timeout(WAIT_S), await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            with contextlib.closing(await ask(server.sockets[0].getsockname(), request_bytes("GET", b"/", []))) as it:
                before, taken = 0, 0
                while before != num_written or not before:  # until it is held up
                    before = num_written
                    await asyncio.sleep(0.2)
                assert num_written < most
                with pytest.raises(Lost, match=r"^ended the connection$"):
                    async for piece in it.pieces():
                        taken += len(piece)
                assert taken == most * size

    asyncio.run(run())
