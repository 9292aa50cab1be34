"""The compiled extension `minisgl._rust`: this module loads it when it is used, and says why where it cannot.

Invariants: importing this module never fails and loads nothing; no other module imports `minisgl._rust` at run time, so
`MINISGL_NO_EXTENSION=1` holds everywhere.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from minisgl import envs

if TYPE_CHECKING:
    from minisgl import _rust as rust

NAME = "minisgl._rust"
HOW_TO_BUILD = "build it with `maturin develop`"


class ExtensionMissing(ImportError):
    """The extension does not load, or is older than the package; the text says why and how to build it."""


def load() -> Any:
    """Return the extension's module. Raises `ExtensionMissing`."""
    if envs.no_extension():
        raise ExtensionMissing(f"the extension {NAME} is missing: {envs.NO_EXTENSION} hides it: {HOW_TO_BUILD}")
    try:
        return importlib.import_module(NAME)
    except ImportError as error:
        raise ExtensionMissing(f"the extension {NAME} is missing: {error}: {HOW_TO_BUILD}") from error


def why_missing() -> str:
    """Return why the extension does not load and how to build it; empty if it loads."""
    try:
        load()
    except ExtensionMissing as error:
        return str(error)
    return ""


class _Lazy:
    """The extension's module, loaded when one of its names is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(load(), name)


if not TYPE_CHECKING:
    rust = _Lazy()
