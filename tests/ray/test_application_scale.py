"""More replicas, fewer, new ones: under load, and no request notices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers.e2e import until
from tests.helpers.seconds import WAIT_S, patiently

if TYPE_CHECKING:
    from tests.helpers.ray_cluster import RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ECHO = "--engine echo --page-size 16 --num-pages 1024 --no-access-log"


def test_a_burst_brings_replicas_and_its_end_takes_them(cluster: RayCluster) -> None:
    """Slow steps: what the streams hold of the KV pool is then there whenever Serve looks, on any machine, and replicas
    have time to start beside them."""
    cluster.delete()
    cluster.deploy(
        name="echo",
        flags=ECHO,
        max_replicas=3,
        queued_tokens=1000,
        kv_use=0.02,  # 16 streams: a fifth of a pool, on a machine that keeps few fed a tenth; one: 0.004
        upscale_delay_s=0.2,
        downscale_delay_s=5.0,
    )
    assert cluster.num_running("echo") == 1

    def all_there() -> None:
        until(lambda: cluster.num_running("echo") == 3, "echo: never 3 replicas", WAIT_S)

    cluster.slow_motion(step_ms=100)
    assert cluster.under_load(all_there, num_streams=16) >= 16
    cluster.slow_motion(step_ms=0)
    # under a little load the others go, with what they are answering answered
    assert cluster.under_load(lambda: cluster.until_running("echo", 1), num_streams=1, max_tokens=30)


def test_a_rolling_update(cluster: RayCluster) -> None:
    cluster.deploy(name="echo", flags=ECHO, replicas=2, drain_s=60)
    before = cluster.servers()

    def update() -> None:
        cluster.deploy(name="echo", flags=f"{ECHO} --max-running-requests 128", replicas=2, drain_s=60)
        until(lambda: not any(one.is_running() for one in before), "the replicas of before stay", patiently(120.0))

    assert cluster.under_load(update, num_streams=32) >= 32
    assert all("--max-running-requests" in one.cmdline() for one in cluster.servers())


def test_streams_survive_update_without_drain_time(cluster: RayCluster) -> None:
    """Without time to end, streams of the replicas that go are taken up by those that come."""
    cluster.deploy(name="echo", flags=ECHO, replicas=2, drain_s=0)
    cluster.under_load(
        lambda: cluster.deploy(name="echo", flags=f"{ECHO} --max-running-requests 128", replicas=2, drain_s=0)
    )
