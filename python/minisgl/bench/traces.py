"""Published production traces: when requests came, how long they were, and which of them begin alike.

Formats: Mooncake (JSON lines: timestamp in ms, input_length, output_length, hash_ids: an id for each prefix block of
512 tokens) and Azure LLM inference 2023 (CSV: TIMESTAMP, ContextTokens, GeneratedTokens). The prompts themselves are
not published: tokens are drawn from the blocks' ids, so that equal ids give equal tokens.

Keeps true: the same file and seed give the same requests; arrivals ascend and begin at 0.
Doesn't know: what is done with them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.step import Int32Array

BLOCK = 512
NAMES = {
    "mooncake-conversation": "mooncake_conversation.jsonl",
    "mooncake-synthetic": "mooncake_synthetic.jsonl",
    "azure-conversation": "azure2023_conversation.csv",
    "azure-code": "azure2023_code.csv",
}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`blocks`: ids of its prompt's blocks of `BLOCK` tokens, the last maybe in part; none: a prompt like no other."""

    arrival_s: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


def read_trace(name: str) -> list[TraceRequest]:
    """One of `NAMES`, in the folder that MINISGL_DATA names, or a file of one of the formats. Raises `ConfigError`."""
    path = Path(name).expanduser()
    if name in NAMES:
        folder = envs.data_dir()
        if folder is None:
            raise ConfigError(f"trace {name}: {envs.DATA} is not set: the folder with traces/{NAMES[name]}")
        path = folder / "traces" / NAMES[name]
    read = {".jsonl": _mooncake, ".csv": _azure}.get(path.suffix)
    if read is None:
        raise ConfigError(f"trace {name}: neither a .jsonl or .csv file nor one of {', '.join(NAMES)}")
    try:
        found = sorted(read(path), key=lambda one: one.arrival_s)
    except OSError as error:
        raise ConfigError(f"trace {name}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"trace {name}: {type(error).__name__}: {error}") from error
    if not found:
        raise ConfigError(f"trace {name}: no requests")
    first = found[0].arrival_s
    return [TraceRequest(one.arrival_s - first, one.input_len, one.output_len, one.blocks) for one in found]


def _mooncake(path: Path) -> Iterator[TraceRequest]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            one = json.loads(line)
            blocks = tuple(map(int, one["hash_ids"]))
            if len(blocks) * BLOCK < one["input_length"]:
                raise ValueError(f"{len(blocks)} blocks are too few for {one['input_length']} tokens")
            yield _request(one["timestamp"] / 1e3, one["input_length"], one["output_length"], blocks)


def _azure(path: Path) -> Iterator[TraceRequest]:
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            when = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()  # seven digits after the point
            yield _request(when, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ())


def _request(arrival_s: float, input_len: int, output_len: int, blocks: tuple[int, ...]) -> TraceRequest:
    """Traces have a few requests without a token in or out: they get one."""
    return TraceRequest(arrival_s, max(1, input_len), max(1, output_len), blocks if input_len else ())


def prompt_tokens(request: TraceRequest, index: int, vocab_size: int, seed: int = 0) -> Int32Array:
    """[input_len] int32 ids below `vocab_size`, drawn from (seed, block id, place in the block); `index` stands for the
    block ids of a request without any."""
    if request.blocks:
        ids = np.repeat(np.array(request.blocks, np.uint64), BLOCK)[: request.input_len]
    else:
        ids = np.full(request.input_len, 2**40 + index, np.uint64)
    state = ids * np.uint64(0x9E3779B97F4A7C15)
    places = np.arange(request.input_len, dtype=np.uint64)
    state ^= places % np.uint64(BLOCK) if request.blocks else places
    state += np.uint64(seed)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(31)
    state *= np.uint64(0x94D049BB133111EB)
    state >>= np.uint64(33)
    return (state % np.uint64(vocab_size)).astype(np.int32)
