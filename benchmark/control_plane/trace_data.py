"""Production traces as requests: time of arrival, prompt tokens, length of the answer.

The prompts of the traces are not published. Mooncake gives an id per block of 512 tokens, equal for equal prefixes: the
tokens of a block are drawn from a generator seeded with its id. Azure gives lengths only: no prompt shares its first
token with another's.

Keeps true: the same trace gives the same tokens everywhere; prompts are made one at a time, when they are asked for.
Doesn't know: control planes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from minisgl import envs
from minisgl.step import Int32Array

BLOCK = 512
VOCABULARY = 100_000
FILES = {
    "mooncake_conversation": "mooncake_conversation.jsonl",
    "mooncake_synthetic": "mooncake_synthetic.jsonl",
    "azure_conversation": "azure2023_conversation.csv",
    "azure_code": "azure2023_code.csv",
}


@dataclass(frozen=True, slots=True)
class Request:
    """`arrival_ms` since the beginning of the trace; lengths in tokens; `blocks` are empty without prefix ids."""

    arrival_ms: int
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


def read_requests(name: str, count: int | None = None) -> list[Request]:
    """The first `count` requests of a trace. Exits with a line where the data is missing."""
    folder = envs.data_dir()
    path = None if folder is None else folder / "traces" / FILES[name]
    if path is None or not path.is_file():
        raise SystemExit(f"MINISGL_DATA: must name the folder with traces/{FILES[name]}")
    requests = _azure(path) if path.suffix == ".csv" else _mooncake(path)
    return requests[:count]


def _mooncake(path: Path) -> list[Request]:
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [
        Request(int(one["timestamp"]), one["input_length"], max(1, one["output_length"]), tuple(one["hash_ids"]))
        for one in lines
    ]


def _azure(path: Path) -> list[Request]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        Request(
            int((time - times[0]).total_seconds() * 1000),
            max(1, int(row["ContextTokens"])),
            max(1, int(row["GeneratedTokens"])),
        )
        for time, row in zip(times, rows, strict=True)
    ]


def prompt_maker() -> Callable[[int, Request], Int32Array]:
    """A function from a request's place in the trace and the request to its tokens, [input_len] int32."""
    known: dict[int, Int32Array] = {}

    def block(block_id: int) -> Int32Array:
        if (found := known.get(block_id)) is None:
            found = np.random.default_rng(block_id).integers(0, VOCABULARY, BLOCK, dtype=np.int32)
            known[block_id] = found
        return found

    def make(place: int, request: Request) -> Int32Array:
        if request.blocks:
            whole = np.concatenate([block(one) for one in request.blocks])
            return np.ascontiguousarray(whole[: request.input_len])
        tokens = np.random.default_rng(place).integers(0, VOCABULARY, request.input_len, dtype=np.int32)
        tokens[0] = VOCABULARY + place
        return tokens

    return make


def due(requests: list[Request], step_ms: int) -> Iterator[list[tuple[int, Request]]]:
    """By step, the requests that have come, with their places; ends after the last one."""
    at = step = 0
    while at < len(requests):
        found = []
        while at < len(requests) and requests[at].arrival_ms <= step * step_ms:
            found.append((at, requests[at]))
            at += 1
        yield found
        step += 1
