"""Adapters that are loaded over HTTP: the port knows their names as long as their model has them, loaded or not.

Invariants: a name belongs to one model from the moment its adapter is to be loaded; the name of an adapter that failed
to load is free again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from minisgl.registry.model import Model
from minisgl.registry.registry import Registry
from minisgl.server.admin.adapters import LOAD, UNLOAD
from minisgl.server.core.errors import wrong

PATHS = (LOAD, UNLOAD)


def owner(registry: Registry, path: str, name: str | None, model: Model) -> Model:
    """Return the model that a request to load or unload adapter `name` is for; `model` is the one that the request
    names. Raises `ApiError` 400 if the name belongs to another model."""
    current = None if name is None else registry.find_exactly(name)
    if current is None or (path == LOAD and current is model and name in current.adapters):
        return model  # its server reports the error
    if path == UNLOAD:
        return current
    raise wrong("lora_name", f"{str(name)[:80]!r} is a name of {current.name} already: choose another name")


@contextlib.contextmanager
def changing(
    registry: Registry, path: str, names: tuple[str | None, str | None], model: Model, has_done: Callable[[], bool]
) -> Iterator[None]:
    """Reserve the adapter's name while the server loads it, and record the result on exit. `names` are the adapter's
    name and its folder; `has_done` returns whether the server succeeded."""
    name, folder = names
    if name is None:
        yield  # the server will refuse it
        return
    is_new = path == LOAD and name not in model.adapters
    if is_new:
        registry.name_adapter(model, name)
    try:
        yield
    finally:
        if is_new and has_done():
            root = model.entry.config.lora_folder or ""
            model.adapters[name] = os.path.realpath(os.path.join(root, folder or ""))
        elif is_new or (path == UNLOAD and has_done()):
            registry.forget_adapter(model, name)
