"""Checks of a user's own folder, before its files are trusted: a process that can write them decides what is computed.

A file of such a folder is read by `read_own`, which follows no link, waits for no pipe, and reads no more than needed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from minisgl.config import ConfigError


def check_own(path: Path, said: str) -> None:
    """Check that a folder, if it exists, can only be written by the user who runs this process. `said` is the setting
    that names it. Raises `ConfigError`."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{said}: {error.strerror}") from error
    own = os.geteuid()
    if state.st_uid != own:
        who = f"belongs to user {state.st_uid}, and this runs as user {own}"
    elif state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = f"can be written by others (mode {stat.S_IMODE(state.st_mode):03o}: chmod go-w)"
    else:
        return
    raise ConfigError(f"{said}: the folder {who}, so that others could change answers: name a new folder in it")


def read_own(path: Path, num_bytes: int) -> bytes | None:
    """Return a regular file of this user's with exactly `num_bytes` bytes; None for others. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_size != num_bytes:
            return None
        return os.read(descriptor, num_bytes)
    finally:
        os.close(descriptor)
