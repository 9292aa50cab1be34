"""Image files of a chat's messages, as data URLs."""

from __future__ import annotations

import base64
import shlex
from pathlib import Path

COMMAND = "/image"
_TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


class PictureError(Exception):
    """A file that cannot be attached, with a reason for the user."""


def data_url(file: str) -> str:
    """Read an image file. Raises `PictureError`."""
    try:
        path = Path(file).expanduser()
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise PictureError(f"{file}: is no regular file")  # a device or a pipe may have no end
        data = path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no home folder
        raise PictureError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    kind = next((kind for begin, kind in _TYPES.items() if data.startswith(begin)), None)
    if kind is None:
        raise PictureError(f"{file}: must be a PNG, JPEG, WebP or GIF file")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def files_of(text: str) -> list[str]:
    """Return the files that are named after `/image`: one as it is, or several as a shell writes them. Raises
    `PictureError`."""
    try:
        return [text] if Path(text).expanduser().is_file() else shlex.split(text)
    except (OSError, ValueError, RuntimeError) as error:
        raise PictureError(f"{text}: {error}") from error
