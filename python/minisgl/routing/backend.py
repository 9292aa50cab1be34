"""Chooses the router: the one in Rust, where the extension is missing the reference. They decide the same."""

from __future__ import annotations

import msgspec

from minisgl.extension import _rust
from minisgl.routing.api import Router, RouterConfig
from minisgl.routing.reference import ReferenceRouter


def make_router(config: RouterConfig) -> Router:
    """Raises `ValueError` for a configuration that cannot be."""
    try:
        return make_rust_router(config)
    except ImportError:
        return ReferenceRouter(config)


def make_rust_router(config: RouterConfig) -> Router:
    """Raises `ExtensionMissing`, an `ImportError`."""
    return _rust.Router(msgspec.json.encode(config.check()).decode())
