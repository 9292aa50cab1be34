"""Adapters that are loaded over HTTP: the port knows their names while their model has them, loaded or not.

Invariants: a name means one model from the moment that its adapter is to be loaded; one that does not load is no name
afterwards.
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
    """The model that such a request is for, which names `model` or none. Raises `ApiError` 400."""
    known = None if name is None else registry.find_exactly(name)
    if known is None or (path == LOAD and known is model and name in known.adapters):
        return model  # whose server has the words for what is wrong with it
    if path == UNLOAD:
        return known
    raise wrong("lora_name", f"{str(name)[:80]!r} is a name of {known.name} already: choose another name")


@contextlib.contextmanager
def changing(
    registry: Registry, path: str, names: tuple[str | None, str | None], model: Model, has_done: Callable[[], bool]
) -> Iterator[None]:
    """While its server does it. `names`: the adapter's, and of its folder."""
    name, place = names
    if name is None:
        yield  # it is refused
        return
    is_new = path == LOAD and name not in model.adapters
    if is_new:
        registry.name_adapter(model, name)
    try:
        yield
    finally:
        if is_new and has_done():
            root = model.entry.config.lora_folder or ""
            model.adapters[name] = os.path.realpath(os.path.join(root, place or ""))
        elif is_new or (path == UNLOAD and has_done()):
            registry.forget_adapter(model, name)
