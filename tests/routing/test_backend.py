"""The choice between both."""

from __future__ import annotations

import sys

import pytest

from minisgl.routing.backend import make_router
from minisgl.routing.reference import ReferenceRouter
from tests.helpers.routing import config


def test_rust_if_the_extension_loads_else_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(make_router(config("random"))).__module__ == "minisgl._rust"
    monkeypatch.setitem(sys.modules, "minisgl._rust", None)
    assert isinstance(make_router(config("random")), ReferenceRouter)
