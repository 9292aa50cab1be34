"""Chooses the control plane by name.

Keeps true: what was asked for is what runs; a name that can't be served is an error, never a silent fallback.
Doesn't know: environment variables (envs.py reads them), engines.
"""

from __future__ import annotations

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.reference import ReferenceControlPlane

BACKENDS = ("python", "rust_hotpath")


def make_control_plane(name: str, config: ControlPlaneConfig) -> ControlPlane:
    """The control plane called `name`. Raises `ValueError` for a name that is unknown or not in this build."""
    if name == "python":
        return ReferenceControlPlane(config)
    if name == "rust_hotpath":
        raise ValueError("control plane 'rust_hotpath' is not in this build; use 'python'")
    raise ValueError(f"unknown control plane {name!r}; valid: {', '.join(BACKENDS)}")
