"""What all front ends of an engine process are told: what was said before, heartbeats, last words; and its waking."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.message import AddRequest, EngineFailed, EngineReady, Heartbeat, LoadProgress
from minisgl.message.codec import Codec
from minisgl.message.heartbeat import Activity
from minisgl.runner.front_end import Connection
from minisgl.runner.front_ends import FrontEnds, ParentGone
from tests.helpers.hub import add
from tests.helpers.peers import FrontEndPeer
from tests.helpers.seconds import WAIT_S
from tests.helpers.server import READY, STATS


@pytest.fixture
def front_ends(tmp_path: Path) -> Iterator[tuple[FrontEnds, str, int]]:
    """With its address and the end of its lifeline."""
    lifeline, parent = os.pipe()
    found = FrontEnds(tmp_path / "engine", Codec(), lifeline, Activity())
    yield found, f"ipc://{tmp_path}/engine", parent
    found.close()
    os.close(lifeline)
    os.close(parent)
    assert not list(tmp_path.iterdir())


def test_only_its_own_user_may_connect(front_ends: tuple[FrontEnds, str, int]) -> None:
    assert Path(front_ends[1].removeprefix("ipc://")).stat().st_mode & 0o777 == 0o600


def test_a_late_front_end_gets_earlier_progress(front_ends: tuple[FrontEnds, str, int]) -> None:
    one, address, _ = front_ends
    one.send([LoadProgress("a line")])
    for done in range(1000):
        one.send([LoadProgress("weights", done, 1000)])
    with FrontEndPeer(address) as early:
        one.send([READY])  # whoever loads takes connections in
        one.send([STATS, LoadProgress("while it serves")])
        early.until(lambda got: len(got) == 5)
        assert early.received[:4] == [LoadProgress("a line"), LoadProgress("weights", 999, 1000), READY, STATS]
        with FrontEndPeer(address) as late:
            one.beat(Heartbeat("idle", 0.0))
            late.until(lambda got: len(got) == 5)
            assert late.received == [*early.received[:4], Heartbeat("idle", 0.0)]


def test_a_front_end_that_connects_during_a_send_gets_the_message_once(front_ends: tuple[FrontEnds, str, int]) -> None:
    one, address, _ = front_ends
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(1e-4):  # who takes a lock again at once starves others on a busy machine
            one.beat(Heartbeat("idle", 0.0))

    thread = threading.Thread(target=beat)
    thread.start()
    peers = []
    for i in range(40):
        peers.append(FrontEndPeer(address))
        one.send([LoadProgress(f"line {i}")])
    one.send([LoadProgress("end")])
    for peer in peers:
        peer.until(lambda got: LoadProgress("end") in got)
        lines = [found.text for found in peer.received if isinstance(found, LoadProgress)]
        assert lines == [*(f"line {i}" for i in range(40)), "end"]
        peer.close()
    stop.set()
    thread.join()


def test_heartbeats_reach_readers_and_never_block(front_ends: tuple[FrontEnds, str, int]) -> None:
    one, address, _ = front_ends
    with FrontEndPeer(address) as reads, FrontEndPeer(address) as sleeps:
        one.send([READY])
        for _ in range(2000):
            one.beat(Heartbeat("working", 1.0))
            reads.next(Heartbeat)
        assert not any(each.waits for each in one.connections.values()), "the next is worth more than the last"
        sleeps.next(EngineReady)


def test_droppable_messages_are_not_queued_for_a_slow_front_end(front_ends: tuple[FrontEnds, str, int]) -> None:
    one, address, _ = front_ends
    with FrontEndPeer(address) as sleeps:
        one.send([READY])
        for _ in range(3000):
            one.send([STATS])
        (connected,) = one.connections.values()
        assert not connected.waits
        one.send([LoadProgress("x" * 500_000)])
        one.send([STATS])
        one.send([LoadProgress("the last")])
        assert connected.waits
        reader = threading.Thread(target=lambda: sleeps.until(lambda got: LoadProgress("the last") in got[-1:]))
        reader.start()
        while reader.is_alive():
            one.flush(10)
        assert sleeps.received[-2:] == [LoadProgress("x" * 500_000), LoadProgress("the last")]


def slowly(write: Callable[[Connection, bytes | memoryview], int]) -> Any:
    """In pieces, and others may run between."""

    def some_of(self: Connection, data: bytes | memoryview) -> int:
        sent = write(self, data[:700])
        time.sleep(0)
        return sent

    return some_of


def test_messages_of_two_threads_arrive_in_whole_frames(
    front_ends: tuple[FrontEnds, str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, address, _ = front_ends
    line = LoadProgress("x" * 1000)
    with FrontEndPeer(address) as peer:
        one.send([READY])
        stop = threading.Event()

        def beat() -> None:
            while not stop.is_set():
                one.beat(Heartbeat("idle", 0.0))

        thread = threading.Thread(target=beat)
        monkeypatch.setattr(Connection, "_write", slowly(Connection._write))
        thread.start()
        reader = threading.Thread(target=lambda: peer.until(lambda got: got.count(line) == 300))
        reader.start()
        for _ in range(300):
            one.send([line])
        while reader.is_alive():
            one.flush(10)
        stop.set()
        thread.join()
        assert peer.received.count(line) == 300


def test_last_words_reach_all_front_ends_and_a_late_one(front_ends: tuple[FrontEnds, str, int]) -> None:
    one, address, _ = front_ends
    with FrontEndPeer(address) as first, FrontEndPeer(address) as second:
        one.send([READY])
        one.last_words("it broke", 10_000, 10_000)
        assert first.next(EngineFailed) == second.next(EngineFailed) == EngineFailed("it broke")


def test_last_words_wait_for_the_first_front_end(front_ends: tuple[FrontEnds, str, int]) -> None:
    one, address, _ = front_ends
    thread = threading.Thread(target=one.last_words, args=("no such model", 10_000, 60_000))
    thread.start()
    with FrontEndPeer(address) as peer:
        assert peer.next(EngineFailed) == EngineFailed("no such model")
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_last_words_do_not_wait_without_a_parent(front_ends: tuple[FrontEnds, str, int]) -> None:
    one, _, parent = front_ends
    os.dup2(os.open(os.devnull, os.O_RDONLY), parent)  # its end of the pipe is closed
    one.last_words("no such model", 10_000, 10_000_000)
    with pytest.raises(ParentGone):
        one.receive(block=True)


def test_a_blocking_receive_can_be_woken(front_ends: tuple[FrontEnds, str, int]) -> None:
    """In any thread, before or while it waits; once, however often it was called; messages come as always."""
    one, address, _ = front_ends
    for _ in range(3):
        one.wake()
    assert one.receive(block=True) == []
    thread = threading.Thread(target=one.wake)
    thread.start()
    assert one.receive(block=True) == []
    thread.join()
    with FrontEndPeer(address) as peer:
        one.wake()
        assert one.receive(block=False) == []
        peer.send(add(0, [1], 2))
        assert [type(message) for message in one.receive(block=True)] == [AddRequest]


def test_a_wake_is_never_lost_nor_waits(front_ends: tuple[FrontEnds, str, int]) -> None:
    """Nobody may read for as long as a step takes."""
    for _ in range(100_000):
        front_ends[0].wake()
    assert front_ends[0].receive(block=True) == []
