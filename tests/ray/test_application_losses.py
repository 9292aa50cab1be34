"""What dies under 64 streams takes none of them with it: a replica, its server, its engine, a node; what hangs is
replaced. Every text is that of the echo engine, every usage that of the whole."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.helpers.e2e import until
from tests.helpers.seconds import WAIT_S, patiently

if TYPE_CHECKING:
    from tests.helpers.ray_cluster import RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ECHO = "--engine echo --page-size 16 --num-pages 1024 --no-access-log"
PARTS = ("replica", "server", "engine")


@pytest.fixture(scope="module")
def two(cluster: RayCluster) -> RayCluster:
    cluster.deploy(name="echo", flags=ECHO, replicas=2)
    return cluster


def replaced(cluster: RayCluster, victim: psutil.Process) -> Callable[[], bool]:
    return lambda: not victim.is_running() and len(cluster.servers()) == len(cluster.engines()) == 2


def test_streams_survive_a_killed_process(two: RayCluster) -> None:
    def kill() -> None:
        for what in PARTS:
            victim = two.part(what)
            victim.kill()
            until(replaced(two, victim), f"the {what} is not replaced", patiently(120.0))
            two.until_running("echo", 2)

    assert two.under_load(kill) >= 64


def test_hung_replica_is_replaced(two: RayCluster) -> None:
    two.until_running("echo", 2)

    def stop() -> None:
        for what in ("engine", "server"):
            victim = two.part(what)
            victim.send_signal(signal.SIGSTOP)
            until(replaced(two, victim), f"the {what} that hangs is not replaced", patiently(120.0))
            two.until_running("echo", 2)

    assert two.under_load(stop, num_streams=32) >= 32


def test_all_replicas_at_once(two: RayCluster) -> None:
    two.until_running("echo", 2)

    def kill() -> None:
        victims = two.servers()
        for victim in victims:
            victim.kill()
        for victim in victims:
            until(replaced(two, victim), "not replaced", patiently(120.0))

    assert two.under_load(kill, num_streams=16) >= 16


def test_a_node_that_dies_takes_no_stream_with_it(cluster: RayCluster) -> None:
    cluster.delete()
    node = cluster.cluster.add_node(num_cpus=2)
    try:
        cluster.deploy(name="echo", flags=ECHO, replicas=2, cpus=1)
        there = [server for server in cluster.servers() if on(node, server)]
        assert len(there) == 1

        def kill() -> None:
            cluster.cluster.remove_node(node, allow_graceful=False)
            psutil.wait_procs(there, timeout=WAIT_S)
            cluster.until_running("echo", 2)  # the first node has room for both

        assert cluster.under_load(kill) >= 64
        assert not any(server.is_running() for server in there)
    finally:
        if node in cluster.cluster.worker_nodes:
            cluster.cluster.remove_node(node, allow_graceful=False)


def on(node: object, server: psutil.Process) -> bool:
    """Whether it is a descendant of the node's raylet."""
    processes = node.all_processes["raylet"]  # type: ignore[attr-defined]
    raylet = processes[0].process.pid
    return any(parent.pid == raylet for parent in server.parents())
