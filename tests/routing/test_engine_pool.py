"""Several engine processes behind one socket: what front ends get is what one engine would have given them, whatever
becomes of the processes."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import numpy as np

from minisgl.message import (
    AddPrefix,
    CacheCleared,
    ClearCache,
    EngineFailed,
    EngineSays,
    FromEngine,
    PrefixChanged,
    Shutdown,
)
from minisgl.message.codec import decode_said
from tests.helpers.hub import add, streams
from tests.helpers.peers import FrontEndPeer
from tests.helpers.pool import Pool, states
from tests.helpers.seconds import WAIT_S


def wait_for(peer: FrontEndPeer, engine: int, state: str) -> None:
    peer.until(lambda got: state in states(got, engine)[-1:])


def said(messages: Sequence[FromEngine], engine: int, kind: type[FromEngine]) -> list[FromEngine]:
    """What an engine said of a kind."""
    of_engine = (one for one in messages if isinstance(one, EngineSays) and one.engine == engine)
    return [message for one in of_engine for message in decode_said(one.messages) if isinstance(message, kind)]


def test_prefixes_reach_every_engine_and_one_that_comes_back() -> None:
    with Pool(2) as pool:
        peer = pool.peer()
        ready = PrefixChanged(5, "ready")
        peer.send(AddPrefix(5, np.arange(65, 97, dtype=np.int32).tobytes()))
        peer.until(lambda got: all(ready in said(got, engine, PrefixChanged) for engine in (0, 1)))
        peer.send(ClearCache())
        peer.until(lambda got: all(said(got, engine, CacheCleared) for engine in (0, 1)))
        pool.signal(0, signal.SIGKILL)
        pool.restart(0)
        peer.until(lambda got: said(got, 0, PrefixChanged).count(ready) == 2)
        assert said(peer.received, 1, PrefixChanged).count(ready) == 1


def test_the_last_ones_death_is_the_end() -> None:
    with Pool(2, step_ms=5) as pool:
        peer = pool.peer()
        peer.send(*(add(number, [65 + number], 3000) for number in range(4)))
        peer.until(lambda got: len(streams(got)) == 4)
        pool.signal(0, signal.SIGKILL)
        wait_for(peer, 0, "dead")
        pool.signal(1, signal.SIGKILL)
        text = peer.next(EngineFailed).text
        died = "the engine process died"
        assert text == f"no engine is left: engine 0: {died}; engine 1: {died}"
        peer.to_the_end()
        assert not any(len(tokens) == 3000 for tokens, _ in streams(peer.received).values())


def test_after_a_shutdown_all_processes_have_ended() -> None:
    with Pool(2) as pool:
        peer = pool.peer()
        peer.send(add(0, [65], 3000), Shutdown())
        peer.to_the_end()
        assert not any(isinstance(one, EngineFailed) for one in peer.received)
        for process in pool.processes:
            assert process is not None and process.wait(WAIT_S) == 0
