"""The process that forks the servers of several models. It has imported what a server and its engine need and started
nothing, so that a new server skips its imports. The process at the port resolves a server's settings; the server reads
them as the first line of its standard input and ends when that is closed (`--managed`).

Invariants: this process has one thread and ends when its standard input, a socket, is closed; a forked server becomes a
child of the process that adopts orphans, the one at the port.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
from collections.abc import Callable

import msgspec

from minisgl import envs
from minisgl.config import ConfigError, ServerConfig
from minisgl.runner import launch

MAX_PATH = 4096


def main() -> int:
    envs.set_purge_delay()
    from minisgl.runner import process  # loads the extension
    from minisgl.supervisor import serving, start  # noqa: F401

    process.import_engine()
    envs.forget_one_thread()
    gc.collect()
    gc.freeze()  # garbage collections in children must not touch, and so copy, these objects
    asks = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with contextlib.suppress(ConnectionError):  # the process at the port has exited
        while True:
            folder, descriptors, _, _ = socket.recv_fds(asks, MAX_PATH, 2)
            if not folder:
                break
            if not (pid := _fork()):
                asks.close()
                return _serve(process.main, folder.decode(), *descriptors)
            for one in descriptors:
                os.close(one)
            asks.send(b"%d" % pid)
    return 0


def _fork() -> int:
    """Fork twice, so that the new process is an orphan, to be adopted. Return 0 there, and its pid here."""
    reads, writes = os.pipe()
    if not (between := os.fork()):
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(writes, b"%d" % pid)
            os._exit(0)
        os.close(reads)
        os.close(writes)
        return 0
    os.close(writes)
    os.waitpid(between, 0)
    with open(reads, "rb") as file:
        return int(file.read())


def _serve(engine: Callable[[], int], folder: str, talk: int, errors: int) -> int:
    os.setsid()
    for number, descriptor in enumerate((talk, talk, errors)):
        os.dup2(descriptor, number)
    os.close(talk)
    os.close(errors)
    envs.use_temporary(folder)
    launch.fork(engine)
    said = bytearray()
    while not said.endswith(b"\n"):  # byte by byte, so that later input stays unread
        if not (byte := os.read(0, 1)):
            return 1
        said += byte
    config = msgspec.structs.replace(msgspec.json.decode(said, type=ServerConfig), managed=True)
    try:
        from minisgl.supervisor.start import run_server

        return run_server(config)
    except (ConfigError, OSError, MemoryError) as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
