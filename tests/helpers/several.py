"""Servers of several models: registries over fake servers, and real ones as child processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from minisgl.config import EngineConfig, Limits, ServerConfig
from minisgl.engine.echo import EchoModel
from minisgl.registry.entries import Entry
from minisgl.registry.model import Model
from minisgl.registry.registry import Registry
from minisgl.registry.server import ModelServer, NotLoaded
from minisgl.tokenizer import Tokenizer
from tests.helpers.seconds import WAIT_S

MIB = 2**20
NEED = 100 * MIB


def entry(name: str, **settings: Any) -> Entry:
    """Return a registry entry of an engine that needs no model files."""
    config = ServerConfig(engine=EngineConfig(model=name, engine="echo"), served_model_name=name)
    return Entry(name=name, config=config, **{"memory": NEED, **settings})


class FakeServer:
    """Fake server without clients. `used` are the bytes that it takes."""

    def __init__(self, name: str, used: int, address: tuple[str, int]) -> None:
        self.name = name
        self.address = address
        self.max_model_len, self.sees = 64, False
        self.use: list[tuple[int, int]] = []
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.used = used
        self.stopped = asyncio.Event()

    def used_bytes(self) -> int:
        return self.used

    async def stop(self) -> None:
        await asyncio.sleep(0)
        if not self.ended.done():
            self.ended.set_result(0)
        self.stopped.set()


class Fleet:
    """Starter of fake servers: at once, or when a test releases them (`hold`); `refuse` is the error of a start."""

    def __init__(self) -> None:
        self.used: dict[str, int] = {}
        self.refuse: dict[str, str] = {}
        self.hold: dict[str, asyncio.Event] = {}
        self.started: list[str] = []
        self.servers: dict[str, FakeServer] = {}
        self.fetched: list[str] = []
        self.configs: dict[str, ServerConfig] = {}
        self.address = ("127.0.0.1", 1)  # of the server in front of all

    async def start(self, config: ServerConfig, hear: Callable[[str], None]) -> ModelServer:
        name = config.model_name
        self.started.append(name)
        self.configs[name] = config
        hear("reading")
        if (gate := self.hold.get(name)) is not None:
            await gate.wait()
        if name in self.refuse:
            raise NotLoaded(self.refuse[name])
        self.servers[name] = FakeServer(name, self.used.get(name, NEED), self.address)
        return self.servers[name]

    async def fetch(self, config: ServerConfig, hear: Callable[[str], None]) -> None:
        self.fetched.append(config.model_name)
        hear("fetching 1 of 2 files")
        if config.model_name in self.refuse:
            raise NotLoaded(self.refuse[config.model_name])


def registry(fleet: Fleet, *entries: Entry, room_for: float, **limits: Any) -> Registry:
    """Return a registry with capacity for `room_for` models of `NEED` bytes."""
    seconds, needs = limits.pop("load_timeout_s", 60.0), limits.pop("needs", None)
    return Registry(entries, int(room_for * NEED), Limits(**limits), seconds, fleet.start, fleet.fetch, needs)


@contextlib.asynccontextmanager
async def several(*entries: Entry, room_for: float, **limits: Any) -> AsyncIterator[tuple[Fleet, Registry]]:
    fleet = Fleet()
    found = registry(fleet, *entries, room_for=room_for, **limits)
    yield fleet, found
    await found.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0)


def states(found: Registry) -> dict[str, str]:
    return {model.name: model.state for model in found.models.values()}


async def use(found: Registry, name: str) -> None:
    """Run one request of a model from begin to end."""
    with found.lease(model(found, name)) as lease:
        await lease.ready


def model(found: Registry, name: str) -> Model:
    return found.models[name]


def write_models(path: Path, entries: Sequence[dict[str, object]]) -> str:
    """Write a models file (JSON, which is YAML); return its path."""
    path.write_text(json.dumps({"models": entries}))
    return str(path)


def echo(name: str, **more: object) -> dict[str, object]:
    return {"name": name, "model": "echo", "flags": "--engine echo --num-pages 500", "memory": "150MB", **more}


def expected(prompt: str, max_tokens: int, seed: int = 0, *, to_the_end: bool = False, **model: Any) -> str:
    """Return the text that an echo engine generates. `to_the_end`: ignore end tokens. `model`: its arguments."""
    ids = _echo().encode(prompt).tolist()
    tokens = EchoModel(seed=seed, **model).generate(ids, max_tokens, ignore_eos=to_the_end)
    return _echo().decode([one for one in tokens if one < 256])


_echo = functools.cache(Tokenizer.echo)
