"""Run the batches of a folder in a process until they have ended, with an endpoint of its own: for tests that kill it.

    python -m tests.helpers.batch_runner FOLDER

Writes a line for each response that it gave, and exits with 0 when no batch is left.
"""

from __future__ import annotations

import asyncio
import json
import sys

from minisgl.server.batches.runner import Asked, Runner, Said, State
from minisgl.server.batches.store import Store


def text_of(body: bytes) -> str:
    """Return the text of the response to a batch line."""
    prompt: str = json.loads(body)["prompt"]
    return prompt[::-1]


async def endpoint(asked: Asked) -> Said:
    asked.submitted.set()
    await asyncio.sleep(0)
    print(asked.line.number, flush=True)
    return Said(200, json.dumps({"text": text_of(asked.line.body)}).encode())


async def run(folder: str) -> None:
    runner = Runner(State(Store.open(folder)), endpoint, room=lambda: 8, quota=1 << 40, max_line_bytes=1 << 20)
    runner.start()
    while await runner.state.run(Store.open_batches):
        await asyncio.sleep(0)
    await runner.stop()
    runner.state.close()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
