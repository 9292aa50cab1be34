"""Routers of both implementations, and short calls to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from minisgl.routing.api import KeyShare, Policy, Router, RouterConfig
from minisgl.routing.backend import make_rust_router
from minisgl.routing.reference import ReferenceRouter
from minisgl.step import Int32Array

Make = Callable[[RouterConfig], Router]


def makers() -> dict[str, Make]:
    return {"reference": ReferenceRouter, "rust": make_rust_router}


def prompt(*tokens: int) -> Int32Array:
    return np.array(tokens, np.int32)


def config(policy: Policy, num_engines: int = 2, **others: int) -> RouterConfig:
    """Return a router configuration with pages of 4 tokens."""
    settings = {"page_size": 4, "tree_pages": 64, "balance_requests": 2} | others
    return RouterConfig(policy, num_engines, **settings)


def with_keys(config: RouterConfig, *keys: KeyShare) -> RouterConfig:
    return dataclasses.replace(config, keys=keys)


def up(router: Router, num_engines: int) -> Router:
    for engine in range(num_engines):
        router.engine_up(engine)
    return router


def where(router: Router) -> list[tuple[int, int]]:
    """Place all queued requests; return pairs (request, engine) in order."""
    return [(one.req_id, one.engine) for one in router.place()]


def add_all(router: Router, req_ids: Sequence[int], **others: int) -> None:
    for req_id in req_ids:
        router.add(req_id, prompt(1, 2, 3), **others)
