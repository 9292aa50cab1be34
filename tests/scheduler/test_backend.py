"""Which scheduler serves, and what is said of it."""

from __future__ import annotations

import sys

import pytest

from minisgl.extension import ExtensionMissing
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import choose, make_control_plane
from minisgl.scheduler.reference import ReferenceControlPlane

CONFIG = ControlPlaneConfig(16, 4, 4, 16, 64)


@pytest.mark.parametrize("name", ["auto", "rust_hotpath"])
def test_rust_serves_if_the_extension_loads(name: str) -> None:
    chosen = choose(name, CONFIG)
    assert (chosen.name, chosen.fallback) == ("rust_hotpath", "")
    assert type(chosen.control_plane).__module__ == "minisgl._rust"


@pytest.mark.parametrize("name", ["auto", "rust_hotpath"])
def test_without_the_extension_the_reference_serves_and_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minisgl._rust", None)
    monkeypatch.delattr("minisgl._rust", raising=False)
    chosen = choose(name, CONFIG)
    assert chosen.name == "python" and isinstance(chosen.control_plane, ReferenceControlPlane)
    assert "maturin develop" in chosen.fallback
    with pytest.raises(ExtensionMissing, match="maturin develop"):
        make_control_plane("rust_hotpath", CONFIG)


def test_python_is_the_reference() -> None:
    assert isinstance(choose("python", CONFIG).control_plane, ReferenceControlPlane)


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="python, rust_hotpath"):
        choose("fortran", CONFIG)
