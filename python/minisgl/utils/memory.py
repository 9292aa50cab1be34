"""Free memory, and the return of freed memory to the system.

Free memory is the machine's, or what the control groups of this process (version 1 or 2) leave of their limits; a
container's limit is one.
glibc's allocator retains freed memory, mostly in the arenas of threads other than the first, and raises by itself the
size from which a block is mapped, and so returned, on its own. With another allocator these functions do nothing. The
extension has its own allocator, mimalloc, which gets the same settings by the environment (`envs.set_purge_delay`).
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import psutil

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
MAPPED_BYTES = 1 << 20  # larger blocks get their own mapping
MAX_ARENAS = 2


@cache
def _libc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None


def limit_malloc() -> None:
    """Set limits that make glibc return freed memory. Call it once, before threads are started."""
    if (libc := _libc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        libc.mallopt(_M_ARENA_MAX, MAX_ARENAS)


def give_back() -> None:
    """Return glibc's free memory to the system. Other threads keep running."""
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)


@contextmanager
def no_collections() -> Iterator[None]:
    """Pause garbage collections, for a start: imports and loading make many objects and no garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


ROOT = Path("/")
_NO_LIMIT = 1 << 60  # version 1 has a huge number


@dataclass(frozen=True, slots=True)
class Free:
    """An amount of free memory. `whose` names what sets the limit, for errors ("of this machine")."""

    num_bytes: int
    whose: str


def free_memory() -> Free:
    """Return the memory that this process may still allocate. The system's file cache counts as free."""
    machine = Free(psutil.virtual_memory().available, "of this machine")
    return min([machine, *_groups()], key=lambda free: free.num_bytes)


def _groups() -> Iterator[Free]:
    """Yield the free memory of each control group with a limit: this process's group and its parents."""
    lines = []
    with suppress(OSError):
        lines = (ROOT / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    for line in lines:
        _, names, path = line.split(":", 2)
        if "memory" in names.split(","):
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
            base = ROOT / "sys/fs/cgroup/memory"
        elif not names:
            files, base = ("memory.max", "memory.current", ""), ROOT / "sys/fs/cgroup"
        else:
            continue
        here = PurePosixPath(path)
        # a container sees its own group at the root, whatever its path is called
        for folder in {base / one.relative_to("/") for one in (here, *here.parents)} | {base}:
            with suppress(OSError, ValueError):  # no such file, or "max"
                limit, used = (int((folder / name).read_text()) for name in files[:2])
                stat = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
                cached = sum(int(stat.get(f"{files[2]}{kind}_file", 0)) for kind in ("active", "inactive"))
                if limit < _NO_LIMIT:
                    yield Free(max(0, limit - used + cached), f"of this control group's {limit / 2**20:.0f} MiB")
