"""Fixtures of all tests. Whatever drives a control plane takes it from `control_plane`, and runs under every one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane

CONTROL_PLANES = ("python", "rust_hotpath")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def suits(item: pytest.Item) -> bool:
        name = getattr(item, "callspec", None) and item.callspec.params.get("each_control_plane")  # type: ignore[attr-defined]
        return item.get_closest_marker("reference_only") is None or name in (None, "python")

    items[:] = [item for item in items if suits(item)]


@pytest.fixture(params=CONTROL_PLANES)
def control_plane(request: pytest.FixtureRequest) -> Callable[[ControlPlaneConfig], ControlPlane]:
    name: str = request.param
    return lambda config: make_control_plane(name, config)


@pytest.fixture(params=CONTROL_PLANES)
def each_control_plane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every `Driver` of the test drives this one; its name."""
    name: str = request.param
    monkeypatch.setattr("tests.helpers_scheduler.PLANE", name)
    return name
