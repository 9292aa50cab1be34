"""Chooses the scheduler.

A name that means nothing is an error that lists the valid ones; where the extension is missing the
reference serves, and the reason is told.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.reference import ReferenceControlPlane
from minisgl.scheduler.rust_hotpath import ExtensionMissing, make_rust_hotpath

BACKENDS = ("python", "rust_hotpath")
AUTO = "auto"
"""rust_hotpath if the extension loads."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """`fallback` says why `name` is not what was asked for; empty if it is."""

    name: str
    control_plane: ControlPlane
    fallback: str = ""


def choose(name: str, config: ControlPlaneConfig) -> Chosen:
    """The scheduler called `name`, or auto; the reference where the extension is missing. Raises `ValueError` for a
    name that is unknown and for a configuration that cannot be."""
    if name not in (*BACKENDS, AUTO):
        raise ValueError(f"unknown scheduler {name!r}; valid: {', '.join(BACKENDS)}")
    if name != "python":
        try:
            return Chosen("rust_hotpath", make_rust_hotpath(config))
        except ExtensionMissing as error:
            return Chosen("python", ReferenceControlPlane(config), f"extension missing: {error}")
    return Chosen("python", ReferenceControlPlane(config))


def make_control_plane(name: str, config: ControlPlaneConfig) -> ControlPlane:
    """The scheduler called `name` and no other. Raises `ValueError`, `ExtensionMissing`."""
    if name == "rust_hotpath":
        return make_rust_hotpath(config)
    return choose(name, config).control_plane
