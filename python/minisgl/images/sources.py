"""Sources of images: data URLs of requests; bytes, files and pictures of callers in this process."""

from __future__ import annotations

import binascii
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.images.heads import Bounds, ImageError

if TYPE_CHECKING:
    from PIL.Image import Image

LOW_DETAIL_TOKENS = 256
SLICE = 1 << 20  # base64 characters that are decoded at once, between which other threads run; a multiple of 4
_DETAILS = ("low", "high", "auto", "original")
_DATA_URL = re.compile(r"data:[a-z0-9.+/-]{0,80};base64,", re.IGNORECASE)
SCHEME = re.compile(r"([a-z][a-z0-9+.-]{0,31}):", re.IGNORECASE)  # of a URL


def data_url(text: str, bounds: Bounds | None = None) -> bytes:
    """Return the bytes of `data:image/png;base64,...`, or of base64 alone. Raises `ImageError` for any other URL, for
    invalid base64, and for more bytes than the bound. The type that it names is not compared with the file."""
    head = _DATA_URL.match(text[:128])
    if head is None and SCHEME.match(text[:64]):
        raise ImageError(f"the image URL {text[:32]!r} must begin with data:image/png;base64, or another image type")
    start, end = 0 if head is None else head.end(), len(text)
    (bounds or Bounds()).check_bytes((end - start) // 4 * 3 - text.count("=", max(start, end - 2)))
    try:
        if (padding := text.find("=", start, max(start, end - 2))) >= 0:
            raise ValueError(f"padding at character {padding - start}, before the end")
        pieces = (text[at : min(at + SLICE, end)] for at in range(start, end, SLICE))
        return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)
    except ValueError as error:
        raise ImageError(f"the image is no valid base64: {error}") from error


def most_tokens(detail: object) -> int | None:
    """Return the tokens that an image may take by its `detail`, a field of OpenAI's; `None` if it says nothing. Raises
    `ImageError`."""
    if detail is not None and not (isinstance(detail, str) and detail in _DETAILS):
        raise ImageError("must be low, high or auto")
    return LOW_DETAIL_TOKENS if detail == "low" else None


def load(source: bytes | str | os.PathLike[str] | Image, bounds: Bounds | None = None) -> bytes | Image:
    """Return what `Processor.prepare` takes: bytes and pictures as they are, the bytes of a file, those of a data URL.
    For callers in this process: a client of a server must not name files."""
    if not isinstance(source, str | os.PathLike):
        return source
    if isinstance(source, str) and source[:5].lower() == "data:":
        return data_url(source, bounds)
    if isinstance(source, str) and re.match("https?://", source, re.IGNORECASE):
        raise ImageError("an image is a file, bytes, a data URL or a PIL image; fetch a web address first")
    try:
        if not Path(source).is_file() and Path(source).exists():
            raise OSError(f"{source} is no regular file")  # a device or a pipe may have no end
        (bounds or Bounds()).check_bytes(os.stat(source).st_size)
        return Path(source).read_bytes()
    except (OSError, ValueError) as error:
        raise error if isinstance(error, ImageError) else ImageError(f"the image cannot be read: {error}") from error
