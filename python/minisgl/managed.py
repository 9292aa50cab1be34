"""The bond of a server to the program that started it with `--managed`.

Invariants: one JSON line on standard output when the server is ready; the end of standard input asks it to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator


def announce(url: str, model: str, key: str | None) -> None:
    """`url`: where it listens; `model`: the name to ask for; `key`: one that lets the program in, if it takes one."""
    print(json.dumps({"url": url, "model": model, "key": key}), flush=True)


@contextlib.contextmanager
def until_stdin_ends(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` when standard input, which must be a pipe or a socket, is closed by the other side."""
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def readable() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            stop()

    loop.add_reader(descriptor, readable)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
