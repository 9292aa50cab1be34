"""Start an engine process, watch it, end it. Nothing that computes is imported here, so that the child starts early.

Keeps true: the child never outlives its parent (it watches its stdin), nor `stop`, nor the `with` block; nothing is
left in the file system.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

import msgspec

from minisgl.config import EngineConfig, Limits
from minisgl.runner.process_config import ProcessConfig

STOP_TIMEOUT_S = 10.0
AT_ONCE_S = 1.0


class EngineProcess:
    """Addresses exist from `create` on; the child's sockets wait until the HTTP side has bound its own."""

    def __init__(self, config: EngineConfig, folder: Path, step_timeout: float) -> None:
        self._config = config
        self._step_timeout = step_timeout
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: Future[int] = Future()
        self._ended.set_running_or_notify_cancel()  # nobody can cancel it
        self.to_engine = f"ipc://{folder / 'to-engine'}"
        self.from_engine = f"ipc://{folder / 'from-engine'}"

    @classmethod
    def create(cls, config: EngineConfig, step_timeout: float = Limits().step_timeout) -> EngineProcess:
        return cls(config, Path(tempfile.mkdtemp(prefix="minisgl-")), step_timeout)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        config = ProcessConfig(
            engine=self._config,
            to_engine=self.to_engine,
            from_engine=self.from_engine,
            step_timeout=self._step_timeout,
        )
        process = subprocess.Popen([sys.executable, "-m", "minisgl.runner.process"], stdin=subprocess.PIPE, bufsize=0)
        self._process = process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `wait` notices its end
            process.stdin.write(msgspec.json.encode(config) + b"\n")
        threading.Thread(target=lambda: self._ended.set_result(process.wait()), name="engine-end", daemon=True).start()

    async def wait(self) -> int:
        """The exit code; negative if a signal ended it."""
        import asyncio

        return await asyncio.wrap_future(self._ended)

    async def stop(self, *, at_once: bool = False) -> None:
        """Wait for the child, which has a `Shutdown`, with `at_once` only a little, then kill it. Removes the
        sockets."""
        import asyncio

        try:
            if self._process is not None:
                try:
                    await asyncio.wait_for(self.wait(), AT_ONCE_S if at_once else STOP_TIMEOUT_S)
                except TimeoutError:
                    self._process.kill()
                    await self.wait()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """If `stop` was not called."""
        if self._process is not None and not self._ended.done():
            self._process.kill()
            self._ended.result()
        shutil.rmtree(self._folder, ignore_errors=True)
