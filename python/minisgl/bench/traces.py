"""Published production traces: arrival times, lengths, and shared prefixes of requests.

Mooncake: JSON lines of timestamp (ms), input_length, output_length, hash_ids (one id for each block of 512 tokens).
Qwen-Bailian: JSON lines with chat_id, parent_chat_id, type and turn in addition, timestamp in seconds, blocks of 16.
Azure LLM inference: CSV of TIMESTAMP, ContextTokens, GeneratedTokens, without blocks.
The first line of a file decides its format, never its name; an invalid line ends the reading with its number and the
reason. The last block of a prompt may be partial, so there are ceil(tokens / block) ids. The prompts are not published:
tokens are derived from the blocks' ids, so that equal ids give equal tokens.
Invariants: the same file and seed give the same requests; arrivals ascend and begin at 0.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.step import Int32Array

NAMES = {
    "mooncake-conversation": "mooncake_conversation.jsonl",
    "mooncake-synthetic": "mooncake_synthetic.jsonl",
    "azure-conversation": "azure2023_conversation.csv",
    "azure-code": "azure2023_code.csv",
}


MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
QWEN_FIELDS = ("chat_id", "parent_chat_id", "type", "turn")  # in addition
AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BLOCK, QWEN_BLOCK = 512, 16
T = TypeVar("T")
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
KNOWN = (
    f"a Mooncake trace has {', '.join(MOONCAKE_FIELDS)}; a Qwen trace also {', '.join(QWEN_FIELDS)}; "
    f"an Azure trace is CSV with {', '.join(AZURE_FIELDS)}"
)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace. `blocks` are the ids of its prompt's blocks of `block_len` tokens, the last of which may be
    partial; empty: the prompt shares nothing."""

    arrival_s: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()
    block_len: int = BLOCK


class BadLine(ValueError):
    """An invalid line of a trace. The text has its number and the reason."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"line {number}: {reason}")


def parse_trace(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Yield the requests of a trace in the order of its lines. Raises `BadLine`."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    number, first = next(numbered, (1, ""))
    first = first.removeprefix("\ufeff")  # the byte-order mark of spreadsheets
    if first.lstrip().startswith("{"):
        yield from _json_lines(itertools.chain([(number, first)], numbered))
    elif first.strip().startswith("["):
        raise BadLine(number, f"must not be a JSON list: {KNOWN}")
    elif first:
        yield from _azure(number, _cells(number, first), numbered)


# ---------------------------------------------------------------------------------------------------------- JSON lines


class _Mooncake(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # ms
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Count]


class _Qwen(_Mooncake, forbid_unknown_fields=False):
    """A line of a Qwen trace: a Mooncake line with a timestamp in seconds and further fields."""

    chat_id: Any
    parent_chat_id: Any
    type: Any
    turn: Any


def _json_lines(lines: Iterable[tuple[int, str]]) -> Iterator[TraceRequest]:
    kind: type[_Mooncake] | None = None
    for number, line in lines:
        kind = kind or _kind_of(number, _decoded(number, line, dict[str, Any]))
        row = _decoded(number, line, kind)
        block_len, scale, name = (QWEN_BLOCK, 1.0, "Qwen") if kind is _Qwen else (BLOCK, 1e3, "Mooncake")
        needed = -(-row.input_length // block_len)
        if len(row.hash_ids) != needed:
            raise BadLine(
                number,
                f"hash_ids: {len(row.hash_ids)} for an input_length of {row.input_length}: a {name} trace has one for "
                f"each {block_len} tokens, which are {needed}",
            )
        blocks = tuple(row.hash_ids)
        yield _request(row.timestamp / scale, row.input_length, row.output_length, blocks, block_len)


def _decoded(number: int, line: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.ValidationError as error:
        raise BadLine(number, f"{error}: {KNOWN}") from error
    except (ValueError, RecursionError) as error:
        raise BadLine(number, f"not JSON: {error}") from error


def _kind_of(number: int, fields: Mapping[str, Any]) -> type[_Mooncake]:
    """Return the format of a first line, by the fields that both or only Qwen's traces have. Raises `BadLine`."""
    if missing := [name for name in MOONCAKE_FIELDS if name not in fields]:
        raise BadLine(number, f"no {', '.join(missing)}: {KNOWN}")
    others = [name for name in fields if name not in MOONCAKE_FIELDS]
    if missing := [name for name in QWEN_FIELDS if others and name not in others]:
        raise BadLine(number, f"has {', '.join(others)} and no {', '.join(missing)}: {KNOWN}")
    return _Qwen if others else _Mooncake


# ----------------------------------------------------------------------------------------------------------------- CSV


def _azure(number: int, head: list[str], lines: Iterable[tuple[int, str]]) -> Iterator[TraceRequest]:
    names = [name.strip() for name in head]
    if missing := [name for name in AZURE_FIELDS if name not in names]:
        raise BadLine(number, f"no {', '.join(missing)}: {KNOWN}")
    for at, line in lines:
        cells = _cells(at, line)
        if len(cells) != len(names):
            raise BadLine(at, f"{len(cells)} fields: the first line names {len(names)}")
        row = dict(zip(names, (cell.strip() for cell in cells), strict=True))
        try:
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])  # drops the seventh decimal
        except ValueError as error:
            raise BadLine(at, f"TIMESTAMP {row['TIMESTAMP']!r}: must be a date with a time") from error
        given, made = (_whole(at, name, row[name]) for name in AZURE_FIELDS[1:])
        yield _request(when.replace(tzinfo=UTC).timestamp(), given, made, (), BLOCK)


def _cells(number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line]))
    except csv.Error as error:  # a field is too long
        raise BadLine(number, str(error)) from error


def _whole(number: int, name: str, text: str) -> int:
    try:
        return msgspec.convert(text, _Count, strict=False)
    except msgspec.ValidationError as error:
        raise BadLine(number, f"{name} {text!r}: must be a whole number, 0 or more") from error


def _request(
    arrival_s: float, input_len: int, output_len: int, blocks: tuple[int, ...], block_len: int
) -> TraceRequest:
    """Build a request with at least one token in and out; a few in the traces have none."""
    return TraceRequest(arrival_s, max(1, input_len), max(1, output_len), blocks, block_len)


# --------------------------------------------------------------------------------------------------------- reading


def read_trace(name: str) -> list[TraceRequest]:
    """Read a trace of `NAMES` from the folder MINISGL_DATA, or a file, sorted by arrival. Raises `ConfigError`."""
    path = Path(name).expanduser()
    if name in NAMES:
        folder = envs.data_dir()
        if folder is None:
            raise ConfigError(f"trace {name}: {envs.DATA} is not set: name the folder with traces/{NAMES[name]}")
        path = folder / "traces" / NAMES[name]
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            requests = sorted(parse_trace(lines), key=lambda request: request.arrival_s)
    except OSError as error:
        raise ConfigError(f"trace {name}: {error.strerror} (a file, or one of {', '.join(NAMES)})") from error
    except ValueError as error:  # an invalid line, or not UTF-8
        raise ConfigError(f"trace {name}: {error}") from error
    if not requests:
        raise ConfigError(f"trace {name}: no requests")
    first = requests[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - first) for request in requests]


def prompt_tokens(request: TraceRequest, index: int, vocab_size: int, seed: int = 0) -> Int32Array:
    """Return the prompt of a trace's request: [input_len] int32 ids below `vocab_size`, derived from seed, block id and
    position in the block. `index` replaces the block ids of a request without any."""
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
