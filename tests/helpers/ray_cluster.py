"""Real Ray cluster on this machine: nodes that can be killed, a Serve application, its processes, many streams at once.

Ray keeps one cluster for each process: tests share it (tests/ray/conftest.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")  # of a busy machine
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster

from minisgl.ray import Args, build
from tests.helpers.data_parallel import answer, random_ask
from tests.helpers.e2e import until
from tests.helpers.seconds import WAIT_S, patiently

APP = "minisgl"
ECHO = "--engine echo --page-size 16 --num-pages 1024 --no-access-log"


class RayCluster:
    """Ray cluster. Serve's proxy runs on the first node, which takes no replicas if there are others."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ray-")
        self._delay = Path(self._folder, "step_ms")
        os.environ["MINISGL_STEP_DELAY_FILE"] = str(self._delay)  # the cluster's processes inherit it
        Path(get_default_ray_temp_dir()).mkdir(exist_ok=True)  # Ray notes the cluster's address there
        node = {"num_cpus": 8, "include_dashboard": False, "temp_dir": self._folder, "resources": {"first": 99}}
        self.cluster = Cluster(initialize_head=True, head_node_args=node)
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self, **args: Any) -> None:
        """Deploy like `serve run minisgl.ray:app ...`, and return when ready. A running deployment is replaced by a
        rolling update. The ingress is placed on the first node, because its streams would end with it."""
        args = {"ingress_resources": {"first": 1}, "retry_s": patiently(180), **args}
        serve.run(build(Args.model_validate(args)), name=APP, route_prefix="/")

    def delete(self) -> None:
        serve.delete(APP)

    def num_running(self, deployment: str) -> int:
        application = serve.status().applications.get(APP)
        status = application.deployments.get(deployment) if application else None
        return 0 if status is None else status.replica_states.get("RUNNING", 0)

    def until_running(self, deployment: str, number: int) -> None:
        until(lambda: self.num_running(deployment) == number, f"{deployment}: never {number} replicas", WAIT_S)

    def servers(self) -> list[psutil.Process]:
        """Return the `minisgl serve` processes of the replicas, in the order of their start."""
        return sorted(self._find("minisgl", "serve"), key=psutil.Process.create_time)

    def engines(self) -> list[psutil.Process]:
        return self._find("minisgl.runner.process")

    def replicas(self) -> list[psutil.Process]:
        """Return Ray's worker processes that own the servers."""
        found = (server.parent() for server in self.servers())
        return [one for one in found if one is not None]

    def part(self, what: str) -> psutil.Process:
        """Return a process of the oldest replica: "replica", its "server" or its "engine"."""
        server = self.servers()[0]
        if what == "replica":
            return self.replicas()[0]
        return server if what == "server" else next(one for one in self.engines() if server in one.parents())

    def slow_motion(self, step_ms: int) -> None:
        """Make every step of all servers, also of later ones, take `step_ms` longer."""
        self._delay.write_text(str(step_ms))

    def under_load(self, meanwhile: Callable[[], None], *, num_streams: int = 64, max_tokens: int = 300) -> int:
        """Run `num_streams` streams, one request after the other, until `meanwhile`, which runs in a thread, has ended.
        Asserts that each output is that of an undisturbed server. Return the number of requests."""
        return asyncio.run(self._under_load(meanwhile, num_streams, max_tokens))

    async def _under_load(self, meanwhile: Callable[[], None], num_streams: int, max_tokens: int) -> int:
        ended, num_answers = asyncio.Event(), 0
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=WAIT_S, limits=limits) as http:

            async def client(rng: random.Random) -> None:
                nonlocal num_answers
                while not ended.is_set():
                    await answer(http, random_ask(rng, max_tokens))
                    num_answers += 1

            clients = [asyncio.create_task(client(random.Random(seed))) for seed in range(num_streams)]
            event = asyncio.create_task(asyncio.to_thread(meanwhile))
            done, _ = await asyncio.wait([event, *clients], return_when=asyncio.FIRST_COMPLETED)
            ended.set()
            for one in done:
                one.result()
            await event
            await asyncio.gather(*clients)
        return num_answers

    def _find(self, *words: str) -> list[psutil.Process]:
        processes = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if all(word in child.cmdline() for word in words) and child.status() != psutil.STATUS_ZOMBIE:
                    processes.append(child)
        return processes

    def stop(self) -> None:
        """Shut the cluster down, and end and remove everything that is left of it."""
        mine = psutil.Process().children(recursive=True)
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()
        _, alive = psutil.wait_procs(mine, timeout=WAIT_S)
        for one in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(alive, timeout=WAIT_S)
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    cluster = RayCluster()
    try:
        yield cluster
    finally:
        cluster.stop()
