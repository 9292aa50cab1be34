"""Sources of images: data URLs of requests; bytes, files and pictures of callers in this process."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.images.heads import Bounds, ImageError

if TYPE_CHECKING:
    from PIL.Image import Image

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)


def data_url(text: str, bounds: Bounds | None = None) -> bytes:
    """Return the bytes of `data:image/png;base64,...`. Raises `ImageError` for any other URL, for invalid base64, and
    for more bytes than the bound. The type that it names is not compared with the file."""
    head = _DATA_URL.match(text)
    if head is None:
        raise ImageError(f"the image URL {text[:32]!r} must begin with data:image/png;base64, or another image type")
    body = text[head.end() :]
    (bounds or Bounds()).check_bytes(len(body) // 4 * 3 - body.count("=", -2))
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise ImageError(f"the image is no valid base64: {error}") from error


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
            raise ImageError(
                f"the image cannot be read: {source} is no regular file"
            )  # a device or a pipe may have no end
        (bounds or Bounds()).check_bytes(os.stat(source).st_size)
        return Path(source).read_bytes()
    except (OSError, ValueError) as error:
        raise error if isinstance(error, ImageError) else ImageError(f"the image cannot be read: {error}") from error
