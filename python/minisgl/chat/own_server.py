"""A server that the chat starts: `minisgl serve --managed ...` as a child process.

Invariants: the child logs to this terminal's standard error; Ctrl-C reaches the chat only; the child ends with this
process, however that ends, because it watches its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

STOP_TIMEOUT_S = 20.0


class ServerFailed(Exception):
    """The child server ended before it was ready, after logging why. `code` is its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the server ended with code {code} before it was ready")
        self.code = code


@dataclass(frozen=True, slots=True)
class OwnServer:
    url: str
    model: str
    ended: asyncio.Future[int]  # the server's exit code
    pid: int  # leader of its own process group
    key: str | None  # API key, if the server requires one


@contextlib.asynccontextmanager
async def own_server(flags: Sequence[str]) -> AsyncIterator[OwnServer]:
    """Start `minisgl serve` with `flags`, yield it when ready, and stop it on exit. Raises `ServerFailed`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "minisgl", "serve", "--no-access-log", *flags, "--managed"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    ended = asyncio.ensure_future(process.wait())
    try:
        line = await process.stdout.readline()
        if not line:
            raise ServerFailed(await ended)
        ready = json.loads(line)
        yield OwnServer(ready["url"], ready["model"], ended, process.pid, ready["key"])
    finally:
        process.stdin.close()  # the server ends when this is closed
        try:
            await asyncio.wait_for(asyncio.shield(ended), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await ended
