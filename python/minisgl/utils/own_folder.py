"""What a folder that a flag names must be, before its files are trusted: whoever writes them decides what is computed.

A file of such a folder is read by `read_own`, which follows no link, waits for no pipe, and takes no more than it
needs.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from minisgl.config import ConfigError


def check_own(path: Path, said: str) -> None:
    """Check that nobody but the user who runs this writes in a folder, where it is there. `said`: the setting that
    names it. Raises `ConfigError`."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{said}: {error.strerror}") from error
    own = os.geteuid()
    if found.st_uid != own:
        who = f"belongs to user {found.st_uid}, and this runs as user {own}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = f"can be written by others (mode {stat.S_IMODE(found.st_mode):03o}: chmod go-w)"
    else:
        return
    raise ConfigError(
        f"{said}: the folder {who}, and who writes it decides answers: name a folder in it, which is made"
    )


def read_own(path: Path, num_bytes: int) -> bytes | None:
    """Return the bytes of a file of the user's own with just so many; None for any other. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != num_bytes:
            return None
        return os.read(descriptor, num_bytes)
    finally:
        os.close(descriptor)
