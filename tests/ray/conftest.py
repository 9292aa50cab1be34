"""One Ray cluster for all tests that need one: `make ray-test`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers.ray_cluster import RayCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    from tests.helpers.ray_cluster import ray_cluster  # where Ray is installed

    with ray_cluster() as running:
        yield running
