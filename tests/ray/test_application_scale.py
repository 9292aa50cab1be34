"""More replicas, fewer, new ones: under load, and no request notices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers.e2e import until

if TYPE_CHECKING:
    from tests.helpers.ray_cluster import RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ECHO = "--engine echo --page-size 16 --num-pages 1024 --no-access-log"


def test_a_burst_brings_replicas_and_its_end_takes_them(cluster: RayCluster) -> None:
    cluster.delete()
    cluster.deploy(
        name="echo",
        flags=ECHO,
        max_replicas=3,
        queued_tokens=200,
        kv_use=0.02,
        upscale_delay_s=0.2,
        downscale_delay_s=10.0,  # a load of short answers comes in waves
    )
    assert cluster.num_running("echo") == 1
    assert cluster.under_load(lambda: cluster.until_running("echo", 3)) >= 64
    # under a little load the others go, with what they are answering answered
    assert cluster.under_load(lambda: cluster.until_running("echo", 1), num_streams=1, max_tokens=30)


def test_a_rolling_update(cluster: RayCluster) -> None:
    cluster.deploy(name="echo", flags=ECHO, replicas=2, drain_s=60)
    before = cluster.servers()

    def update() -> None:
        cluster.deploy(name="echo", flags=f"{ECHO} --max-running-requests 128", replicas=2, drain_s=60)
        until(lambda: not any(one.is_running() for one in before), "the replicas of before stay", 120)

    assert cluster.under_load(update, num_streams=32) >= 32
    assert all("--max-running-requests" in one.cmdline() for one in cluster.servers())


def test_an_update_that_waits_for_nobody(cluster: RayCluster) -> None:
    """Without time to end, streams of the replicas that go are taken up by those that come."""
    cluster.deploy(name="echo", flags=ECHO, replicas=2, drain_s=0)
    cluster.under_load(
        lambda: cluster.deploy(name="echo", flags=f"{ECHO} --max-running-requests 128", replicas=2, drain_s=0)
    )
