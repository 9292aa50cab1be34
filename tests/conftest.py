"""Fixtures of all tests. Whatever drives a control plane takes it from `control_plane`, and runs under every one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane

CONTROL_PLANES = ("python",)


@pytest.fixture(params=CONTROL_PLANES)
def control_plane(request: pytest.FixtureRequest) -> Callable[[ControlPlaneConfig], ControlPlane]:
    name: str = request.param
    return lambda config: make_control_plane(name, config)
