"""Run `python -m minisgl ...` in a forked process: starting an interpreter and importing is most of a server's start.

A template process, one for each test process, has imported the modules of a server and its engine and started nothing,
like `minisgl.supervisor.child` behind one port. `Minisgl` is a `subprocess.Popen` whose program it forks.

Invariants: the forked program has the arguments, environment, folder, standard streams and process group that
`subprocess.Popen` would give it, ends like an interpreter, and is reaped at once; its CPU seconds are counted
(`forked_cpu_s`); the template process has one thread and ends with the test process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import inspect
import json
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MINISGL, ENGINE, FORKED = "minisgl", "minisgl.runner.process", "tests.helpers.forking"
"""Modules that the template process can run; the last is its own."""
NOT_ONE_ENGINE = {"--tp", "--models", "--models-dir"}
"""Flags of servers whose processes are started, not forked."""
STREAMS = 3
ENDED = struct.Struct("id")
"""Record that the template process writes at the end of a process: exit code and CPU seconds, with its children's."""
_forked_cpu_s = 0.0
_template: tuple[int, socket.socket, int] | None = None  # the process that started it, the socket to it, its id


def _ask() -> socket.socket:
    """Return the socket to this process's template process, which the first call starts."""
    global _template  # noqa: PLW0603
    if _template is None or _template[0] != os.getpid():
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = os.pathsep.join(filter(None, (str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH", ""))))
        process = subprocess.Popen(
            [sys.executable, "-m", FORKED],
            stdin=there,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
        )
        there.close()
        _template = os.getpid(), here, process.pid
        atexit.register(lambda: (here.close(), process.wait()))
    return _template[1]


def template_processes() -> list[int]:
    """Return the id of this process's template process, if it has one."""
    return [] if _template is None or _template[0] != os.getpid() else [_template[2]]


def forked_cpu_s() -> float:
    """Return the CPU seconds of forked processes that have ended, including their reaped children."""
    return _forked_cpu_s


class Minisgl(subprocess.Popen[Any]):
    """Process of `python -m minisgl ...`, forked. Takes the arguments of `subprocess.Popen`."""

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        args: Sequence[str] = asked["args"]
        assert args[0] == sys.executable and (args[1] == "-c" or args[2] in (MINISGL, ENGINE)), args
        assert asked["preexec_fn"] is None and not asked["pass_fds"]
        request: dict[str, Any] = {"flag": args[1], "program": args[2], "args": args[3:]}
        request |= {"cwd": str(asked["cwd"] or os.getcwd()), "new_session": asked["start_new_session"]}
        request["env"] = dict(os.environ if asked["env"] is None else asked["env"])
        assert request["env"].get("PYTHONPATH") == os.environ.get("PYTHONPATH"), "a fork imports from no other folders"
        ours, ends = os.pipe()
        streams = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        given_streams = [number if one == -1 else one for number, one in enumerate(streams)]
        with tempfile.TemporaryFile() as written:
            written.write(json.dumps(request).encode())
            written.flush()
            ask = _ask()
            socket.send_fds(ask, [b"fork"], [*given_streams, ends, written.fileno()])
            answer = ask.recv(32)
            assert answer, "the template process has ended: its error stands above"
            self.pid = int(answer)
        os.close(ends)
        self._child_created = True
        self._ended = ours
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]

    def _read_code(self, timeout: float | None) -> int | None:
        """Return the exit code, or `None` if the process has not ended within `timeout` seconds."""
        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            return None
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                global _forked_cpu_s  # noqa: PLW0603
                self.returncode, cpu_s = ENDED.unpack(os.read(self._ended, ENDED.size))
                _forked_cpu_s += cpu_s
                os.close(self._ended)
            return self.returncode

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._read_code(0)

    def _wait(self, timeout: float | None) -> int:
        if (code := self._read_code(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code


if not hasattr(os, "pidfd_open"):  # of Linux; elsewhere servers are started as ever
    Minisgl = subprocess.Popen  # type: ignore[misc,assignment]


def run(command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m minisgl ...` forked, like `subprocess.run`; return its exit code and output."""
    limit, given = more.pop("timeout", None), more.pop("input", None)
    streams = {"stdin": None if given is None else subprocess.PIPE, "stderr": subprocess.PIPE} | more
    with Minisgl(list(command), stdout=subprocess.PIPE, text=True, **streams) as process:
        try:
            out, errors = process.communicate(given, timeout=limit)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, errors)


def _serve(request: dict[str, Any], streams: Sequence[int]) -> Callable[[], int]:
    """Apply the arguments, environment and streams of `request` to this process; return the function that runs it."""
    for number, one in enumerate(streams):
        os.dup2(one, number)
    for one in streams:
        os.close(one)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None
    os.chdir(request["cwd"])
    from minisgl import __main__, envs
    from minisgl.runner import launch, process

    if request["new_session"]:
        os.setsid()
    if request["program"] == ENGINE:
        launch.end_with(process.main)
    envs.set_purge_delay()
    args = request["args"]
    sys.argv = ["minisgl", *args]
    if args[:1] == ["serve"] and not NOT_ONE_ENGINE.intersection(args) and args.count("--model") < 2:
        for _ in range(int(args[args.index("--dp") + 1]) if "--dp" in args else 1):
            launch.fork(process.main)
    if request["flag"] == "-c":
        exec(compile(request["program"], "<string>", "exec"), {"__name__": "__main__"})
        return lambda: 0
    return __main__.main


def _report_ended(children: dict[int, tuple[int, int]], descriptor: int) -> None:
    """Reap the process of a descriptor, and write its exit status."""
    pid, ends = children.pop(descriptor)
    os.close(descriptor)
    _, status, used = os.wait4(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(ends, ENDED.pack(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime))
    os.close(ends)


def template_process() -> int:
    """Fork a process for each request from the socket on stdin; ends when that is closed."""
    from minisgl import envs

    envs.set_purge_delay()
    from minisgl import cli  # noqa: F401
    from minisgl.runner import process
    from minisgl.supervisor import serving, start  # noqa: F401

    process.import_engine()
    gc.collect()
    gc.freeze()
    asks = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    children: dict[int, tuple[int, int]] = {}  # descriptor of a process -> its id, and the descriptor for its exit code
    poll = select.poll()
    poll.register(asks, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != asks.fileno():
                poll.unregister(descriptor)
                _report_ended(children, descriptor)
                continue
            word, descriptors, _, _ = socket.recv_fds(asks, 16, STREAMS + 2)
            if not word:
                return 0
            *streams, ends, written = descriptors
            with open(written, "rb") as file:
                file.seek(0)
                request = json.load(file)
            if not (pid := os.fork()):
                os.close(ends)
                asks.close()
                for one in children:
                    os.close(one)
                for _, one in children.values():
                    os.close(one)
                return _serve(request, streams)()
            for one in streams:
                os.close(one)
            children[os.pidfd_open(pid)] = pid, ends
            poll.register(next(reversed(children)), select.POLLIN)
            asks.send(b"%d" % pid)


if __name__ == "__main__":
    sys.exit(template_process())
