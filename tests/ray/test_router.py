"""Serve's request router is the pool's: what shares a beginning goes to one replica, the rest is spread."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.helpers.seconds import WAIT_S

if TYPE_CHECKING:
    from tests.helpers.ray_cluster import RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
ECHO = "--engine echo --page-size 16 --num-pages 1024 --no-access-log"


def cached(http: httpx.Client, talk: str) -> int:
    answer = http.post("/v1/completions", json={"prompt": talk, "max_tokens": 2, "ignore_eos": True}).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("routing", ["prefix", "default"])
def test_talks_stay_where_their_beginning_is(cluster: RayCluster, routing: str) -> None:
    cluster.deploy(name="echo", flags=ECHO, replicas=3, routing=routing)
    with httpx.Client(base_url=cluster.url, timeout=WAIT_S) as http:
        talks = [json.dumps({"talk": i}) * 10 for i in range(9)]
        hits = []
        for turn in range(4):
            talks = [talk + f" turn {turn} " * 8 for talk in talks]
            found = [cached(http, talk) > 0 for talk in talks]
            hits += found if turn else []
    if routing == "prefix":
        assert all(hits)
        assert cluster.under_load(lambda: None, num_streams=32) >= 32
    else:
        assert not all(hits)  # power of two choices knows of none
