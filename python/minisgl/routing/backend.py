"""Chooses the router: the Rust one, or the reference if the extension is missing. They decide alike."""

from __future__ import annotations

import msgspec

from minisgl.extension import _rust
from minisgl.routing.api import Router, RouterConfig
from minisgl.routing.reference import ReferenceRouter


def make_router(config: RouterConfig) -> Router:
    """Create a router. Raises `ValueError` for an invalid configuration."""
    try:
        return make_rust_router(config)
    except ImportError:
        return ReferenceRouter(config)


def make_rust_router(config: RouterConfig) -> Router:
    """Create the Rust router. Raises `ExtensionMissing`, an `ImportError`."""
    return _rust.Router(msgspec.json.encode(config.check()).decode())
