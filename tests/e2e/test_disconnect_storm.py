"""Clients that come and vanish at random moments: everything they held comes back, nothing grows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time

import httpx
import psutil
import pytest

from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.seconds import WAIT_S

PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST


def request(rng: random.Random) -> bytes:
    path = rng.choice(PATHS)
    prompt = "the prefix that many share, " * rng.randrange(4) + str(rng.randrange(1000))
    sampling = {"max_tokens": rng.randrange(1, 600), "ignore_eos": True, "n": rng.choice((1, 1, 2))}
    stream = rng.random() < 0.7
    if path == "/generate":
        body = {"prompt": prompt, "stream": stream, "sampling_params": {**sampling, "n": 1}}
    elif path == "/v1/completions":
        body = {"prompt": prompt, "stream": stream, "stop": ["tt"], **sampling}
    else:
        body = {"messages": [{"role": "user", "content": prompt}], "stream": stream, **sampling}
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


async def vanish(address: tuple[str, int], rng: random.Random, within_s: float) -> None:
    """Connect at a random moment, send all or a part, read a little or nothing, leave by FIN or RST."""
    await asyncio.sleep(rng.uniform(0, within_s))
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(*address)
        data = request(rng)
        writer.write(data if rng.random() < 0.9 else data[: rng.randrange(len(data))])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0, 0.5)):
                while rng.random() < 0.98 and await reader.read(2000):
                    pass
        if rng.random() < 0.5:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.close()
        await writer.wait_closed()


def storm(server: ServerProcess, clients: int, seconds: float, seed: int) -> None:
    url = httpx.URL(server.url)
    assert url.port is not None
    address = (url.host, url.port)

    async def run() -> None:
        rngs = [random.Random(seed * 100_003 + i) for i in range(clients)]
        await asyncio.gather(*(vanish(address, rng, seconds) for rng in rngs))

    asyncio.run(run())


def held(server: ServerProcess) -> dict[str, float]:
    """What both processes hold, once everything is answered."""
    deadline = time.monotonic() + 2 * WAIT_S
    while True:
        health = httpx.get(server.url + "/health").json()
        stats = health["stats"]
        busy = health["requests_open"] + stats["num_running"] + stats["num_waiting"] + health["requests_queued"]
        back = stats["num_free_pages"] + stats["num_evictable_pages"] == stats["num_pages"]
        processes = [psutil.Process(server.process.pid), *server.children()]
        connections = len([c for c in processes[0].net_connections("tcp") if c.status != psutil.CONN_LISTEN])
        if not busy and back and connections <= 1:
            return {
                "fds": sum(one.num_fds() for one in processes),
                "threads": sum(one.num_threads() for one in processes),
                "tasks": health["tasks"],
                "mb": sum(one.memory_info().rss for one in processes) / 1e6,
            }
        assert time.monotonic() < deadline, (health, connections)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("clients", "seconds"), [(150, 4.0), pytest.param(1000, 60.0, marks=pytest.mark.slow)], ids=["small", "whole"]
)
def test_a_storm_of_vanishing_clients(clients: int, seconds: float) -> None:
    pool = ("--engine", "echo", "--page-size", "4", "--num-pages", "512", "--max-running-requests", "24")
    with serving(*pool, "--no-access-log") as server:
        storm(server, clients, min(seconds, 40.0), seed=1)  # pools and caches of the runtime fill
        before = held(server)
        storm(server, clients, seconds, seed=2)
        after = held(server)
        assert after["tasks"] <= before["tasks"] and after["threads"] <= before["threads"]
        assert after["fds"] <= before["fds"] + 1  # the connection that asks
        assert after["mb"] <= before["mb"] + 16
        counted = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in httpx.get(server.url + "/metrics").text.splitlines()
            if line.startswith("minisgl:requests_")
        }
        ended = sum(value for name, value in counted.items() if name.startswith("minisgl:requests_finished_total"))
        assert counted["minisgl:requests_accepted_total"] == ended > clients
