"""One Ray cluster for all tests that need one: `make ray-test`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.helpers.processor import without_amx

if TYPE_CHECKING:
    from tests.helpers.ray_cluster import RayCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    from tests.helpers.ray_cluster import ray_cluster  # where Ray is installed

    with without_amx(), ray_cluster() as running:  # a story that goes on elsewhere is computed again there
        yield running
