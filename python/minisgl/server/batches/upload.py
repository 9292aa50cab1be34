"""Writes an upload of `multipart/form-data` to the disk while it arrives.

Invariants: at most `WRITE_BYTES` and a piece are in memory; a failed upload leaves no file behind; bytes count against
limits as they arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

from starlette.requests import ClientDisconnect, Request

from minisgl.server.batches.lines import MAX_FILE_BYTES
from minisgl.server.batches.multipart import MultipartParser, PartHeader, boundary_of
from minisgl.server.batches.store import written
from minisgl.server.core.errors import ApiError, missing
from minisgl.server.core.request import too_large, too_slow

FILE = "file"
MAX_FIELD_BYTES = 4096
WRITE_BYTES = 1 << 20
LEAST_BYTES = 1 << 20
"""Minimum bytes per `timeout_s` of an upload while others wait for a place."""


class Upload:
    """Receiver of an upload. `count` is called with each piece's size and raises if it is too much. `timeout_s`: for
    the next bytes, and while `is_crowded()` (others wait for a place) for each `LEAST_BYTES`."""

    def __init__(
        self, path: Path, count: Callable[[int], None], timeout_s: float, is_crowded: Callable[[], bool]
    ) -> None:
        self.filename: str | None = None
        self.num_bytes = 0
        self.fields: dict[str, str] = {}
        self._path = path
        self._count = count
        self._timeout_s = timeout_s
        self._is_crowded = is_crowded
        self._part: PartHeader | None = None
        self._unwritten = bytearray()
        self._field = bytearray()

    async def receive(self, request: Request) -> None:
        """Receive the upload; on return the file is complete and synced. Raises `ApiError`, `OSError`."""
        try:
            boundary = boundary_of(request.headers.get("content-type", ""))
        except ValueError as error:
            raise _bad_form(str(error)) from error
        if boundary is None:
            raise ApiError(415, "Content-Type: must be multipart/form-data", code="unsupported_media_type")
        parts = MultipartParser(boundary)
        with self._path.open("xb") as file:
            async for piece in _pieces(request, self._timeout_s, self._is_crowded):
                try:
                    for item in parts.push(piece):
                        self._take(item)
                except ValueError as error:
                    raise _bad_form(str(error)) from error
                if len(self._unwritten) >= WRITE_BYTES:
                    await self._write(file)
            if not parts.is_done:
                raise _bad_form("it ends before its last boundary")
            self._end_part()
            await self._write(file)
            await asyncio.to_thread(written, file)
        if self.filename is None:
            raise missing(FILE)

    async def _write(self, file: BinaryIO) -> None:
        data, self._unwritten = self._unwritten, bytearray()
        await asyncio.to_thread(file.write, data)

    def _take(self, item: PartHeader | bytes) -> None:
        """Store a parsed part's header or content in the upload. Raises `ApiError`."""
        if isinstance(item, PartHeader):
            self._end_part()
            if item.name == FILE and self.filename is not None:
                raise _bad_form("it has two files: send one")
            if item.name == FILE:
                self.filename = item.filename or ""
            self._part = item
        elif self._part is not None and self._part.name == FILE:
            self.num_bytes += len(item)
            self._count(len(item))
            if self.num_bytes > MAX_FILE_BYTES:
                raise too_large(self.num_bytes, MAX_FILE_BYTES)
            self._unwritten += item
        else:
            self._field += item
            if len(self._field) > MAX_FIELD_BYTES:
                raise _bad_form(f"a field has more than {MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._part is not None and self._part.name != FILE:
            self.fields[self._part.name] = self._field.decode(errors="replace")
        self._field.clear()


async def _pieces(request: Request, timeout_s: float, is_crowded: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raises `ApiError` 408 after `timeout_s` without bytes, or too few if crowded."""
    stream = request.stream()
    clock = asyncio.get_running_loop().time
    num_bytes, since, before = 0, clock(), 0  # start of the current speed measurement
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                piece = await anext(stream, None)
        except TimeoutError as error:
            raise too_slow(f"no data arrived for {timeout_s:g} s after {num_bytes} bytes") from error
        except ClientDisconnect as error:
            raise _bad_form("the client disconnected") from error
        if piece is None:
            return
        num_bytes += len(piece)
        if num_bytes - before >= LEAST_BYTES:
            since, before = clock(), num_bytes
        elif clock() - since > timeout_s and is_crowded():
            raise too_slow(f"only {num_bytes - before} bytes arrived in {timeout_s:g} s, while other uploads wait")
        yield piece


def _bad_form(reason: str) -> ApiError:
    return ApiError(400, f"body: not a valid form: {reason}", code="invalid_form")
