"""The slow operations of the registry: downloads of models, and the start, measuring and stop of their servers.

Invariants: nothing here decides which model is loaded; only the registry changes a model's state.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from minisgl.registry.entries import PROCESSES_BYTES
from minisgl.registry.model import Model
from minisgl.registry.needs import Needs
from minisgl.registry.server import Fetch, ModelServer, Start
from minisgl.server.core.log import say, warn


class Servers:
    """The servers of the registry: `start` starts one, `fetch` downloads a model, `known` has measured memory."""

    def __init__(self, start: Start, fetch: Fetch, known: Needs) -> None:
        self._start, self._fetch, self._known = start, fetch, known

    def recall(self, model: Model) -> None:
        """Read the memory that the model's server took in earlier runs with the same files."""
        model.seen.most_bytes = max(model.seen.most_bytes, self._known.of(model.entry))

    async def fetch(self, model: Model) -> None:
        """Download the model's files, after which its need is known. Raises `NotLoaded` or `OSError`."""
        say(f"{model.name}: fetching {model.entry.config.engine.model}")
        model.seen.doing = "fetching"
        await self._fetch(model.entry.config, partial(setattr, model.seen, "doing"))
        model.seen.was_fetched = True
        self.recall(model)

    async def start(self, model: Model, given: int, forget: Callable[[str], None]) -> ModelServer:
        """Start the model's server, with `given` bytes for its engine and processes; this does not grow with
        measurements. `forget` is called with each adapter whose folder is gone. Raises `NotLoaded` or `OSError`."""
        began = time.monotonic()
        seen, config = model.seen, model.entry.config
        seen.doing = "starting"
        had = {name: folder for name, folder in model.adapters.items() if folder}
        for name in [name for name, folder in had.items() if not os.path.isdir(folder)]:
            warn(f"{model.name}: its adapter {name} is not known any more: its folder is gone")
            forget(name)
            del had[name]
        memory = max(1, given - PROCESSES_BYTES // 2)
        engine = replace(config.engine, memory=memory, lora=(*config.engine.lora, *had.items()))
        server = await self._start(replace(config, engine=engine), partial(setattr, seen, "doing"))
        seen.load_s, seen.max_model_len, seen.sees = time.monotonic() - began, server.max_model_len, server.sees
        return server

    async def measure(self, model: Model) -> int:
        """Return the bytes that the model's server takes now, or 0 if there is none."""
        if model.server is None or model.state != "loaded":
            return 0
        used = await asyncio.to_thread(model.server.used_bytes)
        model.seen.used_bytes, model.seen.most_bytes = used, max(model.seen.most_bytes, used)
        return used

    async def keep(self, model: Model) -> None:
        """Store the memory that the model's server took, for later runs."""
        await asyncio.to_thread(self._known.keep, model.entry, model.seen.most_bytes)
