"""Chooses the scheduler.

A name that means nothing is an error that lists the valid ones; where the extension is missing the
reference serves, and the reason is told. `minisgl._rust.ControlPlane` decides bit for bit as `scheduler.reference`
does. The extension's own object is what serves: no Python stands between the step loop and it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from minisgl.extension import HOW_TO_BUILD, ExtensionMissing, _rust
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.inputs import check_buffers, check_config
from minisgl.scheduler.policies import RUST_PARTS, scheduler_problem
from minisgl.scheduler.reference import ReferenceControlPlane
from minisgl.scheduler.rust_parts import make_parts, parse_parts
from minisgl.scheduler.shadow import ShadowSummary
from minisgl.step import StepBuffers


@dataclass(frozen=True, slots=True)
class Chosen:
    """`fallback` says why `name` is not what was asked for; empty if it is. `shadow` has the counts of a shadow that
    follows it; None if none does."""

    name: str
    control_plane: ControlPlane
    fallback: str = ""
    shadow: ShadowSummary | None = None


def choose(name: str, config: ControlPlaneConfig) -> Chosen:
    """The scheduler called `name`, or auto; the reference where the extension is missing. Raises `ValueError` for a
    name that is unknown and for a configuration that cannot be."""
    if problem := scheduler_problem(name):
        raise ValueError(problem)
    is_parts = name.partition(":")[0] == RUST_PARTS
    if name != "python":
        try:
            if is_parts:
                return Chosen(name, make_rust_parts(parse_parts(name), config))
            return Chosen("rust_hotpath", make_rust_hotpath(config))
        except ExtensionMissing as error:
            return Chosen("python", ReferenceControlPlane(config), f"extension missing: {error}")
    return Chosen("python", ReferenceControlPlane(config))


def make_control_plane(name: str, config: ControlPlaneConfig) -> ControlPlane:
    """The scheduler called `name` and no other. Raises `ValueError`, `ExtensionMissing`."""
    chosen = choose(name, config)
    if chosen.fallback:
        raise ExtensionMissing(chosen.fallback.removeprefix("extension missing: "))
    return chosen.control_plane


def make_rust_parts(names: Sequence[str], config: ControlPlaneConfig) -> ControlPlane:
    """The reference with `names` of its parts in Rust. Raises `ExtensionMissing`."""
    try:
        return ReferenceControlPlane(config, parts=make_parts(names))
    except AttributeError as error:
        raise ExtensionMissing(f"{error}: {HOW_TO_BUILD}") from error


def make_rust_hotpath(config: ControlPlaneConfig, buffers: StepBuffers | None = None) -> ControlPlane:
    """Without `buffers` it makes its own. Raises `ExtensionMissing`, `ValueError` for a bad configuration."""
    try:
        kind = _rust.ControlPlane
    except AttributeError as error:
        raise ExtensionMissing(f"{error}: {HOW_TO_BUILD}") from error
    check_config(config)
    if buffers is None:
        buffers = StepBuffers(config.limits(), max(config.graph_sizes, default=0))
    check_buffers(config, buffers)
    return cast(ControlPlane, kind(config, buffers))
