"""The Rust scheduler, `minisgl._rust.ControlPlane`, as a `ControlPlane`.

It decides bit for bit as `scheduler.reference` does. The extension's own object is what serves: no Python
stands between the step loop and it.
"""

from __future__ import annotations

from typing import cast

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.inputs import check_buffers, check_config
from minisgl.step import StepBuffers


class ExtensionMissing(RuntimeError):
    """The compiled part of the package is not there, or is older than this file; the text says how to build it."""


def make_rust_hotpath(config: ControlPlaneConfig, buffers: StepBuffers | None = None) -> ControlPlane:
    """Without `buffers` it makes its own. Raises `ExtensionMissing`, `ValueError` for a bad configuration."""
    try:
        from minisgl import _rust

        kind = _rust.ControlPlane
    except (ImportError, AttributeError) as error:
        raise ExtensionMissing(f"{error}: build it with `maturin develop --release` or `pip install .`") from error
    check_config(config)
    if buffers is None:
        buffers = StepBuffers(config.limits(), max(config.graph_sizes, default=0))
    check_buffers(config, buffers)
    return cast(ControlPlane, kind(config, buffers))
