"""Processes of the echo engine behind a pool, to be killed and stopped; and the expected outputs of their requests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from minisgl._rust import EnginePool
from minisgl.config import DebugConfig, EngineConfig
from minisgl.engine.echo import EchoModel
from minisgl.message import EngineReady, EngineState, FromEngine
from minisgl.runner.launch import ProcessConfig
from minisgl.runner.several import EVERY_POOL
from tests.helpers.forking import ENGINE, Minisgl
from tests.helpers.peers import FrontEndPeer

SEED = 7  # of `hub.add`
STEP_TIMEOUT_S = 60.0


def expected(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the tokens that an undisturbed request of `hub.add` generates."""
    return EchoModel(seed=SEED).generate(list(prompt), max_tokens, ignore_eos=True)


def states(messages: Sequence[FromEngine], engine: int) -> list[str]:
    """Return the states of an engine that the messages report, in order."""
    return [one.state for one in messages if isinstance(one, EngineState) and one.engine == engine]


class Pool:
    """Engine pool with its processes, for use in a `with`, whose end checks that nothing is left. `num_started`: the
    number of processes to start (default: all). `step_ms`: how much longer each step takes."""

    def __init__(self, num_engines: int, num_started: int | None = None, step_ms: int = 0, **router: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="minisgl-pool-")
        folder = Path(self._folder.name)
        self.path, self.address = folder / "pool", f"ipc://{folder}/pool"
        (folder / "step_ms").write_text(str(step_ms))
        self._debug = DebugConfig(step_delay_file=str(folder / "step_ms") if step_ms else None)
        self.sockets = [folder / f"engine-{number}" for number in range(num_engines)]
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * num_engines
        self.peers: list[FrontEndPeer] = []
        config = {
            "listen": str(self.path),
            "engines": [*map(str, self.sockets)],
            "router": {"policy": "round_robin", **router},
            "step_timeout": STEP_TIMEOUT_S,
            **EVERY_POOL,
        }
        self.pool = EnginePool(msgspec.json.encode(config).decode())
        for engine in range(num_engines if num_started is None else num_started):
            self.start(engine)

    def start(self, engine: int) -> None:
        """Start the process of an engine, for the first time or again."""
        self.end_process(engine)
        self.sockets[engine].unlink(missing_ok=True)
        config = ProcessConfig(
            engine=EngineConfig(engine="echo", max_running_requests=64, max_seq_len=4096, debug=self._debug),
            address=f"ipc://{self.sockets[engine]}",
            step_timeout=STEP_TIMEOUT_S,
        )
        process = Minisgl([sys.executable, "-m", ENGINE], stdin=subprocess.PIPE, bufsize=0)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        self.processes[engine] = process

    def signal(self, engine: int, signum: int) -> None:
        process = self.processes[engine]
        assert process is not None
        process.send_signal(signum)

    def end_process(self, engine: int) -> None:
        process, self.processes[engine] = self.processes[engine], None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def restart(self, engine: int) -> None:
        self.pool.restarting(engine, True)
        self.start(engine)

    def peer(self, name: str = "test") -> FrontEndPeer:
        """Connect a front end, and return it once all engines are ready."""
        peer = FrontEndPeer(self.address, name)
        self.peers.append(peer)
        peer.next(EngineReady)
        return peer

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.peers:
            peer.close()
        self.pool.stop()
        for engine in range(len(self.processes)):
            self.end_process(engine)
        is_gone = not self.path.exists()
        self._folder.cleanup()
        assert is_gone, "the pool's socket is left"
