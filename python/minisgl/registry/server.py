"""One model's server: a whole `minisgl serve` as a child process, on a loopback port of its own.

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
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
import psutil

from minisgl import envs
from minisgl.config import ServerConfig

STOP_TIMEOUT_S = 20.0
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


class ChildServer:
    """Use `start`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        ended: asyncio.Future[int],
        reader: asyncio.Task[None],
        folder: str,
    ) -> None:
        self._process = process
        self._folder = folder
        self._reader = reader
        self.ended = ended
        self.address = ("", 0)
        self.max_model_len = 0
        self.use: Sequence[tuple[int, int]] = ()
        self._uses: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: ServerConfig, hear: Callable[[str], None]) -> ChildServer:
        """A server that is ready. `hear` is called with each line that it says. Raises `NotLoaded`."""
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
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        last = [""]
        reader = asyncio.create_task(_read(process.stderr, config.model_name, hear, last))
        self = cls(process, asyncio.ensure_future(process.wait()), reader, folder)
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
            top = psutil.Process(self._process.pid)
            for one in (top, *top.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += one.memory_full_info().pss
        return total

    async def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()  # the sign to end
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.ended), STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # the engine of one that was killed ends, but not at once
            os.killpg(self._process.pid, signal.SIGKILL)
        await self.ended
        await self._reader
        if self._uses is not None:
            await self._uses
        shutil.rmtree(self._folder, ignore_errors=True)


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
