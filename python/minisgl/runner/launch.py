"""Start an engine process, watch it, end it; what it reads when it starts. One may be forked ahead, before it has its
settings. Nothing that computes is imported here, so that the child starts early.

Invariants: the child never outlives its parent (it watches its stdin), nor `stop`, nor the `with` block; nothing is
left in the file system.
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

SOCKET = "engine"  # the name of the one that front ends connect to


def last_words_file(socket: Path) -> Path:
    """Where a process that cannot go on says why, before it ends the connection: its parent may see the end of the
    process before the message about it."""
    return socket.with_name(f"{socket.name}.failed")


class LastWords(msgspec.Struct, frozen=True):
    """Why an engine process ended; `is_setting`: because of a setting that cannot be."""

    text: str
    is_setting: bool = False


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineConfig
    address: str  # ipc://PATH, where this process listens
    step_timeout: float = Limits().step_timeout

    @property
    def socket_path(self) -> Path:
        return Path(self.address.removeprefix("ipc://"))

    @property
    def folder(self) -> Path:
        """The parent's, for sockets; it removes it, or this process does if it is killed."""
        return self.socket_path.parent

    @property
    def ranks_folder(self) -> Path:
        """For what the ranks of `--tp` have among themselves: another one for each of several engines."""
        name = self.socket_path.name
        return self.folder if name == SOCKET else self.folder / f"{name}-ranks"


STOP_TIMEOUT_S = 10.0
AT_ONCE_S = 1.0


class Forked:
    """An engine's process without a program of its own: as much of `Popen` as is asked of it here."""

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
        """Once."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # `wait` was told of its end just now
            os.kill(self.pid, signal.SIGKILL)


def end_with(work: Callable[[], int]) -> NoReturn:
    """Do `work`, then end this process with its code and nothing else."""
    code = 1
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # nothing of the process that was forked ends here


_waiting: list[Forked] = []


def fork(work: Callable[[], int]) -> None:
    """Let a process that does `work`, an engine's (`process.main`), wait: the next `EngineProcess.start` takes the
    first, and it ends with this one. This process has no other thread, and has imported what that needs."""
    _waiting.append(Forked(work))


def _take() -> subprocess.Popen[bytes] | Forked:
    if _waiting:
        return _waiting.pop(0)
    return subprocess.Popen([sys.executable, "-m", "minisgl.runner.process"], stdin=subprocess.PIPE, bufsize=0)


class EngineProcess:
    """The address exists from `create` on; the child listens there soon after `start`."""

    def __init__(self, config: EngineConfig, folder: Path, step_timeout: float, name: str = SOCKET) -> None:
        self._config = config
        self._step_timeout = step_timeout
        self._folder = folder
        self._name = name
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._ended: Future[int] = Future()
        self._ended.set_running_or_notify_cancel()  # nobody can cancel it
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
        """For sockets, of this user only; it goes with the process."""
        return self._folder

    @property
    def socket(self) -> str:
        """Path of the socket on which the child takes front ends."""
        return str(self._folder / self._name)

    @property
    def last_words(self) -> LastWords | None:
        """Why it ended; None if it could not say so. It is there before the connection or the process ends."""
        try:
            return msgspec.json.decode(last_words_file(Path(self.socket)).read_bytes(), type=LastWords)
        except (OSError, msgspec.DecodeError):
            return None

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def start(self) -> None:
        pages = tuple(one for one in self._config.warm_prefixes if isinstance(one, PrefixFile))
        engine = msgspec.structs.replace(self._config, warm_prefixes=pages, lora=())  # a front end sees to the others
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
        """No-op if it has ended, or was never started."""
        if self._process is not None and not self._ended.done():
            self._process.kill()

    async def wait(self) -> int:
        """The exit code; negative if a signal ended it."""
        import asyncio

        return await asyncio.wrap_future(self._ended)

    def leave(self) -> None:
        """Its end is expected from now on: nothing to do for one that is not started again."""

    async def stop(self, *, at_once: bool = False) -> None:
        """As `end`. Removes the sockets."""
        try:
            await self.end(AT_ONCE_S if at_once else STOP_TIMEOUT_S)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def end(self, timeout_s: float) -> None:
        """Wait for the child, which has a `Shutdown`, then kill it."""
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
        """If `stop` was not called."""
        self.kill()
        if self._process is not None:
            self._ended.result()
        shutil.rmtree(self._folder, ignore_errors=True)
