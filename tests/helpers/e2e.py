"""Start a real server as a child process, send requests on loopback, and check that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import msgspec
import psutil

from minisgl.runner.launch import ProcessConfig
from tests.helpers.forking import ENGINE, FORKED, Minisgl, run
from tests.helpers.seconds import WAIT_S

READY = re.compile(r"ready: (http://\S+)")


def until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait until a condition holds. `what`: the assertion message if it does not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Return true if a process has ended, even if it has not been reaped yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class ServerProcess:
    """Server process, `minisgl serve ...`, on a free port. `lines` collects its stderr. `minisgl`: arguments of Python
    that start minisgl. `wait`: wait until it is ready. `forked`: forked from a process that has imported everything
    (tests.helpers.forking), unless `env` has another PYTHONPATH."""

    def __init__(
        self,
        args: Sequence[str],
        env: dict[str, str] | None = None,
        start_timeout_s: float = 4 * WAIT_S,
        minisgl: Sequence[str] = ("-m", "minisgl"),
        wait: bool = True,
        forked: bool = True,
    ) -> None:
        self.folder = tempfile.mkdtemp(prefix="minisgl-e2e-")  # its sockets live here, so that leftovers show
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        # threads that wait for each other sleep: on a busy machine those that spin take the cores from those that work
        self.process = (Minisgl if forked and "PYTHONPATH" not in (env or {}) else subprocess.Popen)(
            [sys.executable, *minisgl, "serve", "--port", "0", *args],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                "TMPDIR": self.folder,
                "OMP_NUM_THREADS": "2",
                "OMP_WAIT_POLICY": "passive",
                **(env or {}),
            },
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait and (not self._ready.wait(start_timeout_s) or not self.url):
            self.kill()
            raise RuntimeError("the server did not start:\n" + "\n".join(self.lines))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if not self.url and (match := READY.search(line)):  # servers of its models print it, too
                self.url = match.group(1)
                self._ready.set()
        self._ready.set()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engine(self) -> psutil.Process:
        """Return the engine process, once it runs its own program: stopping it earlier would stop its parent, too."""

        def found() -> list[psutil.Process]:
            with contextlib.suppress(psutil.Error):
                return [child for child in self.children() if {ENGINE, FORKED}.intersection(child.cmdline())]
            return []

        until(lambda: bool(found()), "it has no engine process")
        return found()[0]

    def ended(self, within_s: float = WAIT_S) -> int:
        """Wait for the server to end; return the exit code. `lines` is complete then."""
        code = self.process.wait(within_s)
        self._reader.join(WAIT_S)
        return code

    def stop(self, signum: int = signal.SIGINT, timeout_s: float = WAIT_S) -> int:
        """Send a signal and wait; return the exit code. Asserts that no process and no file is left."""
        children = self.children() if self.process.poll() is None else []
        self.process.send_signal(signum)
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for process in [*children, self.process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            raise
        self._reader.join(WAIT_S)
        _, alive = psutil.wait_procs(children, timeout=WAIT_S)
        assert not alive, f"processes left behind: {alive}"
        self.check_no_files()
        return code

    def check_no_files(self) -> None:
        left = list(Path(self.folder).iterdir())
        assert not left, f"files left behind: {left}"
        os.rmdir(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all processes that are left, and remove the files of a killed server."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in self.children():
                child.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Brake:
    """Makes every step of a server's engines take `step_ms` longer, until `release`.

    State that must be observed during a request is then observable, however slowly the test runs.
    """

    def __init__(self, folder: Path, step_ms: int) -> None:
        self._file = folder / "step_ms"
        self.env = {"MINISGL_STEP_DELAY_FILE": str(self._file)}
        self.hold(step_ms)

    def hold(self, step_ms: int) -> None:
        self._file.write_text(str(step_ms))

    def release(self) -> None:
        self._file.unlink(missing_ok=True)


def refused(*flags: str) -> str:
    """Return the last line of stderr of a server that refuses to start with these flags."""
    command = [sys.executable, "-m", "minisgl", "serve", "--port", "0", *flags]
    done = run(command, timeout=WAIT_S)
    assert done.returncode in (1, 2) and done.stdout == "" and "Traceback" not in done.stderr, done.stderr
    return done.stderr.strip().splitlines()[-1]


def slow_device(folder: Path, step_ms: int) -> tuple[str, ...]:
    """Return the flags of a simulated engine whose steps take `step_ms` each."""
    file = folder / "slow.yaml"
    file.write_text(f"name: slow-device\ntable: {{rows: [1], prefill_tokens: [0], kv_len: [1], ms: [[[{step_ms}]]]}}\n")
    return ("--engine", "sim", "--sim-profile", str(file))


@contextlib.contextmanager
def serving(*args: str, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """Run a server during the `with`; ends it by SIGINT and asserts exit code 0."""
    with ServerProcess(args, env) as server:
        yield server
        assert server.stop() == 0, "\n".join(server.lines)


@contextlib.contextmanager
def engine_process(config: ProcessConfig, *python: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an engine process with its configuration on stdin; killed at the end. `python`: arguments of Python."""
    process = Minisgl([sys.executable, *(python or ("-m", ENGINE))], stdin=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


@contextlib.contextmanager
def canned(body: bytes, status: str = "200 OK") -> Iterator[str]:
    """Run a server that answers every request with these bytes and closes the connection; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        request = b""
                        while not request.endswith(b"}") and (data := connection.recv(65536)):
                            request += data  # unread bytes would make the close a reset
                        connection.sendall(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode() + body)

        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
