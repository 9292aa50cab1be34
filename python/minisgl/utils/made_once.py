"""Cache folders that are made once: imported models, converted tokenizers.

Invariants: a folder is complete or missing, and is made by one process; other processes wait for it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from minisgl import envs
from minisgl.config import ConfigError


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return `folder`, after filling it with `make` if missing; blocks while another process makes it. Its name must
    identify all that its content depends on. Raises `ConfigError` if its parent cannot be written."""
    if folder.is_dir():
        return folder
    base = folder.parent
    with _lock_file(folder) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits here, then finds the folder
        if folder.is_dir():
            return folder
        for left in base.glob(f"{folder.name}.*.partial"):  # from a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=base))
        try:
            make(partial)
            os.replace(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder


def _lock_file(folder: Path) -> TextIO:
    base = folder.parent
    try:
        base.mkdir(parents=True, exist_ok=True)
        return (base / f"{folder.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(f"{envs.CACHE}: {base}: {error.strerror}: name a writable folder") from error
