"""The start of a server: its port, its engine process, then the HTTP side (`serving`), which is imported while the
engine process loads.

Invariants: the port is taken before anything is loaded; a signal that arrives before the event loop runs is not lost
and ends the server as usual; whatever happens, no process and no file is left behind.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.config import ConfigError, EngineConfig, ServerConfig
from minisgl.envs import not_a_folder
from minisgl.extension import HOW_TO_BUILD, NAME, WITHOUT, debug_build, why_missing
from minisgl.runner.launch import EngineProcess
from minisgl.server.core.log import say, set_up, warn
from minisgl.server.gateway import FrontEnd
from minisgl.utils.installed import need_extension
from minisgl.utils.memory import limit_malloc, no_collections

if TYPE_CHECKING:
    from minisgl.runner.several import EngineProcesses


MAX_DESCRIPTORS = 65_536


@contextlib.contextmanager
def early_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, in order, until the event loop handles them."""
    came = list[int]()
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_server(config: ServerConfig, *warnings: str) -> int:
    """Serve until a signal or the end of the engine, and return the exit code. `warnings` are logged."""
    began = time.monotonic()
    if config.dp != 1:
        config = _with_number(config)
    set_up(config.log_format, access=config.access_log, level=config.engine.log_level, times=not config.managed)
    check_extension(config)
    for line in warnings:
        warn(f"minisgl: {line}")
    check_files(config.engine)
    if config.receipt_key is not None:
        from minisgl import receipt

        receipt.read_key(config.receipt_key)
    if config.state_dir is not None:
        from minisgl.server.batches.store import Store

        Store.open(config.state_dir).close()  # raises errors before anything is loaded
    listener = listen(config)
    raise_descriptors()
    limit_malloc()
    with early_signals() as came, listener, _engines(config) as process:
        process.start()
        with FrontEnd.open(config.frontend, listener, process.folder, process.socket) as front_end:
            return _serving()(config, front_end, process, came, began)


def check_extension(config: ServerConfig) -> None:
    """Warn if the extension is missing or a debug build. Raises `ConfigError` if the front end needs it."""
    if build := debug_build():
        warn(f"the extension {NAME} is a {build} build, many times slower: {HOW_TO_BUILD}")
    if why := why_missing():
        if config.frontend == "rust":
            need_extension("--frontend rust: the gateway")
        warn(f"the extension {NAME} is missing: {why}: {WITHOUT}")


def check_files(config: EngineConfig) -> None:
    """Check the files and folders that flags name, but the model's, before anything loads. Raises `ConfigError`."""
    if (template := config.chat_template) is not None:
        from minisgl.tokenizer import read_chat_template

        read_chat_template(template)
    for name, folder in config.lora:
        if not Path(folder, "adapter_config.json").is_file():
            what = "it has no adapter_config.json" if Path(folder).is_dir() else "no such folder"
            raise ConfigError(f"--lora {name}={folder}: {what}: an adapter is a folder as peft saves it")
    for flag, file in {
        "--record-trace": config.debug.record_trace,
        "--shadow-report": config.debug.shadow_report,
    }.items():
        if file is not None and (why := _not_a_file(Path(file).expanduser())):
            raise ConfigError(f"{flag} {file}: {why}")
    if config.cache_dir is not None and (why := not_a_folder(Path(config.cache_dir).expanduser())):
        raise ConfigError(f"--cache-dir {config.cache_dir}: {why}")


def _not_a_file(path: Path) -> str:
    """Return why `path` cannot be written as a file, or "" if it can."""
    if not path.absolute().parent.is_dir():
        return "its folder does not exist"
    if path.is_dir():
        return "is a folder: name a file"
    return "" if os.access(path if path.exists() else path.absolute().parent, os.W_OK) else "cannot be written"


def raise_descriptors() -> None:
    """Raise this process's limit of open files, since a connection takes up to three and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _with_number(config: ServerConfig) -> ServerConfig:
    from minisgl.runner.several import with_number

    return with_number(config)


def _engines(config: ServerConfig) -> EngineProcess | EngineProcesses:
    if not config.needs_pool:
        return EngineProcess.create(config.engine, config.limits.step_timeout)
    from minisgl.runner.several import EngineProcesses  # slow to import, and seldom needed

    engines = EngineProcesses.create(config)
    if engines.line:
        say(f"dp: {engines.line}")
    return engines


def _serving() -> Callable[[ServerConfig, FrontEnd, EngineProcess | EngineProcesses, list[int], float], int]:
    """Import and return `serving.serve`. The import takes as long as an engine needs to load a small model."""
    with no_collections():
        from minisgl.supervisor import serving
    return serving.serve


def listen(config: ServerConfig) -> socket.socket:
    """Open the listening socket at the server's address. Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host {config.host} --port {config.port}: {error.strerror}: choose another") from error
    listener.setblocking(False)
    return listener
