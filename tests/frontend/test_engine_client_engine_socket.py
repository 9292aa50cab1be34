"""The connection to an engine process never holds the event loop up, and loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from minisgl.frontend.engine_client import MAX_FRAMES, ProcessClient
from minisgl.frontend.engine_socket import EngineSocket
from minisgl.message import EngineFailed, Hello, LoadProgress, Watch
from minisgl.message.codec import FrameReader, MessageError, decode_to_engine, encode, framed


def listening(folder: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.bind(str(folder / "engine"))
    found.listen()
    found.setblocking(False)
    return found


class Peer:
    """Who accepted, on the same event loop."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._frames = FrameReader()

    @classmethod
    async def of(cls, listener: socket.socket) -> Peer:
        found, _ = await asyncio.get_running_loop().sock_accept(listener)
        found.setblocking(False)
        return cls(found)

    async def next(self) -> bytes:
        while (frame := self._frames.next()) is None:
            self._frames.feed(await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16))
        return frame

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)


@contextlib.asynccontextmanager
async def linked(folder: Path) -> AsyncIterator[tuple[EngineSocket, Peer, asyncio.Event]]:
    """Both ends of a connection; the event is set when something has come to the first."""
    readable, link = asyncio.Event(), EngineSocket(f"ipc://{folder}/engine")
    with listening(folder) as listener:
        link.open(readable.set)
        peer = await Peer.of(listener)
        yield link, peer, readable
        link.close()
        peer.socket.close()


async def test_a_client_connects_as_soon_as_the_engine_listens(tmp_path: Path) -> None:
    link = EngineSocket(f"ipc://{tmp_path}/engine")
    link.write([b"before"])
    link.open(lambda: None)
    await asyncio.sleep(0)
    assert link.read() is None
    with listening(tmp_path) as listener:
        peer = await Peer.of(listener)
        link.write([b"after"])
        assert [await peer.next(), await peer.next()] == [b"before", b"after"]
        peer.socket.close()
    link.close()
    link.close()


async def test_a_socket_that_never_connected_can_be_closed(tmp_path: Path) -> None:
    link = EngineSocket(f"ipc://{tmp_path}/engine")
    link.open(lambda: None)
    link.close()


async def test_what_the_engine_process_does_not_read_waits_and_comes_in_order(tmp_path: Path) -> None:
    async with linked(tmp_path) as (link, peer, _):
        sent = [bytes([i]) * 300_000 for i in range(20)]
        for frame in sent:
            link.write([frame])
        assert link.num_unsent, "more than a socket takes"
        assert [await peer.next() for _ in sent] == sent


async def test_parts_of_a_frame_come_whole_and_are_not_copied(tmp_path: Path) -> None:
    """Images are such parts. More of them than one call sends, and empty ones, are no exception."""
    async with linked(tmp_path) as (link, peer, _):
        large = bytearray(3_000_000)
        frame = [b"head", large, b"", *(bytes([i]) * i for i in range(100)), large]
        link.write(frame)
        link.write([b""])
        with pytest.raises(BufferError):  # what is to be sent is a view of it
            large.append(0)
        assert len(large) < link.num_unsent < 2 * len(large) + 10_000
        assert [await peer.next(), await peer.next()] == [b"".join(frame), b""]
        assert link.num_unsent == 0


async def test_frames_come_before_the_end(tmp_path: Path) -> None:
    async with linked(tmp_path) as (link, peer, readable):
        link.write([b"unread"])  # the kernel says "reset" then
        await peer.send(framed(b"one") + framed(b"two"))
        peer.socket.close()
        await readable.wait()
        assert [link.read(), link.read()] == [b"one", b"two"]
        link.write([b"for nobody"])
        with pytest.raises(EOFError):
            link.read()


async def test_an_invalid_frame_is_an_error(tmp_path: Path) -> None:
    async with linked(tmp_path) as (link, peer, readable):
        await peer.send(b"\xff\xff\xff\xff")
        await readable.wait()
        with pytest.raises(MessageError, match="too long"):
            link.read()


async def test_hello_comes_first_and_the_end_is_told(tmp_path: Path) -> None:
    client = ProcessClient(f"ipc://{tmp_path}/engine", "a name")
    client.start()
    client.watch(steps=True, tree=False)
    with listening(tmp_path) as listener:
        peer = await Peer.of(listener)
        said = decode_to_engine(await peer.next()) + decode_to_engine(await peer.next())
        assert said == [Hello("a name"), Watch(True, False)]
        peer.socket.close()
    await client.lost.wait()
    assert client.failure is None, "whoever started the process knows more"
    client.fail("it died")
    assert client.ready is not None and "it died" in str(client.ready.exception())
    await client.close()


async def test_an_unexplained_end_is_a_failure_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.frontend.engine_client.LOST_S", 0.01)
    client = ProcessClient(f"ipc://{tmp_path}/engine")
    client.start()
    with listening(tmp_path) as listener:
        (await Peer.of(listener)).socket.close()
    await client.lost.wait()
    while client.failure is None:
        await asyncio.sleep(0)
    assert client.failure == "the engine process has ended the connection"
    await client.close()


async def test_last_words_are_the_reason(tmp_path: Path) -> None:
    client = ProcessClient(f"ipc://{tmp_path}/engine")
    client.start()
    with listening(tmp_path) as listener:
        peer = await Peer.of(listener)
        await peer.send(framed(encode([EngineFailed("out of memory")])))
        peer.socket.close()
    while client.failure is None:
        await asyncio.sleep(0)
    assert client.failure == "out of memory"
    await client.close()


async def test_a_turn_takes_a_few_frames_and_others_have_theirs_between(tmp_path: Path) -> None:
    lines: list[int] = []
    turns: list[int] = []
    client = ProcessClient(f"ipc://{tmp_path}/engine")
    client.on_progress = lambda text, done, total: lines.append(done)
    with listening(tmp_path) as listener:
        client.start()
        peer = await Peer.of(listener)
        await peer.send(b"".join(framed(encode([LoadProgress("x" * 500, i)])) for i in range(100)))
        while len(lines) < 100:
            turns.append(len(lines))
            await asyncio.sleep(0)
        peer.socket.close()
    assert lines == list(range(100))
    assert max(b - a for a, b in itertools.pairwise(turns)) <= MAX_FRAMES
    await client.close()


async def test_an_incomplete_frame_causes_no_busy_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ProcessClient(f"ipc://{tmp_path}/engine")
    seen: list[str] = []
    client.on_progress = lambda text, done, total: seen.append(text)
    calls = 0
    read = EngineSocket.read

    def counted(self: EngineSocket) -> bytes | None:
        nonlocal calls
        calls += 1
        return read(self)

    monkeypatch.setattr(EngineSocket, "read", counted)
    with listening(tmp_path) as listener:
        client.start()
        peer = await Peer.of(listener)
        data = framed(encode([LoadProgress("one")])) + framed(encode([LoadProgress("two")]))
        await peer.send(data[:-3])
        while not seen:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert calls < 10
        await peer.send(data[-3:])
        while len(seen) < 2:
            await asyncio.sleep(0)
        peer.socket.close()
    await client.close()
