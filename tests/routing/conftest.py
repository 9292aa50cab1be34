"""Routers: whatever a router must do is asked of both."""

from __future__ import annotations

import pytest

from tests.helpers.routing import Make, makers


@pytest.fixture(params=list(makers()))
def make(request: pytest.FixtureRequest) -> Make:
    return makers()[request.param]
