"""Published production traces: when requests came, how long they were, and which of them begin alike.

Formats: Mooncake, Qwen-Bailian, Azure LLM inference (trace_formats.py). The prompts themselves are not published:
tokens are drawn from the blocks' ids, so that equal ids give equal tokens.

Invariants: the same file and seed give the same requests; arrivals ascend and begin at 0.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from minisgl import envs
from minisgl.bench.trace_formats import MOONCAKE_BLOCK as BLOCK
from minisgl.bench.trace_formats import TraceRequest, parse_trace
from minisgl.config import ConfigError
from minisgl.step import Int32Array

__all__ = ["BLOCK", "NAMES", "TraceRequest", "prompt_tokens", "read_trace"]

NAMES = {
    "mooncake-conversation": "mooncake_conversation.jsonl",
    "mooncake-synthetic": "mooncake_synthetic.jsonl",
    "azure-conversation": "azure2023_conversation.csv",
    "azure-code": "azure2023_code.csv",
}


def read_trace(name: str) -> list[TraceRequest]:
    """One of `NAMES`, in the folder that MINISGL_DATA names, or a file of one of the formats. Raises `ConfigError`."""
    path = Path(name).expanduser()
    if name in NAMES:
        folder = envs.data_dir()
        if folder is None:
            raise ConfigError(f"trace {name}: {envs.DATA} is not set: the folder with traces/{NAMES[name]}")
        path = folder / "traces" / NAMES[name]
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            found = sorted(parse_trace(lines), key=lambda one: one.arrival_s)
    except OSError as error:
        raise ConfigError(f"trace {name}: {error.strerror} (a file, or one of {', '.join(NAMES)})") from error
    except ValueError as error:  # a line that does not fit, or no UTF-8
        raise ConfigError(f"trace {name}: {error}") from error
    if not found:
        raise ConfigError(f"trace {name}: no requests")
    first = found[0].arrival_s
    return [
        TraceRequest(one.arrival_s - first, one.input_len, one.output_len, one.blocks, one.block_len) for one in found
    ]


def prompt_tokens(request: TraceRequest, index: int, vocab_size: int, seed: int = 0) -> Int32Array:
    """[input_len] int32 ids below `vocab_size`, drawn from (seed, block id, place in the block); `index` stands for the
    block ids of a request without any."""
    if request.blocks:
        ids = np.repeat(np.array(request.blocks, np.uint64), request.block_len)[: request.input_len]
    else:
        ids = np.full(request.input_len, 2**40 + index, np.uint64)
    state = ids * np.uint64(0x9E3779B97F4A7C15)
    places = np.arange(request.input_len, dtype=np.uint64)
    state ^= places % np.uint64(request.block_len) if request.blocks else places
    state += np.uint64(seed)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(31)
    state *= np.uint64(0x94D049BB133111EB)
    state >>= np.uint64(33)
    return (state % np.uint64(vocab_size)).astype(np.int32)
