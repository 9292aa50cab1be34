"""Whatever an engine that computes models must do is asked of each."""

from __future__ import annotations

import pytest

from tests.helpers.engines import MODEL_ENGINES


@pytest.fixture(params=MODEL_ENGINES)
def engine_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
