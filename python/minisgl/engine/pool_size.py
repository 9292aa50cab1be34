"""How many pages a KV pool in a CPU's memory gets: as many as asked for, if they fit; else a share of what is free, but
no more than all rows at full context could use."""

from __future__ import annotations

import psutil

from minisgl.config import ConfigError, EngineConfig

MEMORY_RATIO = 0.5  # without --memory-ratio
MAX_POOL_BYTES = 4 * 2**30  # without --num-pages: a laptop needs its memory for other things, too


def cpu_num_pages(config: EngineConfig, one: int, context_len: int, *, ranks: int = 1, taken: int = 0) -> int:
    """`one` page takes so many bytes on a rank; `ranks` share the memory; `taken` bytes of what is free will go to the
    weights. Raises `ConfigError`."""
    free = max(0, psutil.virtual_memory().available - taken) // ranks
    if config.num_pages is not None:
        if config.num_pages * one > free:  # the system would grant it, and kill the process later
            raise ConfigError(
                f"--num-pages {config.num_pages}: the KV pool would take {config.num_pages * one // 2**20} MiB of "
                f"{free // 2**20} MiB that are free: at most {free // one} pages fit"
            )
        return config.num_pages
    ratio = MEMORY_RATIO if config.memory_ratio is None else config.memory_ratio
    share = int(free * ratio)
    useful = config.rows_on("cpu") * -(-context_len // config.page_size)
    num_pages = min(min(share, MAX_POOL_BYTES // ranks) // one, useful)
    if num_pages < 1:
        raise ConfigError(
            f"--memory-ratio {ratio}: {share // 2**20} MiB do not hold one page of {one // 1024} KiB: "
            "raise it, or set --num-pages"
        )
    return int(num_pages)
