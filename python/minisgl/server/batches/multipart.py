"""Incremental parser of `multipart/form-data` bodies (RFC 7578).

Invariants: parts do not depend on how the body was chunked; memory is bounded, whatever is sent; an invalid body is a
`ValueError` with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message

MAX_HEADERS = 8192
MAX_PARTS = 64
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")  # RFC 2046


@dataclass(frozen=True, slots=True)
class PartHeader:
    """Beginning of a part of a multipart body. `filename` is `None` for a plain field."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes | None:
    """Return a Content-Type's boundary; `None` unless it is multipart/form-data. Raises `ValueError` if it is bad."""
    head = Message()
    head["content-type"] = content_type
    if head.get_content_type() != "multipart/form-data":
        return None
    boundary = head.get_param("boundary")
    if not isinstance(boundary, str) or not _BOUNDARY.fullmatch(boundary):
        raise ValueError("its boundary is missing or not a valid one")
    return boundary.encode("ascii")


class MultipartParser:
    """Parser of a body that arrives in pieces. It yields a `PartHeader` where one begins, then its content as bytes."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._held = b"\r\n"  # so that the first delimiter looks like the others
        self._read = self._preamble
        self._num_parts = 0
        self.is_done = False

    def push(self, piece: bytes) -> Iterator[PartHeader | bytes]:
        """Parse the next piece of a multipart body. Raises `ValueError` for invalid input."""
        self._held += piece
        while not self.is_done:
            item = self._read()
            if item is None:
                return
            if item:
                yield item
        self._held = b""  # bytes after the last part are ignored

    def _preamble(self) -> PartHeader | bytes | None:
        """Skip bytes of the body before the first part (none in practice)."""
        if (at := self._held.find(self._delimiter)) < 0:
            if len(self._held) > MAX_HEADERS:
                raise ValueError("it does not begin with its boundary")
            return None
        self._held, self._read = self._held[at + len(self._delimiter) :], self._head
        return b""

    def _head(self) -> PartHeader | bytes | None:
        """Parse what follows a delimiter: the headers of a part, or the end of the body."""
        if self._held[:2] == b"--":
            self.is_done = True
            return b""
        if len(self._held) < 2:
            return None
        if self._held[:2] != b"\r\n":
            raise ValueError("a boundary is followed by neither a part nor the end")
        if (end := self._held.find(b"\r\n\r\n")) < 0:
            if len(self._held) > MAX_HEADERS:
                raise ValueError(f"the headers of a part have more than {MAX_HEADERS} bytes")
            return None
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ValueError(f"more than {MAX_PARTS} parts")
        part = _part(self._held[2:end])
        # keep the line end: in an empty part it is the one before the delimiter
        self._held, self._read = self._held[end + 2 :], self._begun
        return part

    def _begun(self) -> PartHeader | bytes | None:
        """Check whether a part is empty, once enough bytes are there: its delimiter may directly follow the headers."""
        if len(self._held) < len(self._delimiter):
            return None
        self._read = self._content
        if not self._held.startswith(self._delimiter):
            self._held = self._held[2:]
        return b""

    def _content(self) -> PartHeader | bytes | None:
        if (at := self._held.find(self._delimiter)) < 0:
            safe = len(self._held) - len(self._delimiter) + 1
            if safe <= 0:
                return None
            content, self._held = self._held[:safe], self._held[safe:]
            return content
        content = self._held[:at]
        self._held, self._read = self._held[at + len(self._delimiter) :], self._head
        return content


def _part(head: bytes) -> PartHeader:
    """Parse the headers of one part. Raises `ValueError` if Content-Disposition has no field name."""
    for line in head.decode(errors="replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            message = Message()
            try:
                message["content-disposition"] = value.strip()
                field, filename = message.get_param("name", header="content-disposition"), message.get_filename()
            except (ValueError, LookupError) as error:
                raise ValueError(f"the headers of a part: {error}") from error
            if message.get_content_disposition() == "form-data" and isinstance(field, str):
                # a charset of RFC 2231 may decode to lone surrogates, which UTF-8 cannot encode
                return PartHeader(field, filename and filename.encode(errors="replace").decode())
    raise ValueError("a part has no Content-Disposition with a name")
