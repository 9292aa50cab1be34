"""Lines of a batch's input: JSONL, each `{"custom_id", "method", "url", "body"}`; checked when the file is uploaded,
and read again when the batch runs, a window at a time, sorted so that common prefixes meet.

Invariants: memory is bounded, whatever the file has; an error names line, field, value and reason; a line that passed
the check is read the same way later.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from minisgl.sampling_params import ParamError
from minisgl.server.core.glance import NOTHING, WRONG, begin_of, decoded, shown, text_of

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_FILE_BYTES = 200 << 20
MAX_LINES = 50_000
MAX_ROWS = 2 * MAX_LINES
"""Maximum lines of a file, empty ones included: 200 MiB of empty lines would take two minutes to read."""
MAX_ID_CHARS = 512
WINDOW_LINES = 1024
WINDOW_BYTES = 16 << 20
PREFIX_BYTES = 1 << 14
"""Length of the prompt prefix by which lines are sorted."""


class BadLine(Exception):
    """Error in a line of the input. `line` counts from 1; `field` is empty if it concerns the whole line."""

    def __init__(self, line: int, field: str, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.field = field


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Request line of a batch. `number`: line in the file, from 1, empty lines included; `body`: a JSON object."""

    number: int
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """Result of checking a file: the endpoint of all its lines, and their number."""

    url: str
    num_lines: int


class _Line(msgspec.Struct):
    custom_id: msgspec.Raw = NOTHING
    method: msgspec.Raw = NOTHING
    url: msgspec.Raw = NOTHING
    body: msgspec.Raw = NOTHING


class _Body(msgspec.Struct):
    stream: msgspec.Raw = NOTHING


class _Prompt(msgspec.Struct):
    """Raw JSON fields of a batch line from which its prompt is built."""

    model: msgspec.Raw = NOTHING
    tools: msgspec.Raw = NOTHING
    instructions: msgspec.Raw = NOTHING
    messages: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING


def check_file(file: BinaryIO, max_line_bytes: int) -> CheckedFile:
    """Check all lines of a batch's input file. Raises `BadLine` for the first bad one."""
    seen: set[str] = set()
    url = ""
    for line in read_lines(file, max_line_bytes):
        if line.custom_id in seen:
            raise _bad(line.number, "custom_id", line.custom_id, "must differ from those of earlier lines")
        seen.add(line.custom_id)
        if line.url != (url := url or line.url):
            raise _bad(line.number, "url", line.url, f"the lines before it say {url}: a batch has one endpoint")
        if len(seen) > MAX_LINES:
            raise BadLine(line.number, "", f"a file has at most {MAX_LINES} requests: send several files")
    if not seen:
        raise BadLine(1, "", "the file has no requests")
    return CheckedFile(url, len(seen))


def read_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[BatchLine]:
    """Yield the lines of a batch's input file in order, without empty ones. Raises `BadLine`."""
    number = 0
    while raw := file.readline(max_line_bytes + 2):
        number += 1
        if number > MAX_ROWS:
            raise BadLine(number, "", f"a file has at most {MAX_ROWS} lines, empty ones too")
        if len(raw.rstrip(b"\r\n")) > max_line_bytes:
            raise BadLine(number, "", f"must have at most {max_line_bytes} bytes (--max-body-bytes)")
        if raw.strip():
            yield _read(raw, number)


def _read(raw: bytes, number: int) -> BatchLine:
    """Parse and check one line of a batch's input file. Raises `BadLine`."""
    try:
        raw.decode()
        fields = decoded(raw, _Line)
    except UnicodeDecodeError as error:
        raise BadLine(number, "", f"is not text in UTF-8: byte {error.start} cannot be read") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        kind = "must be a JSON object" if isinstance(error, msgspec.ValidationError) else f"not valid JSON: {error}"
        raise BadLine(number, "", kind) from error
    custom_id = _value(number, fields, "custom_id")
    if not 0 < len(custom_id) <= MAX_ID_CHARS:
        raise _bad(number, "custom_id", custom_id, f"must have from 1 to {MAX_ID_CHARS} characters")
    if (method := _value(number, fields, "method")) != "POST":
        raise _bad(number, "method", method, "must be POST")
    if (url := _value(number, fields, "url")) not in ENDPOINTS:
        raise _bad(number, "url", url, f"must be one of {', '.join(ENDPOINTS)}")
    if fields.body == NOTHING:
        raise BadLine(number, "body", "body: required")
    try:
        stream = decoded(fields.body, _Body).stream
    except msgspec.ValidationError as error:
        raise _bad(number, "body", shown(fields.body), "must be a JSON object") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadLine(number, "body", f"body: not valid JSON: {error}") from error
    if begin_of(stream, 6) not in (b"null", b"false"):
        raise _bad(number, "body.stream", shown(stream), "batches do not stream: leave it out")
    return BatchLine(number, custom_id, url, bytes(fields.body))


def _value(number: int, fields: _Line, name: str) -> str:
    """Return a required string field of a batch line. Raises `BadLine`."""
    if (raw := getattr(fields, name)) == NOTHING:
        raise BadLine(number, name, f"{name}: required")
    if (text := text_of(raw)) is None:
        raise _bad(number, name, shown(raw), "must be text")
    return text


def _bad(number: int, field: str, value: object, reason: str) -> BadLine:
    return BadLine(number, field, str(ParamError(field, value, reason)))


# ------------------------------------------------------------------------------------------------- when it runs


def windows(file: BinaryIO, max_line_bytes: int, leave_out: Container[int]) -> Iterator[list[BatchLine]]:
    """Yield windows of all lines not numbered in `leave_out`; each window is sorted so that common prefixes meet."""
    window: list[BatchLine] = []
    num_bytes = 0
    for line in read_lines(file, max_line_bytes):
        if line.number in leave_out:
            continue
        window.append(line)
        num_bytes += len(line.body)
        if len(window) == WINDOW_LINES or num_bytes >= WINDOW_BYTES:
            yield sorted(window, key=prefix)
            window, num_bytes = [], 0
    if window:
        yield sorted(window, key=prefix)


def prefix(line: BatchLine) -> bytes:
    """Return a sort key that groups lines by prompt prefix: up to `PREFIX_BYTES` of the prompt's raw fields."""
    try:
        fields = decoded(line.body, _Prompt)
    except WRONG:
        return b""  # its endpoint will report the error
    raw_fields = (begin_of(getattr(fields, name), PREFIX_BYTES) for name in fields.__struct_fields__)
    return b"\n".join(raw_fields)[:PREFIX_BYTES]
