"""One model's server: a whole `minisgl serve` as a child process, on a loopback port of its own. The next one
waits as a process that has imported what every server does and lacks its settings: imports are most of a start.

Invariants: it ends with this process, however that ends, because it watches its standard input; of what it says, every
line goes on to this process's standard error with its model's name before it, and the last one is why it failed; what a
server that was killed has left in its temporary folder goes with it; what its keys used is known to the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
import psutil

from minisgl import envs
from minisgl.config import ServerConfig

STOP_TIMEOUT_S = 20.0
PREPARE_AFTER_S = 5.0  # what was asked of the last model goes first
MAX_LINE = 1 << 20
PROGRAM = (sys.executable, "-m", "minisgl.supervisor.child")


class NotLoaded(Exception):
    """The server ended before it was ready; the text is the last that it said."""


class ModelServer(Protocol):
    """What the registry needs of one."""

    address: tuple[str, int]
    max_model_len: int  # of a request
    ended: asyncio.Future[int]
    use: Sequence[tuple[int, int]]  # by number of a key: requests that wait, and tokens since it began

    def used_bytes(self) -> int:
        """That its processes take now."""

    async def stop(self) -> None:
        """Return when its processes are gone. Idempotent."""


Start = Callable[[ServerConfig, Callable[[str], None]], Awaitable[ModelServer]]
"""Start one; raises `NotLoaded`. What it is given last hears what the server says."""
Fetch = Callable[[ServerConfig, Callable[[str], None]], Awaitable[None]]
"""Fetch a model's files; raises `NotLoaded`."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process that waits for its settings, or serves."""

    process: asyncio.subprocess.Process
    folder: str  # for what it makes

    @classmethod
    async def start(cls) -> Child:
        folder = tempfile.mkdtemp(prefix="minisgl-")
        process = await asyncio.create_subprocess_exec(
            *PROGRAM,
            env=envs.with_temporary(folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=MAX_LINE,
        )
        return cls(process, folder)

    async def stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()  # the sign to end
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # the engine of one that was killed ends, but not at once
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class ChildServers:
    """All that one port starts. One process waits for the next start, if there was time for it."""

    def __init__(self) -> None:
        self._next: asyncio.Task[Child] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def prepare(self) -> None:
        """Let a process wait for the next start."""
        self._timer = None
        if self._next is None:
            self._next = asyncio.create_task(Child.start())

    async def start(self, config: ServerConfig, hear: Callable[[str], None]) -> ModelServer:
        """As `ChildServer.start`."""
        server = await ChildServer.start(config, hear, await self._take())
        if self._next is None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PREPARE_AFTER_S, self.prepare)
        return server

    async def _take(self) -> Child | None:
        if (waiting := self._next) is None:
            return None
        self._next = None
        try:
            child = await asyncio.shield(waiting)
        except OSError:
            return None
        except asyncio.CancelledError:
            self._next = waiting
            raise
        if child.process.returncode is None:
            return child
        await child.stop()  # somebody has killed it
        return None

    async def close(self) -> None:
        """End the one that waits. No start is under way."""
        if self._timer is not None:
            self._timer.cancel()
        if self._next is not None:
            with contextlib.suppress(OSError):
                await (await self._next).stop()


class ChildServer:
    """Use `start`."""

    def __init__(self, child: Child, reader: asyncio.Task[None]) -> None:
        self._child = child
        self._reader = reader
        self.ended: asyncio.Future[int] = asyncio.ensure_future(child.process.wait())
        self.address = ("", 0)
        self.max_model_len = 0
        self.use: Sequence[tuple[int, int]] = ()
        self._uses: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: ServerConfig, hear: Callable[[str], None], child: Child | None = None) -> ChildServer:
        """A server that is ready. `hear` is called with each line that it says; `child` has waited for its settings.
        Raises `NotLoaded`."""
        child = child or await Child.start()
        process = child.process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        last = [""]
        reader = asyncio.create_task(_read(process.stderr, config.model_name, hear, last))
        self = cls(child, reader)
        try:
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            line = await process.stdout.readline()
            if not line:
                code = await self.ended
                await reader
                raise NotLoaded(last[0] or f"its server ended with code {code}")
            said = json.loads(line)
            url = urlsplit(said["url"])
            self.address, self.max_model_len = (url.hostname or "", url.port or 0), said["max_model_len"]
            self._uses = asyncio.create_task(self._hear_uses(process.stdout))
        except BaseException:
            await asyncio.shield(self.stop())
            raise
        return self

    async def _hear_uses(self, stream: asyncio.StreamReader) -> None:
        """What a library prints there is no reading."""
        while True:
            with contextlib.suppress(ValueError):  # of msgspec, and of a line that is too long
                if not (line := await stream.readline()):
                    return
                self.use = msgspec.json.decode(line, type=list[tuple[int, int]])

    def used_bytes(self) -> int:
        """Of memory that several processes share each has its part."""
        total = 0
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(self._child.process.pid)
            for one in (top, *top.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += one.memory_full_info().pss
        return total

    async def stop(self) -> None:
        await self._child.stop()
        await self._reader
        if self._uses is not None:
            await self._uses


async def fetch(config: ServerConfig, hear: Callable[[str], None]) -> None:
    """The model's files, which are not here yet: only then it is known what they need. Raises `NotLoaded`."""
    engine = config.engine
    revision = [] if engine.revision is None else ["--revision", engine.revision]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "minisgl", "pull", engine.model, "--model-source", engine.model_source, *revision),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        limit=MAX_LINE,
    )
    assert process.stderr is not None
    last = [""]
    try:
        await _read(process.stderr, config.model_name, hear, last)
        if await process.wait():
            raise NotLoaded(last[0].removeprefix("minisgl pull: "))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _read(stream: asyncio.StreamReader, name: str, hear: Callable[[str], None], last: list[str]) -> None:
    while line := await stream.readline():
        text = line.decode(errors="replace").rstrip()
        print(f"{name}: {text}", file=sys.stderr, flush=True)
        if text:
            last[0] = text.removeprefix("minisgl: ")
            hear(last[0])
