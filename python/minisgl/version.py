"""The version that clients are told, and `minisgl --version`.

Invariants: it is said of sources, too, where no package is installed.
"""

from __future__ import annotations

_FROM_SOURCES = "0+sources"


def own_version() -> str:
    from importlib import metadata  # takes its time, which few programs have to spend

    try:
        return metadata.version("minisgl")
    except metadata.PackageNotFoundError:
        return _FROM_SOURCES
