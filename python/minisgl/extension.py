"""Lazy access to the compiled extension `minisgl._rust`, with the reason when it does not load.

Invariants: importing this module never fails and loads nothing; no other module imports `minisgl._rust` at run time, so
`MINISGL_NO_EXTENSION=1` holds everywhere.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from minisgl import envs

if TYPE_CHECKING:
    from minisgl import _rust

__all__ = ["HOW_TO_BUILD", "NAME", "NEEDS", "WITHOUT", "ExtensionMissing", "_rust", "debug_build", "why_missing"]
NAME = "minisgl._rust"
NEEDS = f"needs the extension {NAME}, which is missing"
WITHOUT = "until then the torch engine, the Python scheduler and the Python front end serve"
HOW_TO_BUILD = "build it with `maturin develop`"


class ExtensionMissing(ImportError):
    """The extension does not load, or is older than the package. The text says why and how to build it."""


def why_missing() -> str:
    """Return why the extension does not load and how to build it, or "" if it loads."""
    if envs.no_extension():
        return f"{envs.NO_EXTENSION} hides it: unset that; where it is not built, {HOW_TO_BUILD}"
    try:
        importlib.import_module(NAME)
    except ImportError as error:
        return f"{error}: {HOW_TO_BUILD}"
    return ""


def debug_build() -> str:
    """Return the profile of an unoptimized build of the extension, or "" if it is optimized or missing."""
    if why_missing():
        return ""
    profile = str(sys.modules[NAME].build_info()["profile"])
    return "" if profile == "release" else profile


class _Lazy:
    """A proxy for the extension's module, which is loaded on the first attribute access. Raises `ExtensionMissing`, or
    `AttributeError` for a name that an older extension lacks."""

    def __getattr__(self, name: str) -> Any:
        if why := why_missing():
            raise ExtensionMissing(f"{name} {NEEDS}: {why}")
        return getattr(sys.modules[NAME], name)


if not TYPE_CHECKING:
    _rust = _Lazy()
