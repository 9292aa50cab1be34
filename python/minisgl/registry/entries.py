"""The models that a server of several may load: their settings, and what is known of them before they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from minisgl.config import ConfigError, EngineConfig, ServerConfig
from minisgl.weights.hub_cache import RepoCache
from minisgl.weights.sources import is_gguf, place_of

MIB = 2**20
PROCESSES_BYTES = 160 * MIB
"""Memory of an HTTP and an engine process without weights and KV; a loaded model is measured."""
LEAST_POOL_BYTES = 512 * MIB
MOST_POOL_BYTES = 4 * 2**30
"""Bounds of the KV pool, which is half the size of the weights, unless the entry has `memory`."""
NOTHING_TO_LOAD = ("echo", "sim")
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one model. `config` is its server's, except for the address. With `pin` it is never unloaded for
    another model. `ttl_s` is the time in seconds after its last request until it is unloaded."""

    name: str
    config: ServerConfig
    aliases: tuple[str, ...] = ()
    memory: int | None = None  # bytes for its server; None: computed from its files
    pin: bool = False
    preload: bool = False
    ttl_s: float | None = None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the model's LoRA adapters, which requests may give in place of the model's name."""
        return tuple(name for name, _ in self.config.engine.lora)

    def size(self) -> int | None:
        """Return the bytes of the model's files, or None before the download. Raises `ConfigError` if it is missing."""
        files = files_of(self.config.engine)
        return None if files is None else sum(one.stat().st_size for one in files)

    def need(self) -> int | None:
        """Return the most bytes that the model's server takes; None: unknown before loading. Raises `ConfigError`."""
        if self.memory is not None:
            return self.memory
        if (size := self.size()) is None:
            return None
        pool = min(MOST_POOL_BYTES, max(LEAST_POOL_BYTES, size // 2))
        return PROCESSES_BYTES + (size + pool if size else 0)


def files_of(config: EngineConfig) -> list[Path] | None:
    """Return a model's weight files, or None before the download. Raises `ConfigError` for a missing model."""
    if config.engine in NOTHING_TO_LOAD:
        return []
    source = place_of(config.model, config.model_source, config.revision)
    path = source if isinstance(source, Path) else RepoCache(source.source, source.repo).find(source)
    if path is None:
        return None
    if path.is_dir():
        candidates = [sorted(path.glob(pattern)) for pattern in WEIGHTS]
        return max(candidates, key=lambda files: sum(one.stat().st_size for one in files))
    parts = path.name.rpartition("-00001-of-")
    return sorted(path.parent.glob(f"{parts[0]}-*-of-{parts[2]}")) if parts[1] else [path]


def models_in(folder: str) -> dict[str, str]:
    """Return the paths of all GGUF files and model folders in `folder`, by name and in order. Raises `ConfigError`."""
    try:
        inside = sorted(Path(folder).expanduser().iterdir())
    except OSError as error:
        raise ConfigError(f"--models-dir {folder}: {error.strerror or error}") from error
    paths = dict[str, str]()
    for path in inside:
        is_later_part = "-of-" in path.name and "-00001-of-" not in path.name
        if (path.is_dir() and (path / "config.json").is_file()) or (is_gguf(path) and not is_later_part):
            name = path.name.removesuffix(".gguf").rpartition("-00001-of-")[0] or path.name.removesuffix(".gguf")
            paths[name] = str(path)
    if not paths:
        raise ConfigError(f"--models-dir {folder}: no GGUF file and no folder with a config.json in it")
    return paths


def check_names(entries: Sequence[Entry]) -> None:
    """Raise `ConfigError` if two models share a name."""
    owners = dict[str, str]()
    for entry in entries:
        for name in (entry.name, *entry.aliases, *entry.adapters):
            if name in owners:
                raise ConfigError(f"{entry.name}: the name {name} is that of {owners[name]} already: give each its own")
            owners[name] = entry.name
