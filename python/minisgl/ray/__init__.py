"""Deployment on Ray Serve: `serve run minisgl.ray:app model=smollm2 replicas=2`, or `minisgl.ray.build(args)`.

A replica is a whole server, whose work is in `server/` and `supervisor/`. Start with `application.py`, then
`ingress.py` and `relay.py`, the path of a request.
"""

from __future__ import annotations

from typing import Any

from minisgl.ray.args import Args, ModelArgs
from minisgl.utils.installed import need

__all__ = ["Args", "ModelArgs", "app", "build"]


def __getattr__(name: str) -> Any:
    """Import `app` or `build` on first use, since only they need Ray."""
    if name not in ("app", "build"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    need(f"minisgl.ray.{name}", "ray")
    from minisgl.ray import application

    return getattr(application, name)
