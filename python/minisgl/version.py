"""The version that clients are told, and `minisgl --version`.

Keeps true: it is said of sources, too, where no package is installed.
"""

from __future__ import annotations

from importlib import metadata

_FROM_SOURCES = "0+sources"


def own_version() -> str:
    try:
        return metadata.version("minisgl")
    except metadata.PackageNotFoundError:
        return _FROM_SOURCES
