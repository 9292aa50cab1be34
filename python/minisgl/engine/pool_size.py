"""The memory check of a model and the size of a KV pool in a CPU's memory: --num-pages if it fits; else a share of the
free memory, at most what all rows at full context could use, at least what --max-seq-len needs. Also the number of
state checkpoints of a model with recurrent states."""

from __future__ import annotations

from dataclasses import replace

import psutil

from minisgl.config import ConfigError, EngineConfig
from minisgl.utils.memory import Free, free_memory

MEMORY_RATIO = 0.5  # default of --memory-ratio
STATE_SHARE = 1 / 8  # share of the KV pool's size that checkpoints get in addition
MIN_CHECKPOINTS = 8
MAX_POOL_BYTES = 4 * 2**30  # default limit: a laptop needs its memory for other programs, too


def free_for(config: EngineConfig) -> Free:
    """Return the free memory, limited by the unused part of --memory."""
    free = free_memory()
    if config.memory is None:
        return free
    left = max(0, config.memory - psutil.Process().memory_info().rss)
    return min(free, Free(left, f"of --memory {_mib(config.memory)}"), key=lambda memory: memory.num_bytes)


def check_weights(config: EngineConfig, num_bytes: int, free: Free, tower: int = 0) -> Free:
    """Return the memory left of `free` after `num_bytes` of weights and `tower` bytes for images. Raises `ConfigError`
    if they do not fit."""
    if num_bytes <= free.num_bytes < num_bytes + tower:
        raise ConfigError(
            f"--max-image-tokens {config.max_image_tokens}: the vision tower, such an image and kept features take "
            f"{_mib(tower)} of {_mib(free.num_bytes)} that are free {free.whose}, beside {_mib(num_bytes)} of weights: "
            "lower it, or free memory; --mmproj none does without images"
        )
    if num_bytes > free.num_bytes:
        raise ConfigError(
            f"--model {config.model}: its weights take {_mib(num_bytes)} of {_mib(free.num_bytes)} that are free "
            f"{free.whose}: choose a smaller model or fewer bits (a Q4_K_M file, --quantization q4), or free memory"
        )
    return replace(free, num_bytes=free.num_bytes - num_bytes - tower)


def cpu_num_pages(
    config: EngineConfig,
    one: int,
    context_len: int,
    *,
    ranks: int = 1,
    taken: int = 0,
    tower: int = 0,
    one_in_q8: int | None = None,
    state: int = 0,
) -> int:
    """Return the number of KV pages. A page takes `one` bytes on each of `ranks`, `one_in_q8` bytes with --kv-dtype q8;
    the weights take `taken` bytes, images `tower` bytes (the vision tower's weights included), the state of each row
    `state` bytes. Raises `ConfigError` if the pages do not fit.
    """
    one = max(one, 1)  # layers without keys and values have pages of 0 bytes, which still count tokens
    left = _check_states(config, state, check_weights(config, taken, free_for(config), tower))
    free = left.num_bytes // ranks
    required_pages = 0 if config.max_seq_len is None else -(-context_len // config.page_size)
    if config.num_pages is not None:
        if config.num_pages * one > free:  # the system would allocate it, and kill the process later
            raise ConfigError(
                f"--num-pages {config.num_pages}: the KV pool would take {_mib(config.num_pages * one)} of "
                f"{_mib(free)} that are free {left.whose}: at most {free // one} pages fit"
            )
        return config.num_pages
    if required_pages * one > free:
        raise ConfigError(
            _too_long(config, context_len, required_pages * one, free // one, left, taken + tower, one_in_q8)
        )
    whole = config.memory is not None  # --memory is for the KV pool and checkpoints only
    usual = (1 / (1 + STATE_SHARE) if state else 1.0) if whole else MEMORY_RATIO
    ratio = usual if config.memory_ratio is None else config.memory_ratio
    share = int(free * ratio)
    useful = config.rows_on("cpu") * -(-context_len // config.page_size)
    most = share if whole else min(share, MAX_POOL_BYTES // ranks)
    num_pages = max(required_pages, min(most // one, useful))
    if num_pages < 1:
        raise ConfigError(
            f"--memory-ratio {ratio}: {_mib(share)} do not hold one page of {one // 1024} KiB: "
            "raise it, or set --num-pages"
        )
    return num_pages


def _check_states(config: EngineConfig, state: int, free: Free) -> Free:
    """Return the memory left of `free` after all rows' states of `state` bytes. Raises `ConfigError` if too small."""
    rows = config.rows_on("cpu")
    if state * (rows + 1) > free.num_bytes:
        raise ConfigError(
            f"--max-running-requests {rows}: their states take {_mib(state * (rows + 1))} of "
            f"{_mib(free.num_bytes)} that are free {free.whose}: at most {max(0, free.num_bytes // state - 1)} fit"
        )
    return replace(free, num_bytes=free.num_bytes - state * (rows + 1))


def cpu_num_checkpoints(config: EngineConfig, state: int, pool: int, taken: int) -> int:
    """Return how many state checkpoints of `state` bytes fit next to a KV pool of `pool` bytes and `taken` bytes of
    weights: --state-memory, else `STATE_SHARE` of the pool, at least `MIN_CHECKPOINTS`. Raises `ConfigError`."""
    left = _check_states(config, state, check_weights(config, taken, free_for(config)))
    fit = max(0, left.num_bytes - pool) // state
    if config.state_memory is None:
        return min(max(int(pool * STATE_SHARE) // state, MIN_CHECKPOINTS), fit)
    if (requested := config.state_memory // state) > fit:
        raise ConfigError(
            f"--state-memory {config.state_memory}: of {_mib(left.num_bytes)} that are free {left.whose} the KV pool "
            f"leaves {_mib(fit * state)}: lower it, or --num-pages"
        )
    return requested


def _too_long(
    config: EngineConfig, context_len: int, needed: int, fit: int, left: Free, taken: int, one_in_q8: int | None
) -> str:
    size = config.page_size
    does = [f"--max-seq-len {fit * size} fits"] if fit else []
    in_q8 = 0 if one_in_q8 is None else left.num_bytes // one_in_q8 * size
    if in_q8 >= context_len:
        does.append("so does this one with --kv-dtype q8")
    elif in_q8 > fit * size:
        does.append(f"--max-seq-len {in_q8} with --kv-dtype q8")
    beside = f" beside {_mib(taken)} of weights" if taken else ""
    return (
        f"--max-seq-len {context_len}: the KV of so many tokens takes {_mib(needed)} of {_mib(left.num_bytes)} that "
        f"are free {left.whose}{beside}: {', '.join(does) or 'free memory, or choose a smaller model'}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
