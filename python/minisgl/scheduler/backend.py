"""Chooses the control plane by name.

Keeps true: what was asked for is what runs; a name that can't be served is an error, never a silent fallback.
Doesn't know: environment variables (envs.py reads them), engines.
"""

from __future__ import annotations

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.reference import ReferenceControlPlane
from minisgl.scheduler.rust_hotpath import make_rust_hotpath

BACKENDS = ("python", "rust_hotpath")


def make_control_plane(name: str, config: ControlPlaneConfig) -> ControlPlane:
    """The control plane called `name`. Raises `ValueError` for a name that is unknown or not in this build."""
    if name == "python":
        return ReferenceControlPlane(config)
    if name == "rust_hotpath":
        return make_rust_hotpath(config)
    raise ValueError(f"unknown control plane {name!r}; valid: {', '.join(BACKENDS)}")
