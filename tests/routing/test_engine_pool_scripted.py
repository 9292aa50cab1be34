"""A pool between engines and front ends that say what a test wants them to: who stalls, who talks nonsense, who comes
late."""

from __future__ import annotations

import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
import pytest

from minisgl._rust import EnginePool
from minisgl.message import (
    SCHEMA_VERSION,
    AddRequest,
    ClearCache,
    EngineFailed,
    EngineReady,
    EngineSays,
    EngineState,
    EngineStats,
    Heartbeat,
    LoadProgress,
    Shutdown,
    StepTokens,
    ToEngine,
)
from minisgl.message.codec import decode_said, encode, framed
from minisgl.message.heartbeat import TIMES
from minisgl.prompt_image import PromptImage
from minisgl.runner.several import EVERY_POOL
from tests.helpers.e2e import until
from tests.helpers.hub import add, streams
from tests.helpers.peers import WAIT_S, EnginePeer, FrontEndPeer
from tests.helpers.server import READY

QUIET = msgspec.structs.replace(TIMES, silent_s=WAIT_S, silence_s=WAIT_S)  # engines here send no heartbeats
STATS = EngineStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)


class Scripted:
    """A pool of engines that a test speaks for."""

    def __init__(self, folder: Path, number: int = 2, **router: object) -> None:
        self.listen = folder / "pool"
        self.address = f"ipc://{self.listen}"
        self.sockets = [folder / f"engine-{engine}" for engine in range(number)]
        config = {
            "listen": str(self.listen),
            "engines": [*map(str, self.sockets)],
            "router": {"policy": "round_robin", **router},
            "step_timeout": 60.0,
            **EVERY_POOL,
            "watch": QUIET,
        }
        self.pool = EnginePool(msgspec.json.encode(config).decode())
        self.engines: list[EnginePeer] = []

    def start(self, greeting: bytes = framed(encode([READY])), number: int | None = None) -> None:
        self.engines += [EnginePeer(f"ipc://{path}", greeting) for path in self.sockets[:number]]
        for engine in self.engines:
            engine.receive(WAIT_S)  # the pool connects

    def requests(self, engine: int, number: int) -> list[AddRequest]:
        """So many that have come to this engine."""
        found: list[ToEngine] = []
        while len(found) < number:
            found += [message for frame in self.engines[engine].receive(WAIT_S) for message in frame]
        assert all(isinstance(one, AddRequest) for one in found)
        return [one for one in found if isinstance(one, AddRequest)]

    def peer(self) -> FrontEndPeer:
        return FrontEndPeer(self.address)

    def close(self) -> None:
        self.pool.stop()
        for engine in self.engines:
            engine.close()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with tempfile.TemporaryDirectory() as folder:
        found = Scripted(Path(folder))
        yield found
        found.close()


def tokens(req_ids: list[int], token: int = 5, reason: int = 0) -> StepTokens:
    number = len(req_ids)
    arrays = np.array(req_ids, np.int64), np.full(number, token, np.int32), np.full(number, reason, np.int32)
    return StepTokens(1, *(array.tobytes() for array in arrays))


def test_the_socket_is_its_users_alone_and_goes(scripted: Scripted) -> None:
    assert stat.S_IMODE(scripted.listen.stat().st_mode) == 0o600
    scripted.pool.stop()
    scripted.pool.stop()
    assert not scripted.listen.exists()


def test_an_invalid_pool_configuration_is_an_error() -> None:
    with tempfile.TemporaryDirectory() as folder:
        good = {"listen": f"{folder}/pool", "engines": ["e"], "router": {"policy": "random"}, "step_timeout": 1.0}
        good |= EVERY_POOL
        for change, reason in [
            ({"engines": []}, "engines: must name at least one"),
            ({"router": {"policy": "best"}}, "unknown variant"),
            ({"router": {"page_size": 0}}, "page_size"),
            ({"more": 1}, "unknown field"),
        ]:
            with pytest.raises(ValueError, match=reason):
                EnginePool(msgspec.json.encode({**good, **change}).decode())
        with pytest.raises(OSError):
            EnginePool(msgspec.json.encode({**good, "listen": f"{folder}/nowhere/pool"}).decode())
        pool = EnginePool(msgspec.json.encode(good).decode())
        with pytest.raises(ValueError, match="engine 1: must be below 1"):
            pool.restarting(1, True)
        pool.stop()


def test_a_late_front_end_gets_earlier_messages(scripted: Scripted) -> None:
    scripted.start(
        framed(encode([LoadProgress("loading"), LoadProgress("weights", 1, 2), LoadProgress("weights", 2, 2)]))
    )
    with scripted.peer() as early:
        early.until(lambda got: sum(isinstance(one, EngineSays) for one in got) >= 2)
    for engine in scripted.engines:
        engine.send_messages([READY, STATS])
    with scripted.peer() as watching:
        watching.next(EngineReady)
        watching.until(
            lambda got: (
                {0, 1}
                <= {one.engine for one in got if isinstance(one, EngineSays) and STATS in decode_said(one.messages)}
            )
        )
    with scripted.peer() as late:
        late.next(EngineReady)
        said = [one for one in late.received if isinstance(one, EngineSays)]
        of_first = [message for one in said if one.engine == 0 for message in decode_said(one.messages)]
        assert of_first == [LoadProgress("loading"), LoadProgress("weights", 2, 2), STATS]
        assert [m for m in late.received if isinstance(m, EngineState)] == [EngineState(i, "ready") for i in (0, 1)]
        ready = [one for one in late.received if isinstance(one, EngineReady)]
        together = msgspec.structs.replace(READY, num_pages=2 * READY.num_pages, engine_details="2 engines")
        assert ready == [together]
        late.next(Heartbeat)


def test_an_engine_of_another_version_is_named(scripted: Scripted) -> None:
    foreign = (SCHEMA_VERSION + 1).to_bytes(2, "little") + encode([READY])[2:]
    with scripted.peer() as peer:
        scripted.start(framed(foreign), 1)
        text = peer.next(EngineFailed).text
    assert f"schema version {SCHEMA_VERSION + 1}, this side speaks {SCHEMA_VERSION}" in text
    assert text.startswith("engine 0: ")


def test_a_front_end_of_another_version_is_disconnected_and_others_continue(scripted: Scripted) -> None:
    scripted.start()
    with scripted.peer() as good, scripted.peer() as bad:
        good.next(EngineReady)
        bad.next(EngineReady)
        bad.send(add(0, [1], 5))
        (request,) = scripted.requests(0, 1)
        bad.send_bytes(framed((SCHEMA_VERSION + 1).to_bytes(2, "little") + encode([Shutdown()])[2:]))
        text = bad.next(EngineFailed).text
        assert f"schema version {SCHEMA_VERSION + 1}, this side speaks {SCHEMA_VERSION}" in text
        assert not bad.to_the_end()[-1:] or bad.received[-1] == EngineFailed(text)
        line = good.next(LoadProgress).text
        assert line.startswith("test was disconnected: schema version") and "; 1 of its requests are" in line
        good.send(add(0, [2], 5))
        (other,) = scripted.requests(1, 1)
        scripted.engines[0].send_messages([tokens([request.req_id], reason=3)])
        scripted.engines[1].send_messages([tokens([other.req_id], reason=2)])
        good.until(lambda _: good.num_ended == 1)
        assert streams(good.received) == {0: ([5], 2)}
        until(lambda: scripted.pool.readings()["num_live"] == 0, "the engine's last word is not heard")


def test_too_many_front_ends_are_told(scripted: Scripted) -> None:
    peers = [scripted.peer() for _ in range(65)]
    assert peers[-1].next(EngineFailed).text == "the engine process has too many front ends"
    for peer in peers:
        peer.close()


def test_the_engine_waits_for_a_front_end_that_does_not_read(scripted: Scripted) -> None:
    scripted.start()
    engine = scripted.engines[0]
    connection = engine.connections[0]
    with scripted.peer() as stalled, scripted.peer() as other:
        stalled.next(EngineReady)
        other.next(EngineReady)
        stalled.send(add(0, [1], 10**6))
        (request,) = scripted.requests(0, 1)
        frame = framed(encode([tokens([request.req_id])]))
        connection.settimeout(1.0)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 100_000:
                connection.sendall(frame)
                sent += 1
        assert sent < 10_000, "the pool takes all that comes"
        other.send(add(0, [2], 10))  # one that can follow: now the engine is heard again
        (own,) = scripted.requests(1, 1)
        scripted.engines[1].send_messages([tokens([own.req_id])])
        other.next(StepTokens)
        connection.settimeout(WAIT_S)
        for _ in range(1000):
            connection.sendall(frame)


def test_a_front_end_that_reads_late_gets_all_messages(scripted: Scripted) -> None:
    """Its socket has room again before what is queued for it has left."""
    scripted.start()
    with scripted.peer() as peer:
        peer.next(EngineReady)
        peer.send(*(add(number, [1], 10**6) for number in range(512)))
        ids = [request.req_id for request in scripted.requests(0, 256)]
        frame, connection, num_frames = framed(encode([tokens(ids)])), scripted.engines[0].connections[0], 1000
        connection.settimeout(WAIT_S)
        sender = threading.Thread(target=lambda: [connection.sendall(frame) for _ in range(num_frames)], daemon=True)
        sender.start()
        num_rows = 0
        while num_rows < num_frames * len(ids):
            time.sleep(0.0005)  # it cannot follow
            num_rows += sum(len(one.req_ids) // 8 for one in peer.receive() if isinstance(one, StepTokens))
        sender.join(WAIT_S)


def test_a_front_end_that_stalls_while_others_continue_is_disconnected(scripted: Scripted) -> None:
    scripted.start()
    with scripted.peer() as stalled, scripted.peer() as other:
        stalled.next(EngineReady)
        other.next(EngineReady)
        stalled.send(*(add(number, [1], 10**6) for number in range(2048)))
        other.send(add(0, [2], 10**6))
        mine = [request.req_id for request in scripted.requests(0, 1024)]
        message = tokens(mine, reason=0)
        frame = framed(encode([message]))
        num_frames = (64 << 20) // len(frame) + 100
        connection = scripted.engines[0].connections[0]
        connection.settimeout(WAIT_S)
        told: Future[str] = Future()

        def follow() -> None:  # to the end: if nobody could follow, the pool would wait
            told.set_result(other.next(LoadProgress).text)
            other.to_the_end()

        reader = threading.Thread(target=follow, daemon=True)
        reader.start()
        for _ in range(num_frames):
            connection.sendall(frame)
        line = told.result(WAIT_S)
        other.socket.shutdown(socket.SHUT_RDWR)
        reader.join(WAIT_S)
        assert line == "test was disconnected: it does not read its messages; 2048 of its requests are aborted"


def test_images_reach_each_engine_and_the_next_after_a_loss(scripted: Scripted) -> None:
    """48 MiB of pixels, the most that a request has by default."""
    scripted.start()
    images = tuple(PromptImage(bytes([i]) * 32, 1024 * i, 1024, (64, 64), bytes([i]) * (3 << 20)) for i in range(16))
    with scripted.peer() as peer:
        peer.next(EngineReady)
        peer.send(*(msgspec.structs.replace(add(i, range(3), 5), images=images) for i in range(2)))
        (first,), (second,) = scripted.requests(0, 1), scripted.requests(1, 1)
        assert first.images == second.images == images
        scripted.engines[0].send_messages([tokens([first.req_id])])
        peer.next(StepTokens)
        scripted.engines[0].close()
        (moved,) = scripted.requests(1, 1)
        assert moved.num_generated == 1 and moved.images == images


@pytest.mark.slow
def test_images_wait_in_their_front_end_while_no_engine_reads(scripted: Scripted) -> None:
    """Texts of other front ends do not wait for them."""
    scripted.start()
    pixels, number = bytes(48 << 20), 12
    with scripted.peer() as peer, scripted.peer() as other:
        for one in (peer, other):
            one.next(EngineReady)

        def send() -> None:
            for i in range(number):
                image = PromptImage(bytes([i]) * 32, 0, 1, (1, 1), pixels)
                peer.send(msgspec.structs.replace(add(i, range(3), 5), images=(image,)))

        def num_live() -> int:
            for engine in scripted.engines:
                engine.send_messages([Heartbeat("idle", 0.0)])
            return int(scripted.pool.readings()["num_live"])

        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        until(lambda: num_live() >= 6, "the pool reads too little")
        other.send(add(0, range(3), 5))
        for _ in range(4):
            other.next(Heartbeat)
            live = num_live()
        assert sending.is_alive() and 7 <= live <= 9, live
        found = 0
        while found < number + 1:
            num_live()
            found += sum(len(frame) for engine in scripted.engines for frame in engine.receive(0.01))
        sending.join(WAIT_S)
        assert not sending.is_alive()


def test_shutdown_and_clear_cache_reach_every_engine(scripted: Scripted) -> None:
    scripted.start()
    with scripted.peer() as peer:
        peer.next(EngineReady)
        for message in (ClearCache(), Shutdown()):
            peer.send(message)
            for engine in scripted.engines:
                found: list[ToEngine] = []
                while not found:
                    found += [one for frame in engine.receive(WAIT_S) for one in frame]
                assert found == [message]
        for engine in scripted.engines:
            engine.close()
        peer.to_the_end()
        assert not any(isinstance(one, EngineFailed) for one in peer.received)
    scripted.engines.clear()
