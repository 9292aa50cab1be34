"""A model's server: a whole `minisgl serve` on its own loopback port, forked by a process that has done the imports and
nothing else (`supervisor/child.py`), because imports take most of a start.

Invariants: it is a child of this process and ends with it, however that ends, because it watches its standard input;
each line that it logs goes to this process's standard error with the model's name in front, and the last one is the
reason if it failed; a killed server leaves no process and no file; the use of its keys is known to the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
import psutil

from minisgl import envs
from minisgl.config import ServerConfig

STOP_TIMEOUT_S = 20.0
MAX_LINE = 1 << 20
PROGRAM = (sys.executable, "-m", "minisgl.supervisor.child")
ADOPTS = 36  # PR_SET_CHILD_SUBREAPER
_PREFIX = re.compile(r"(\d\d:\d\d:\d\d )?(error: )?(minisgl: )?")  # of a line of log


class NotLoaded(Exception):
    """The server ended before it was ready. The text is its last line of log."""


class ModelServer(Protocol):
    """The interface of a server that the registry needs."""

    address: tuple[str, int]
    max_model_len: int  # tokens of a request
    sees: bool  # images
    ended: asyncio.Future[int]
    use: Sequence[tuple[int, int]]  # by key index: waiting requests, tokens since its start

    def used_bytes(self) -> int:
        """Return the bytes of memory that the server's processes take now."""

    async def stop(self) -> None:
        """Stop the server and return when its processes are gone. Idempotent."""


Start = Callable[[ServerConfig, Callable[[str], None]], Awaitable[ModelServer]]
"""Starts a server, whose log lines go to the second argument. Raises `NotLoaded`."""
Fetch = Callable[[ServerConfig, Callable[[str], None]], Awaitable[None]]
"""Downloads a model's files; log lines go to the second argument. Raises `NotLoaded`."""


@dataclass(frozen=True, slots=True)
class Nursery:
    """The process that forks servers. They are not its children, so that its death does not matter to them."""

    process: asyncio.subprocess.Process
    asks: socket.socket

    @classmethod
    async def start(cls) -> Nursery:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *PROGRAM,
                env=envs.with_one_thread(),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        return cls(process, ours)

    async def fork(self, folder: str, descriptors: Sequence[int]) -> int:
        """Fork a server with these descriptors and return its pid. Raises `OSError` if this process is dead."""
        socket.send_fds(self.asks, [folder.encode()], descriptors)
        if not (pid := await asyncio.get_running_loop().sock_recv(self.asks, 32)):
            raise ConnectionResetError("the process that forks servers has ended")
        return int(pid)

    async def stop(self) -> None:
        self.asks.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


class Child:
    """A forked server process, which waits for its settings or serves."""

    def __init__(self, pid: int, folder: str) -> None:
        self.pid = pid
        self._folder = folder  # its temporary files
        ended = Future[int]()
        ended.set_running_or_notify_cancel()  # so that it cannot be cancelled
        threading.Thread(target=lambda: ended.set_result(_wait(pid)), name="server-end", daemon=True).start()
        self.ended = asyncio.wrap_future(ended)

    @classmethod
    async def fork(cls, nursery: Nursery) -> Child:
        """Fork a server process and connect to it. Raises `OSError`."""
        folder = tempfile.mkdtemp(prefix="minisgl-")
        talk, errors = socket.socketpair(), socket.socketpair()
        try:
            with talk[1], errors[1]:
                pid = await nursery.fork(folder, [talk[1].fileno(), errors[1].fileno()])
        except BaseException:
            talk[0].close()
            errors[0].close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        child = cls(pid, folder)
        child.said, child._asked = await asyncio.open_unix_connection(sock=talk[0], limit=MAX_LINE)
        child.errors, child._unused = await asyncio.open_unix_connection(sock=errors[0], limit=MAX_LINE)
        return child

    said: asyncio.StreamReader
    errors: asyncio.StreamReader
    _asked: asyncio.StreamWriter
    _unused: asyncio.StreamWriter

    def tell(self, line: bytes) -> None:
        self._asked.write(line + b"\n")

    async def stop(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._asked.write_eof()  # asks it to end
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.ended), STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # its engine would end later by itself
            os.killpg(self.pid, signal.SIGKILL)
        await self.ended
        await asyncio.to_thread(_wait_for_group, self.pid)
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Close the connections, after all output has been read."""
        self._asked.close()
        self._unused.close()


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _wait_for_group(pid: int) -> None:
    """Wait for the orphans of a server, which this process adopts when the server ends."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-pid, 0)


def _adopt(orphans: bool) -> None:
    """Set whether this process adopts the orphans of its descendants."""
    ctypes.CDLL(None).prctl(ADOPTS, int(orphans), 0, 0, 0)


class ChildServers:
    """The servers that one port starts, and the process that forks them."""

    def __init__(self) -> None:
        self._nursery: Nursery | None = None
        self._one_by_one = asyncio.Lock()

    async def prepare(self) -> None:
        """Start the process that forks servers, which then does its imports. Raises `OSError`."""
        _adopt(True)
        await self._end_nursery()
        self._nursery = await Nursery.start()

    async def start(self, config: ServerConfig, hear: Callable[[str], None]) -> ModelServer:
        """Fork a model's server and return it when it is ready. Raises `OSError` or `NotLoaded`."""
        forking = asyncio.create_task(self._fork())
        try:
            child = await asyncio.shield(forking)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                child = await forking
                await child.stop()
                child.close()
            raise
        return await ChildServer.start(config, hear, child)

    async def _fork(self) -> Child:
        async with self._one_by_one:
            if self._nursery is not None:
                with contextlib.suppress(OSError):  # the forking process was killed
                    return await Child.fork(self._nursery)
            await self.prepare()
            assert self._nursery is not None
            return await Child.fork(self._nursery)

    async def _end_nursery(self) -> None:
        if (nursery := self._nursery) is not None:
            self._nursery = None
            await nursery.stop()

    async def close(self) -> None:
        """Stop the process that forks servers. No start may be running."""
        await self._end_nursery()
        _adopt(False)


class ChildServer:
    """A model's server as a forked process. Create it with `start`."""

    def __init__(self, child: Child, reader: asyncio.Task[None]) -> None:
        self._child = child
        self._reader = reader
        self.ended: asyncio.Future[int] = child.ended
        self.address = ("", 0)
        self.max_model_len, self.sees = 0, False
        self.use: Sequence[tuple[int, int]] = ()
        self._uses: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: ServerConfig, hear: Callable[[str], None], child: Child) -> ChildServer:
        """Return a server that is ready. `hear` is called with each line that it logs; `child` is a process that waits
        for its settings. Raises `NotLoaded`."""
        last = [""]
        reader = asyncio.create_task(read_log(child.errors, config.model_name, hear, last))
        self = cls(child, reader)
        try:
            child.tell(msgspec.json.encode(config))
            line = await child.said.readline()
            if not line:
                code = await asyncio.shield(self.ended)
                await reader
                raise NotLoaded(last[0] or f"its server ended with code {code}")
            said = json.loads(line)
            url = urlsplit(said["url"])
            self.address = url.hostname or "", url.port or 0
            self.max_model_len, self.sees = said["max_model_len"], said["vision"]
            self._uses = asyncio.create_task(self._hear_uses(child.said))
        except BaseException:
            await asyncio.shield(self.stop())
            raise
        return self

    async def _hear_uses(self, stream: asyncio.StreamReader) -> None:
        """Read the use of API keys that the server reports. Other output, such as a library's, is ignored."""
        while True:
            with contextlib.suppress(ValueError):  # from msgspec, or a line that is too long
                if not (line := await stream.readline()):
                    return
                self.use = msgspec.json.decode(line, type=list[tuple[int, int]])

    def used_bytes(self) -> int:
        """Return the bytes of the server's processes. Shared memory is divided among the processes that share it."""
        total = 0
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(self._child.pid)
            for one in (top, *top.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += one.memory_full_info().pss
        return total

    async def stop(self) -> None:
        await self._child.stop()
        await self._reader
        if self._uses is not None:
            await self._uses
        self._child.close()


async def fetch(config: ServerConfig, hear: Callable[[str], None]) -> None:
    """Download a model's files, after which its need is known. Raises `NotLoaded`."""
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
        await read_log(process.stderr, config.model_name, hear, last)
        if await process.wait():
            raise NotLoaded(last[0].removeprefix("minisgl pull: "))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def read_log(stream: asyncio.StreamReader, name: str, hear: Callable[[str], None], last: list[str]) -> None:
    """Print the lines of a server's log, pass them to `hear`, and put the last one into `last`, without its clock."""
    while line := await stream.readline():
        text = line.decode(errors="replace").rstrip()
        print(f"{name}: {text}", file=sys.stderr, flush=True)
        if text:
            last[0] = _PREFIX.sub("", text, count=1)
            hear(last[0])
