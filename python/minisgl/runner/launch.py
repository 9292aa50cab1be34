"""Starts, watches and ends an engine process, and defines its start-up configuration. A process may be forked ahead of
time, before it has its settings. This module imports nothing heavy, so that the child starts early.

Invariants: the child outlives neither its parent (it watches its stdin) nor `stop` nor the `with` block; no files are
left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import IO, NoReturn

import msgspec

from minisgl.config import EngineConfig, Limits, PrefixFile

SOCKET = "engine"  # name of the socket for front ends


def last_words_file(socket: Path) -> Path:
    """Return the path of the file with the reason why an engine process ended. It is written before the connection
    ends: the parent may see the end of the process before the message about it."""
    return socket.with_name(f"{socket.name}.failed")


class LastWords(msgspec.Struct, frozen=True):
    """Reason why an engine process ended. `is_setting`: an invalid setting was the cause."""

    text: str
    is_setting: bool = False


class RankDied(RuntimeError):
    """Error after a rank above 0 ended unexpectedly or hung: the engine is unusable."""


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineConfig
    address: str  # ipc://PATH on which this process listens
    step_timeout: float = Limits().step_timeout

    @property
    def socket_path(self) -> Path:
        return Path(self.address.removeprefix("ipc://"))

    @property
    def folder(self) -> Path:
        """The parent's folder for sockets. The parent removes it, or this process does if the parent is killed."""
        return self.socket_path.parent

    @property
    def ranks_folder(self) -> Path:
        """Folder for the sockets among the ranks of `--tp`; each of several engines has its own."""
        name = self.socket_path.name
        return self.folder if name == SOCKET else self.folder / f"{name}-ranks"


STOP_TIMEOUT_S = 10.0
AT_ONCE_S = 1.0


class Forked:
    """An engine process forked from this one, with the part of `Popen`'s interface that is used here."""

    def __init__(self, work: Callable[[], int]) -> None:
        reads, writes = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(writes)
            os.dup2(reads, sys.stdin.fileno())
            end_with(work)
        os.close(reads)
        self.stdin: IO[bytes] | None = open(writes, "wb", buffering=0)  # noqa: SIM115

    def wait(self) -> int:
        """Wait for the process and return its exit code, negative for a signal. Call it once."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self.pid, signal.SIGKILL)


def end_with(work: Callable[[], int]) -> NoReturn:
    """Run `work`, then exit this process with its result as exit code, without any exit handlers."""
    code = 1
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # skips exit handlers inherited from the parent


_waiting: list[Forked] = []


def fork(work: Callable[[], int]) -> None:
    """Fork a process that will run `work`, such as `process.main`. The next `EngineProcess.start` uses the first one
    that waits; it ends with this process. Call this with a single thread, after importing what `work` needs."""
    _waiting.append(Forked(work))


def _take() -> subprocess.Popen[bytes] | Forked:
    if _waiting:
        return _waiting.pop(0)
    return subprocess.Popen([sys.executable, "-m", "minisgl.runner.process"], stdin=subprocess.PIPE, bufsize=0)


class EngineProcess:
    """An engine process. Its address exists from `create` on; the child listens there soon after `start`."""

    def __init__(self, config: EngineConfig, folder: Path, step_timeout: float, name: str = SOCKET) -> None:
        self._config = config
        self._step_timeout = step_timeout
        self._folder = folder
        self._name = name
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._ended: Future[int] = Future()
        self._ended.set_running_or_notify_cancel()  # makes it uncancellable
        self.address = f"ipc://{folder / name}"

    @classmethod
    def create(cls, config: EngineConfig, step_timeout: float = Limits().step_timeout) -> EngineProcess:
        return cls(config, Path(tempfile.mkdtemp(prefix="minisgl-")), step_timeout)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def folder(self) -> Path:
        """Folder for sockets, private to this user; removed with the process."""
        return self._folder

    @property
    def socket(self) -> str:
        """Path of the socket on which the child accepts front ends."""
        return str(self._folder / self._name)

    @property
    def last_words(self) -> LastWords | None:
        """Reason why the process ended, available before its connection ends; `None` if it could not write one."""
        try:
            return msgspec.json.decode(last_words_file(Path(self.socket)).read_bytes(), type=LastWords)
        except (OSError, msgspec.DecodeError):
            return None

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def start(self) -> None:
        pages = tuple(one for one in self._config.warm_prefixes if isinstance(one, PrefixFile))
        engine = msgspec.structs.replace(self._config, warm_prefixes=pages, lora=())  # a front end handles the others
        config = ProcessConfig(engine=engine, address=self.address, step_timeout=self._step_timeout)
        process = self._process = _take()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `wait` notices its end
            process.stdin.write(msgspec.json.encode(config) + b"\n")
        threading.Thread(target=self._await_end, args=(process,), name="engine-end", daemon=True).start()

    def _await_end(self, process: subprocess.Popen[bytes] | Forked) -> None:
        code = process.wait()
        if process.stdin is not None:
            process.stdin.close()
        self._ended.set_result(code)

    def kill(self) -> None:
        """Kill the process. Does nothing if it has ended or was never started."""
        if self._process is not None and not self._ended.done():
            self._process.kill()

    async def wait(self) -> int:
        """Wait for the process and return its exit code; negative if a signal ended it."""
        import asyncio

        return await asyncio.wrap_future(self._ended)

    def leave(self) -> None:
        """Announce that the process will end. Does nothing here: it is not restarted anyway."""

    async def stop(self, *, at_once: bool = False) -> None:
        """Wait for the child, which has received a `Shutdown`, kill it after a timeout, and remove the sockets."""
        try:
            await self.end(AT_ONCE_S if at_once else STOP_TIMEOUT_S)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def end(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the child, which has received a `Shutdown`, then kill it."""
        import asyncio

        if self._process is None:
            return
        try:
            await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self._process.kill()
            await self.wait()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the child and remove the sockets, if `stop` was not called."""
        self.kill()
        if self._process is not None:
            self._ended.result()
        shutil.rmtree(self._folder, ignore_errors=True)
