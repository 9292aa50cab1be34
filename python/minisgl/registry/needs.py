"""The measured memory of models, stored in a file of the cache folder from one server to the next.

Invariants: a figure holds only for the same files, settings and version; an unreadable file is ignored, with a warning;
the file is replaced as a whole, so that two writers lose one figure at most.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path

import msgspec

from minisgl.config import ConfigError
from minisgl.registry.entries import Entry, files_of
from minisgl.server.core.log import warn
from minisgl.utils.installed import own_version

FORMAT = 1
MOST = 256  # entries; the oldest are dropped
NOTHING = 1 << 20  # bytes; smaller increases are not written


class _Need(msgspec.Struct, frozen=True):
    num_bytes: int
    model: str  # for readers of the file
    seen: int  # Unix time in seconds


class _File(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    needs: dict[str, _Need] = {}


class Needs:
    """The file of measured memory at `path`; None: nothing is stored."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._writes = threading.Lock()
        self._complaint = ""

    def of(self, entry: Entry) -> int:
        """Return the most bytes that the model's server was measured to take, or 0 if it never was."""
        if self._path is None or (key := _key(entry)) is None:
            return 0
        need = self._read().get(key)
        return 0 if need is None else need.num_bytes

    def keep(self, entry: Entry, num_bytes: int) -> None:
        """Store `num_bytes` if it exceeds the stored figure. 0 means that nothing was measured."""
        if self._path is None or not num_bytes or (key := _key(entry)) is None:
            return
        with self._writes:
            needs = self._read()
            if key not in needs or num_bytes >= needs[key].num_bytes + NOTHING:
                self._write(self._path, needs, key, entry, num_bytes)

    def _write(self, path: Path, needs: dict[str, _Need], key: str, entry: Entry, num_bytes: int) -> None:
        needs[key] = _Need(num_bytes, entry.config.engine.shown_model, int(time.time()))
        latest = sorted(needs.items(), key=lambda one: one[1].seen)[-MOST:]
        text = msgspec.json.format(msgspec.json.encode(_File(format=FORMAT, needs=dict(latest))))
        part = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(text)
            part.replace(path)
        except OSError as error:
            warn(f"{path}: what {entry.name} needs is not remembered: {error.strerror or error}")
            with contextlib.suppress(OSError):
                part.unlink()

    def _read(self) -> dict[str, _Need]:
        assert self._path is not None
        try:
            file = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            return self._ignored(str(error))
        if file.format != FORMAT:
            return self._ignored(f"its format is {file.format}")
        return file.needs

    def _ignored(self, reason: str) -> dict[str, _Need]:
        """Log once that the file is ignored, and return no figures."""
        if reason != self._complaint:
            self._complaint = reason
            warn(f"{self._path}: what models needed is not known any more: {reason}")
        return {}


def _key(entry: Entry) -> str | None:
    """Return a digest of everything that the model's memory depends on, or None if its files are not here."""
    config = entry.config
    key = hashlib.sha256(own_version().encode())
    key.update(msgspec.json.encode((config.engine, config.dp, config.frontend, entry.memory), order="deterministic"))
    try:
        if (files := files_of(config.engine)) is None:
            return None
        for file in files:
            now = file.stat()
            key.update(f"{file.resolve()}\n{now.st_size} {now.st_mtime_ns}\n".encode())
    except (ConfigError, OSError):
        return None
    return key.hexdigest()[:32]
