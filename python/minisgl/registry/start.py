"""The life of a server of several models: its port, its front, and the servers that it starts.

Invariants: those of a server of one model (`supervisor/`): SIGTERM lets running answers end, Ctrl-C or a second signal
does not, all with exit code 0; no process, socket or file is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
from collections.abc import Sequence
from typing import Any

import uvloop
from msgspec.structs import replace

from minisgl import envs
from minisgl.config import ConfigError, ServerConfig
from minisgl.registry.entries import Entry, check_names
from minisgl.registry.front import Front
from minisgl.registry.needs import Needs
from minisgl.registry.registry import Registry
from minisgl.registry.server import ChildServers
from minisgl.server.batches.store import Store
from minisgl.server.core.callers import ANY, Callers
from minisgl.server.core.http import HttpServer
from minisgl.server.core.log import say, set_up, warn
from minisgl.server.core.middleware import Middleware
from minisgl.supervisor.serving import Signals, is_exposed, under_way, until_stdin_ends, url_of
from minisgl.supervisor.start import check_extension, early_signals, listen, raise_descriptors
from minisgl.utils.memory import free_memory, limit_malloc

SHARE = 0.9  # default fraction of the free memory, without --memory
NEEDS = "needs.json"


def run_several(config: ServerConfig, entries: Sequence[Entry], load_timeout_s: float, *warnings: str) -> int:
    """Serve several models until a signal, and return the exit code. `config` is the port's. Raises `ConfigError`."""
    store = None if config.state_dir is None else Store.open(config.state_dir)
    set_up(config.log_format, access=config.access_log, level=config.engine.log_level)
    check_extension(config)
    for line in warnings:
        warn(f"minisgl: {line}")
    budget = _budget(config, entries)
    hosts = tuple(Callers.of(config).hosts or (ANY,))  # the servers accept the same Host names as the front
    tells = any(one.max_queued_requests or one.tokens_per_minute for one in config.api_keys)
    more: dict[str, Any] = {"allowed_hosts": hosts, "tells_use": tells, "state_dir": None}
    more["takes_lines"] = store is not None
    behind = [replace(one, config=replace(one.config, **more)) for one in entries]
    with listen(config) as listener:
        raise_descriptors()
        limit_malloc()
        with early_signals() as came:
            return uvloop.run(_serve(config, behind, budget, load_timeout_s, listener, came, store))


def _budget(config: ServerConfig, entries: Sequence[Entry]) -> int:
    """Return the memory of all models in bytes. Raises `ConfigError` if the pinned ones do not fit."""
    check_names(entries)
    free = free_memory()
    budget = int(free.num_bytes * SHARE) if config.engine.memory is None else config.engine.memory
    needs = dict[str, int]()
    for entry in entries:
        try:
            needs[entry.name] = entry.need() or 0
        except ConfigError as error:
            warn(f"{entry.name}: cannot be loaded now: {error}")
    pinned = sum(needs.get(entry.name, 0) for entry in entries if entry.pin)
    if pinned > budget:
        raise ConfigError(
            f"--memory: {budget / 2**20:.0f} MiB: the models that are pinned need {pinned / 2**20:.0f} MiB: pin fewer, "
            "or give more"
        )
    for entry in entries:
        others = pinned if not entry.pin else 0
        if (need := needs.get(entry.name, 0)) > budget - others:
            warn(
                f"{entry.name}: needs {need / 2**20:.0f} MiB, and there are {(budget - others) / 2**20:.0f} MiB for it "
                "(--memory): its requests are refused"
            )
    say(f"{len(entries)} models, {budget / 2**20:.0f} MiB for those that are loaded: {', '.join(needs)}")
    return budget


async def _serve(
    config: ServerConfig,
    entries: Sequence[Entry],
    budget: int,
    load_timeout_s: float,
    listener: socket.socket,
    came: Sequence[int],
    store: Store | None,
) -> int:
    signals = Signals(came)
    if is_exposed(config):
        warn(f"--host {config.host}: all that can connect may use every route: give --api-key or --api-key-file")
    needs = Needs(envs.cache_dir() / NEEDS)
    servers = ChildServers()
    registry = Registry(entries, budget, config.limits, load_timeout_s, servers.start, needs=needs)
    front = Front(registry, config, store)
    batches = None if front.batches is None else front.batches.all
    middleware = Middleware(front, config)
    url = url_of(listener.getsockname()[:2])
    http = HttpServer(middleware, listener, config.limits)
    measuring = asyncio.ensure_future(registry.measure_forever())
    try:
        with until_stdin_ends(signals.interrupt) if config.managed else contextlib.nullcontext():
            await http.start()
            gc.collect()
            gc.freeze()
            say(f"ready: {url} (a model is loaded when a request asks for it)")
            if config.managed:
                said = {"url": url, "model": entries[0].name, "key": config.any_key}
                print(json.dumps(said), flush=True)
            await servers.prepare()
            registry.preload()
            if batches is not None:
                batches.start()
            await signals.drain.wait()
            front.draining = True
            if batches is not None:
                await batches.stop()
            await _drain(middleware, config.limits.drain_timeout, signals.stop)
    finally:
        measuring.cancel()
        await asyncio.gather(http.stop(at_once=signals.stop.is_set()), registry.close())
        await servers.close()
    return 0


async def _drain(middleware: Middleware, timeout_s: float, stop: asyncio.Event) -> None:
    """Return when the open requests are answered, after `timeout_s` at the latest."""
    if not middleware.num_open or stop.is_set():
        return
    say(f"draining: {middleware.num_open} open requests have {timeout_s:g} s to end; a second signal ends them at once")
    with under_way(middleware.idle.wait(), stop.wait()) as either:
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    say(f"drained: {middleware.num_open} requests are cut off")
