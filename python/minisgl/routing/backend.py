"""Chooses the router: the one in Rust, where the extension is missing the reference. They decide the same."""

from __future__ import annotations

import msgspec

from minisgl.routing.api import Router, RouterConfig
from minisgl.routing.reference import ReferenceRouter


def make_router(config: RouterConfig) -> Router:
    """Raises `ValueError` for a configuration that cannot be."""
    try:
        return make_rust_router(config)
    except ImportError:
        return ReferenceRouter(config)


def make_rust_router(config: RouterConfig) -> Router:
    """Raises `ImportError` where the extension is missing, or older than this file."""
    from minisgl._rust import Router as RustRouter

    return RustRouter(msgspec.json.encode(config.check()).decode())
