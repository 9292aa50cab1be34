"""Start an engine process, watch it, end it.

Keeps true: the child never outlives its parent (it watches its stdin), nor `stop`; nothing is left in the file system.
Doesn't know: what the messages say.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec

from minisgl.config import EngineConfig, Limits
from minisgl.runner.process import ProcessConfig

STOP_TIMEOUT_S = 10.0
AT_ONCE_S = 1.0


class EngineProcess:
    """Addresses come first (`create`), so that the HTTP side can bind its sockets before the child connects."""

    def __init__(self, config: EngineConfig, folder: Path, step_timeout: float) -> None:
        self._config = config
        self._step_timeout = step_timeout
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self.to_engine = f"ipc://{folder / 'to-engine'}"
        self.from_engine = f"ipc://{folder / 'from-engine'}"

    @classmethod
    def create(cls, config: EngineConfig, step_timeout: float = Limits().step_timeout) -> EngineProcess:
        return cls(config, Path(tempfile.mkdtemp(prefix="minisgl-")), step_timeout)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        config = ProcessConfig(
            engine=self._config,
            to_engine=self.to_engine,
            from_engine=self.from_engine,
            step_timeout=self._step_timeout,
        )
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "minisgl.runner.process", stdin=asyncio.subprocess.PIPE
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(config) + b"\n")
        await self._process.stdin.drain()

    async def wait(self) -> int:
        """The exit code; negative if a signal ended it."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, *, at_once: bool = False) -> None:
        """Give the child (which was told to shut down) some time, `at_once` little, then kill it. Removes the
        sockets."""
        try:
            if self._process is not None and self._process.returncode is None:
                try:
                    await asyncio.wait_for(self._process.wait(), AT_ONCE_S if at_once else STOP_TIMEOUT_S)
                except TimeoutError:
                    with contextlib.suppress(ProcessLookupError):
                        self._process.kill()
                    await self._process.wait()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
