"""Engine processes that are killed or stopped at random moments, under streams of several front ends: nothing is lost,
repeated or changed."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest

from minisgl.message import AddRequest, EngineFailed, FromEngine, StepTokens
from tests.helpers.e2e import until
from tests.helpers.hub import LENGTH, add, streams
from tests.helpers.peers import FrontEndPeer
from tests.helpers.pool import Pool, expected
from tests.helpers.seconds import WAIT_S


class Caller(threading.Thread):
    """A front end that keeps some requests in the engines until `enough`, then waits for their ends."""

    def __init__(self, peer: FrontEndPeer, number: int, num_live: int) -> None:
        super().__init__(daemon=True)
        self._random = random.Random(number)
        self._peer = peer
        self._num_live = num_live
        self.enough = threading.Event()
        self.sent: dict[int, AddRequest] = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._send(self._num_live)
            while self._peer.num_ended < len(self.sent):
                before = self._peer.num_ended
                self._peer.receive()
                if not self.enough.is_set():
                    self._send(self._peer.num_ended - before)
        except BaseException as error:
            self.error = error
            raise

    def _send(self, number: int) -> None:
        draw = self._random
        begin = len(self.sent)
        for req_id in range(begin, begin + number):
            prompt = [draw.randrange(97, 123) for _ in range(draw.randrange(1, 200))]
            self.sent[req_id] = add(req_id, prompt, draw.randrange(1, 400))
        if number:
            self._peer.send(*(self.sent[req_id] for req_id in range(begin, begin + number)))

    def num_tokens(self) -> dict[int, int]:
        """Return how many tokens each request that has not ended has got."""
        got = streams(list(self._peer.received))
        return {
            req_id: len(got.get(req_id, ([], 0))[0]) for req_id in list(self.sent) if not got.get(req_id, ([], 0))[1]
        }

    def check(self) -> None:
        assert self.error is None
        found = streams(self._peer.received)
        assert not any(isinstance(one, EngineFailed) for one in self._peer.received)
        for req_id, request in self.sent.items():
            prompt = np.frombuffer(request.tokens, np.int32).tolist()
            most = request.sampling.max_tokens
            assert most is not None
            assert found[req_id] == (expected(prompt, most), LENGTH), f"request {req_id}"
        admitted = admitted_ids(self._peer.received)
        assert len(admitted) == len(set(admitted)), "a request was admitted twice"


def admitted_ids(messages: Iterable[FromEngine]) -> list[int]:
    steps = (one for one in messages if isinstance(one, StepTokens))
    return [req_id for one in steps for req_id in np.frombuffer(one.admitted_ids, np.int64).tolist()]


def disturb(pool: Pool, draw: random.Random, signum: int) -> int:
    """One that is ready is lost, at some moment, and started again; another goes on. Returns which."""

    def ready() -> list[int]:
        return [engine for engine, state in enumerate(pool.pool.readings()["states"]) if state == "ready"]

    until(lambda: len(ready()) > 1, "no engine comes back")
    engine = draw.choice(ready())
    time.sleep(draw.random() / 10)  # any moment
    pool.signal(engine, signum)
    until(lambda: engine not in ready(), "its loss is not noticed")
    pool.restart(engine)
    return engine


def have_moved(before: list[dict[int, int]], callers: list[Caller]) -> bool:
    """Return whether each request that was live `before`, by caller, has ended or got a token since."""
    now = [caller.num_tokens() for caller in callers]
    return not any(new.get(one) == count for old, new in zip(before, now, strict=True) for one, count in old.items())


def chaos(seed: int, signals: Iterable[int]) -> None:
    draw = random.Random(seed)
    with Pool(3, policy=draw.choice(["round_robin", "least_load", "random", "cache_aware"])) as pool:
        callers = [Caller(pool.peer(f"caller {number}"), number, 22) for number in range(3)]
        for caller in callers:
            caller.start()
        losses = [0, 0, 0]
        before: list[dict[int, int]] = [{} for _ in callers]
        for signum in signals:
            # a request that is lost twice without a token between ends with an error: it may be what kills engines
            until(partial(have_moved, before, callers), "a request gets no token")
            losses[disturb(pool, draw, signum)] += 1
            before = [caller.num_tokens() for caller in callers]
        for caller in callers:
            caller.enough.set()
        for caller in callers:
            caller.join(WAIT_S)
            assert not caller.is_alive(), "requests do not end"
            caller.check()
        until(lambda: pool.pool.readings()["num_live"] == 0, "what has ended is counted")
        readings = pool.pool.readings()
        assert readings["num_losses_total"] == losses and readings["num_waiting"] == 0
        assert readings["num_moved_total"] > 0


def test_streams_survive_kills_and_stops() -> None:
    chaos(1, [signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL])


@pytest.mark.slow
def test_streams_survive_a_hundred_losses(times: int) -> None:
    for seed in range(10 * times):
        chaos(seed, [signal.SIGKILL] * 9 + [signal.SIGSTOP])
