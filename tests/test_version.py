"""A server that runs from its sources, installed nowhere, says so instead of not starting."""

from __future__ import annotations

from importlib import metadata

import pytest

from minisgl.version import own_version


def test_of_the_installed_package() -> None:
    assert own_version() == metadata.version("minisgl")


def test_without_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert own_version() == "0+sources"
