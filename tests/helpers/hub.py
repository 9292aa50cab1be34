"""A step loop on the echo engine behind a real socket, in a thread; and what its front ends should get."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import numpy as np

from minisgl.engine.echo import EchoEngine
from minisgl.message import AddRequest, EngineReady, FromEngine, Shutdown, StepTokens
from minisgl.message.codec import Codec
from minisgl.message.heartbeat import Activity
from minisgl.runner.front_ends import FrontEnds, ParentGone
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.step import FinishReason
from tests.helpers.peers import FrontEndPeer
from tests.helpers.seconds import WAIT_S
from tests.helpers.server import READY

MAX_SEQ_LEN = 20_000
NUM_PAGES = 4096
PLANE = ControlPlaneConfig(NUM_PAGES, 16, 64, 2048, MAX_SEQ_LEN, ())
LENGTH = int(FinishReason.LENGTH)
Stream = tuple[list[int], int]


def engine() -> EchoEngine:
    return EchoEngine(
        num_pages=NUM_PAGES, page_size=16, max_rows=64, max_seq_len=MAX_SEQ_LEN, context_len=MAX_SEQ_LEN, eos_ids=()
    )


def add(req_id: int, prompt: Iterable[int], max_tokens: int) -> AddRequest:
    return AddRequest(
        req_id, np.array([*prompt], np.int32).tobytes(), SamplingParams(max_tokens=max_tokens, seed=7, ignore_eos=True)
    )


def streams(messages: Iterable[FromEngine]) -> dict[int, Stream]:
    """Tokens and end by request; an end of 0 is none yet."""
    found: dict[int, Stream] = {}
    for message in messages:
        if isinstance(message, StepTokens):
            arrays = (message.req_ids, np.int64), (message.tokens, np.int32), (message.reasons, np.int32)
            for req_id, token, reason in zip(*(np.frombuffer(a, t).tolist() for a, t in arrays), strict=True):
                tokens, ended = found.get(req_id, ([], 0))
                assert not ended, f"{req_id} goes on after its end"
                found[req_id] = ([*tokens, token] if token >= 0 else tokens, reason)
    return found


def alone(plane: ControlPlane, requests: Iterable[AddRequest]) -> dict[int, Stream]:
    """What each request gets in a loop without sockets."""
    sent: list[FromEngine] = []
    driven = engine()
    loop = StepLoop(plane, driven, sent.extend)
    requests = list(requests)
    loop.step(requests)
    while not loop.idle:
        loop.step([])
    driven.close()
    return streams(sent)


class Hub:
    """Use in a `with`; the end checks that nothing lives any more. `steps` are scheduled so far."""

    def __init__(self, plane: ControlPlane) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "engine"
        self.address = f"ipc://{path}"
        self._engine = engine()
        self.plane = plane
        self._lifeline, self.parent = os.pipe()
        self.activity = Activity()
        self.front_ends = FrontEnds(path, Codec(), self._lifeline, self.activity)
        self.loop = StepLoop(plane, self._engine, self.front_ends.send)
        self.error: BaseException | None = None
        self.peers: list[FrontEndPeer] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.front_ends.send([READY])
            while not self.loop.shutdown:
                messages = self.front_ends.receive(block=self.loop.idle)
                self.activity.enter("working")
                self.loop.step(messages)
            self.loop.drain()
        except ParentGone as error:
            self.error = error
        except BaseException as error:
            self.error = error
            raise

    def peer(self, name: str = "test") -> FrontEndPeer:
        found = FrontEndPeer(self.address, name)
        self.peers.append(found)
        found.next(EngineReady)
        return found

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline and self._thread.is_alive(), "never came"
            time.sleep(0.001)

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in self.peers:
            one.close()
        if self._thread.is_alive():
            with FrontEndPeer(self.address, "end") as peer:
                if kind is None:
                    self.wait_until(lambda: self.loop.idle)
                    self.plane.check()
                    stats = self.plane.stats()
                    assert stats.num_free_pages + stats.num_evictable_pages == NUM_PAGES
                peer.send(Shutdown())
                self.join()
        self.front_ends.close()
        self._engine.close()
        os.close(self._lifeline)
        if self.parent >= 0:
            os.close(self.parent)
        self._folder.cleanup()
