"""The models that a server of several may load: what is said of each, and what is known before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from minisgl.config import ConfigError, EngineConfig, ServerConfig
from minisgl.weights.hub_cache import RepoCache
from minisgl.weights.sources import is_gguf, place_of

MIB = 2**20
PROCESSES_BYTES = 160 * MIB
"""What the HTTP process and the engine process take, without weights and KV; measured where a model is loaded."""
LEAST_POOL_BYTES = 512 * MIB
MOST_POOL_BYTES = 4 * 2**30
"""A KV pool gets half of what the weights take, within these bounds, unless its entry says `memory`."""
NOTHING_TO_LOAD = ("echo", "sim")
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `config`: of its server, but for its address. `pin`: it is never unloaded for another one. `ttl_s`:
    it is unloaded so long after its last request."""

    name: str
    config: ServerConfig
    aliases: tuple[str, ...] = ()
    memory: int | None = None  # that its server may take; None: reckoned from its files
    pin: bool = False
    preload: bool = False
    ttl_s: float | None = None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names that requests may give beside its own."""
        return tuple(name for name, _ in self.config.engine.lora)

    def size(self) -> int | None:
        """Bytes of its files; None: they are not here yet. Raises `ConfigError` if they cannot be."""
        files = files_of(self.config.engine)
        return None if files is None else sum(one.stat().st_size for one in files)

    def need(self) -> int | None:
        """Bytes that its server will take at most; None: nobody knows before it is loaded. Raises `ConfigError`."""
        if self.memory is not None:
            return self.memory
        if (size := self.size()) is None:
            return None
        pool = min(MOST_POOL_BYTES, max(LEAST_POOL_BYTES, size // 2))
        return PROCESSES_BYTES + (size + pool if size else 0)


def files_of(config: EngineConfig) -> list[Path] | None:
    """Its weights; None: of a hub, and not here. Raises `ConfigError`: there is no such model."""
    if config.engine in NOTHING_TO_LOAD:
        return []
    place = place_of(config.model, config.model_source, config.revision)
    path = place if isinstance(place, Path) else RepoCache(place.source, place.repo).find(place)
    if path is None:
        return None
    if path.is_dir():
        found = [sorted(path.glob(pattern)) for pattern in WEIGHTS]
        return max(found, key=lambda files: sum(one.stat().st_size for one in files))
    parts = path.name.rpartition("-00001-of-")
    return sorted(path.parent.glob(f"{parts[0]}-*-of-{parts[2]}")) if parts[1] else [path]


def models_in(folder: str) -> dict[str, str]:
    """Every GGUF file and every folder of a model in it: paths by names, in their order. Raises `ConfigError`."""
    try:
        inside = sorted(Path(folder).expanduser().iterdir())
    except OSError as error:
        raise ConfigError(f"--models-dir {folder}: {error.strerror or error}") from error
    found = dict[str, str]()
    for path in inside:
        is_later_part = "-of-" in path.name and "-00001-of-" not in path.name
        if (path.is_dir() and (path / "config.json").is_file()) or (is_gguf(path) and not is_later_part):
            name = path.name.removesuffix(".gguf").rpartition("-00001-of-")[0] or path.name.removesuffix(".gguf")
            found[name] = str(path)
    if not found:
        raise ConfigError(f"--models-dir {folder}: no GGUF file and no folder with a config.json in it")
    return found


def check_names(entries: Sequence[Entry]) -> None:
    """Raises `ConfigError`: one name for two models."""
    owners = dict[str, str]()
    for entry in entries:
        for name in (entry.name, *entry.aliases, *entry.adapters):
            if name in owners:
                raise ConfigError(f"{entry.name}: the name {name} is that of {owners[name]} already: give each its own")
            owners[name] = entry.name
