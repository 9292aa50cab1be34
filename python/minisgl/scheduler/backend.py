"""Chooses and creates the scheduler. An unknown name is an error that lists the valid ones. Without the Rust extension
the Python reference serves, and `ChosenScheduler.fallback` has the reason. `minisgl._rust.ControlPlane` makes
bit-identical decisions and is used directly, without a Python wrapper in the step loop."""

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
class ChosenScheduler:
    """A chosen scheduler. `fallback` says why `name` differs from the requested name (empty: it does not). `shadow` has
    the counts of a shadow scheduler that is compared with it; `None` if there is none."""

    name: str
    control_plane: ControlPlane
    fallback: str = ""
    shadow: ShadowSummary | None = None


def choose(name: str, config: ControlPlaneConfig) -> ChosenScheduler:
    """Create the scheduler `name`, which may be auto; fall back to the reference if the extension is missing. Raises
    `ValueError` for an unknown name or an invalid configuration."""
    if problem := scheduler_problem(name):
        raise ValueError(problem)
    is_parts = name.partition(":")[0] == RUST_PARTS
    if name != "python":
        try:
            if is_parts:
                return ChosenScheduler(name, make_rust_parts(parse_parts(name), config))
            return ChosenScheduler("rust_hotpath", make_rust_hotpath(config))
        except ExtensionMissing as error:
            return ChosenScheduler("python", ReferenceControlPlane(config), f"extension missing: {error}")
    return ChosenScheduler("python", ReferenceControlPlane(config))


def make_control_plane(name: str, config: ControlPlaneConfig) -> ControlPlane:
    """Create the scheduler `name`, without fallback. Raises `ValueError` for an unknown name or an invalid
    configuration, `ExtensionMissing` if the Rust extension does not load."""
    chosen = choose(name, config)
    if chosen.fallback:
        raise ExtensionMissing(chosen.fallback.removeprefix("extension missing: "))
    return chosen.control_plane


def make_rust_parts(names: Sequence[str], config: ControlPlaneConfig) -> ControlPlane:
    """Create the reference scheduler with the parts `names` in Rust. Raises `ExtensionMissing`."""
    try:
        return ReferenceControlPlane(config, parts=make_parts(names))
    except AttributeError as error:
        raise ExtensionMissing(f"{error}: {HOW_TO_BUILD}") from error


def make_rust_hotpath(config: ControlPlaneConfig, buffers: StepBuffers | None = None) -> ControlPlane:
    """Create the Rust scheduler, with new step buffers if `buffers` is `None`. Raises `ExtensionMissing`, and
    `ValueError` for an invalid configuration."""
    try:
        kind = _rust.ControlPlane
    except AttributeError as error:
        raise ExtensionMissing(f"{error}: {HOW_TO_BUILD}") from error
    check_config(config)
    if buffers is None:
        buffers = StepBuffers(config.limits(), max(config.graph_sizes, default=0))
    check_buffers(config, buffers)
    return cast(ControlPlane, kind(config, buffers))
