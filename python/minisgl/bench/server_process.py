"""A server under measurement: `minisgl serve --managed` as a child process, with its CPU time and memory by process.

    with ServerProcess(Launch(flags=("--engine", "echo"))) as server:
        ... server.url, server.model, server.processes()
    server.left_behind  # what it did not clean up: normally nothing

Invariants: the server has its own folder for temporary files and its own session (Ctrl-C reaches the caller only); it
ends with the caller, however that ends, because it watches its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import urlsplit

import psutil

from minisgl import envs

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 45.0
LEFT_ALIVE_S = 5.0  # seconds for its children to end after it
SHARED_MEMORY = Path("/dev/shm")
ENGINE_MODULE = "minisgl.runner.process"


class ServerFailed(RuntimeError):
    """The server did not start. The text has its last lines of log."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings to start a server. `flags` are those of `minisgl serve`, except for the port. `source` is the `python`
    folder of another checkout whose code is run instead of this one's."""

    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    source: Path | None = None

    def environment(self) -> dict[str, str]:
        extra = dict(self.env)
        if self.source is not None:
            extra["PYTHONPATH"] = str(self.source)
        return envs.child_environment(extra)


class ServerProcess:
    """A server process. `start` (or `with`) returns when it is ready. Times are seconds of the monotonic clock."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._shared_before = _shared_memory()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._folder: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory(prefix="minisgl-bench-")
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}
        self.url = ""
        self.model = ""
        self.start_s = 0.0
        self.stop_s = 0.0
        self.exit_code: int | None = None
        self.left_behind: list[str] = []

    def start(self) -> ServerProcess:
        """Start the server and wait until it is ready. Raises `ServerFailed`, and leaves nothing running then."""
        began = time.monotonic()
        # -P: a checkout in the current folder is not imported
        program = (
            sys.executable,
            "-P",
            "-m",
            "minisgl",
            "serve",
            "--no-access-log",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
        )
        self._process = subprocess.Popen(
            (*program, *self.launch.flags, "--managed"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**self.launch.environment(), "TMPDIR": self._folder.name},
            start_new_session=True,
        )
        try:
            ready = json.loads(self._first_line(began + START_TIMEOUT_S))
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - began
        self.url, self.model = ready["url"], ready["model"]
        self.processes()
        return self

    def _first_line(self, deadline: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            read = os.read(self._process.stdout.fileno(), 4096) if ready else b""
            if not read:
                reason = "ended" if ready else f"was not ready after {START_TIMEOUT_S:g} s"
                raise ServerFailed(f"the server {reason}: {' '.join(self.launch.flags)}\n{self.last_lines()}")
            line += read
        return line

    def last_lines(self, count: int = 12) -> str:
        """Return the last `count` lines that it wrote to standard error."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-count:])

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def processes(self) -> dict[str, psutil.Process]:
        """Return its processes by role: `http` is the server itself, `engine` its engine; others are numbered."""
        by_role: dict[str, psutil.Process] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            by_role["http"] = psutil.Process(self.pid)
            for i, child in enumerate(by_role["http"].children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    role = "engine" if ENGINE_MODULE in child.cmdline() else "other"
                    by_role[role if role not in by_role else f"{role}-{i}"] = child
        self._seen.update((process.pid, process) for process in by_role.values())
        return by_role

    def stop(self) -> int:
        """Stop the server (SIGTERM, then kill) and return its exit code. Fills `stop_s` and `left_behind`."""
        if self._process is None or self.exit_code is not None:
            return self.exit_code or 0
        self.processes()
        began = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.exit_code = self._process.wait()
            self.left_behind.append("the server did not end: killed")
        self.stop_s = time.monotonic() - began
        self._look_for_leftovers()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()
        self._folder.cleanup()
        return self.exit_code

    def _look_for_leftovers(self) -> None:
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=LEFT_ALIVE_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:  # ended, but not reaped yet
                    self.left_behind.append(f"process {process.pid}")
                    process.kill()
        self.left_behind += [f"file {path.name}" for path in sorted(Path(self._folder.name).rglob("*"))]
        self.left_behind += [f"shared memory {name}" for name in sorted(_shared_memory() - self._shared_before)]
        if self.url and _listens(self.url):
            self.left_behind.append(f"listening socket {urlsplit(self.url).port}")

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def _shared_memory() -> set[str]:
    """Return the names of this user's shared memory files."""
    user = os.getuid()
    names = set()
    with contextlib.suppress(OSError):
        for path in SHARED_MEMORY.iterdir():
            with contextlib.suppress(OSError):
                if path.stat().st_uid == user:
                    names.add(path.name)
    return names


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((parts.hostname or "", parts.port or 0)) == 0
