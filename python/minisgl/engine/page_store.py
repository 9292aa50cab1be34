"""The page store of an engine, and the identity of its pages: everything that the stored values depend on.

Invariants: two engines use each other's pages only if they compute the same bits from the same tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from minisgl.config import ConfigError, EngineConfig, PrefixFile
from minisgl.extension import _rust
from minisgl.step import Int32Array
from minisgl.utils import prefix_file
from minisgl.utils.installed import own_version
from minisgl.utils.own_folder import check_own, read_own
from minisgl.utils.progress import Report

NUMERICS = 3
"""Version of stored pages: increase it when the CPU engine computes other bits or changes the page layout (tested)."""
DIGEST_BYTES = 32
DEFAULT_BYTES = 20 * 2**30
EXPORT_S = 600.0  # before an export: time limit in seconds for pending writes
_IGNORED_SETTINGS = {  # settings that do not change results
    "weights",  # a path: the digest of the files is used instead
    "panels",
    "tower_weights",
    "image_cache",
    "eos_ids",
    "num_threads",
    "isa",  # the class of instruction sets is used instead
    "num_pages",
    "max_rows",
    "max_seq_len",
    "num_checkpoints",
    "timed",
}


def identity(settings: dict[str, Any], weights: bytes, isa: str) -> bytes:
    """Return the identity of an engine's pages: its `settings`, the digest `weights` of its files, and the class of
    instruction sets with equal results (AMX tiles add up in another order)."""
    parts = {
        "version": own_version(),
        "numerics": NUMERICS,
        "class": "amx" if isa == "amx" else "exact",
        "weights": weights.hex(),
        "settings": {name: value for name, value in settings.items() if name not in _IGNORED_SETTINGS},
    }
    return msgspec.json.encode(parts, order="sorted")


def digest_of(files: Sequence[Path], cache: Path) -> bytes:
    """Return the digest of all `files`, cached in the folder `cache` until a file changes. Raises `OSError`."""
    key = hashlib.sha256()
    for file in files:
        now = file.stat()
        key.update(f"{file.resolve()}\n{now.st_dev} {now.st_ino} {now.st_size}\n".encode())
        key.update(f"{now.st_mtime_ns} {now.st_ctime_ns}\n".encode())
    cached = cache / key.hexdigest()
    with contextlib.suppress(OSError):
        if (digest := read_own(cached, DIGEST_BYTES)) is not None:
            return digest
    digest = _rust.PageStore.digest([str(file) for file in files])
    with contextlib.suppress(OSError):  # a read-only folder: the digest is not cached
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        cache.mkdir(mode=0o700, exist_ok=True)
        part = cache / f"{cached.name}.{os.getpid()}"
        part.touch(mode=0o600)
        part.write_bytes(digest)
        part.replace(cached)
    return digest


def adapter_digest(pairs: Iterable[tuple[int, str, bytes, bytes]]) -> bytes:
    """Return the digest of an adapter: layer, part, and the bytes of A and of the scaled B of each pair."""
    digest = hashlib.sha256()
    for layer, part, a, b in pairs:
        digest.update(f"{layer} {part} {len(a)} {len(b)}\n".encode())
        digest.update(a)
        digest.update(b)
    return digest.digest()


def open_store(
    config: EngineConfig,
    settings: dict[str, Any],
    files: Sequence[Path],
    isa: str,
    page_and_state_bytes: tuple[int, int],
    say: Report,
) -> _rust.PageStore:
    """Open the page store in `config.cache_dir` for weights in `files`; import prefix files. Raises `ConfigError`."""
    assert config.cache_dir is not None
    folder, limit = Path(config.cache_dir).expanduser(), config.cache_size or DEFAULT_BYTES
    for subfolder in (folder, folder / "weights"):
        check_own(subfolder, f"--cache-dir {config.cache_dir}")
    try:
        made_by = identity(settings, digest_of(files, folder / "weights"), isa)
        store = _rust.PageStore(str(folder), limit, made_by, config.page_size, *page_and_state_bytes)
    except OSError as error:
        raise ConfigError(f"--cache-dir {config.cache_dir}: {error}") from error
    for prefix in config.warm_prefixes:
        if isinstance(prefix, PrefixFile):
            prefix_file.take_in(prefix.path, partial(_check_identity, store, prefix.path))
    say(f"pages on disk: {folder}, at most {limit / 2**20:.0f} MiB")
    return store


def _check_identity(store: _rust.PageStore, path: str, head: prefix_file.Head) -> _rust.PageStore:
    """Return `store` if the pages of a prefix file were computed by this model and settings; else `ConfigError`."""
    if names := prefix_file.what_differs(head.identity, store.identity):
        raise ConfigError(f"{path}: its pages were computed by another model or other settings: {', '.join(names)}")
    return store


def export(store: _rust.PageStore, tokens: Int32Array, page_size: int, path: Path) -> None:
    """Write the stored full pages of `tokens` to the file `path`; with recurrent states, also the last stored state of
    the prefix. Raises `ConfigError` if a page or the state is not stored."""
    count = len(tokens) // page_size
    tokens = tokens[: count * page_size]
    store.flush(EXPORT_S)

    def pages() -> Iterator[bytes]:
        for column in range(count):
            if (page := store.page(tokens, column)) is None:
                raise ConfigError(f"{path}: page {column} of {count} is no longer in the folder")
            yield page

    behind, state = _last_state(store, tokens, count - 1) if store.state_bytes else (0, b"")
    if store.state_bytes and not behind:
        raise ConfigError(f"{path}: no state of the prefix is stored in the folder")
    try:
        first = next(pages())
        head = prefix_file.Head(
            identity=store.identity,
            page_size=page_size,
            page_bytes=len(first),
            tokens=tokens.tolist(),
            state_bytes=len(state),
            state_behind=behind,
        )
        prefix_file.write(path, head, chain(pages(), (state,)))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _last_state(store: _rust.PageStore, tokens: Int32Array, most: int) -> tuple[int, bytes]:
    """Return the number of pages, at most `most`, before the last stored state of `tokens`, and that; 0 if none."""
    for count in range(most, 0, -1):
        if (state := store.stage(tokens, count - 1, 1).state) is not None:
            return count, state
    return 0, b""
