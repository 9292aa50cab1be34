"""minisgl on Ray Serve: `serve run minisgl.ray:app model=smollm2 replicas=2`, or `minisgl.ray.build(args)`.

A replica is a whole server: what one machine does belongs to `server/` and `supervisor/`. Start with `application.py`,
then `ingress.py` and `relay.py`, the way of a request.
"""

from __future__ import annotations

from typing import Any

from minisgl.ray.args import Args, ModelArgs
from minisgl.utils.installed import need

__all__ = ["Args", "ModelArgs", "app", "build"]


def __getattr__(name: str) -> Any:
    """`app` and `build` need Ray; who wants the rest does not."""
    if name not in ("app", "build"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    need(f"minisgl.ray.{name}", "ray")
    from minisgl.ray import application

    return getattr(application, name)
