"""A whole engine process and two front ends, of which one is killed or stopped: the other's streams stay exact."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.config import EngineConfig
from minisgl.message import AddRequest, EngineFailed, EngineReady, LoadProgress, Shutdown
from minisgl.runner.launch import ProcessConfig
from tests.helpers.e2e import engine_process
from tests.helpers.hub import add, streams
from tests.helpers.peers import FrontEndPeer
from tests.helpers.seconds import WAIT_S

# A front end that asks for much, says so, and reads no more.
SLEEPER = """
import sys, time
from minisgl.message import EngineReady, StepTokens
from tests.helpers.e2e import engine_process
from tests.helpers.hub import add
from tests.helpers.peers import FrontEndPeer
from tests.helpers.seconds import WAIT_S
peer = FrontEndPeer(sys.argv[1], "sleeper")
peer.next(EngineReady)
peer.send(*(add(i, [7] * 30 + [i], 1500) for i in range(20)))
peer.next(StepTokens)
print("it runs", flush=True)
peer.until(lambda _: peer.num_ended == 20)
print("it ends", flush=True)
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Address and process."""
    config = ProcessConfig(
        engine=EngineConfig(engine="echo", max_running_requests=64), address=f"ipc://{tmp_path}/engine"
    )
    with engine_process(config) as process:
        yield config.address, process


@contextlib.contextmanager
def sleeper(address: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", SLEEPER, address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "it runs\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def requests(turn: int) -> list[AddRequest]:
    """The same in each turn, by other ids."""
    return [add(100 * turn + i, [7] * 30 + [i % 7], 100 + 7 * i) for i in range(30)]


def answers(peer: FrontEndPeer, turn: int) -> list[tuple[list[int], int]]:
    before = peer.num_ended
    asked = requests(turn)
    peer.send(*asked)
    peer.until(lambda _: peer.num_ended == before + len(asked))
    found = streams(peer.received)
    return [found[one.req_id] for one in asked]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_front_end_is_unaffected_by_the_end_of_another(
    engine: tuple[str, subprocess.Popen[bytes]], how: signal.Signals
) -> None:
    address, process = engine
    with FrontEndPeer(address) as peer:
        peer.next(EngineReady)
        alone = answers(peer, 0)
        with sleeper(address) as other:
            beside = answers(peer, 1)
            os.kill(other.pid, how)
            assert answers(peer, 2) == beside == alone
            if how == signal.SIGKILL:
                peer.until(lambda got: any(isinstance(one, LoadProgress) and "sleeper" in one.text for one in got))
            else:
                os.kill(other.pid, signal.SIGCONT)
                assert other.stdout is not None and other.stdout.readline() == "it ends\n"
        assert answers(peer, 3) == alone
        peer.send(Shutdown())
        assert process.wait(WAIT_S) == 0


def test_a_front_end_gets_the_start_error_of_the_engine(tmp_path: Path) -> None:
    config = ProcessConfig(
        engine=EngineConfig(engine="torch", model=str(tmp_path / "nothing")), address=f"ipc://{tmp_path}/engine"
    )
    with engine_process(config) as process:
        with FrontEndPeer(config.address) as peer:
            assert "nothing" in peer.next(EngineFailed).text
        assert process.wait(WAIT_S) == 1
