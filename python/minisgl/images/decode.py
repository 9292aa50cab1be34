"""A picture out of the bytes of a file, with Pillow, as transformers' `load_image` makes it.

Invariants: no pixel is decoded if the head of a file exceeds the bounds. A picture is RGB, 8 bits, upright. Whatever is
wrong with a file becomes an `ImageError`.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from minisgl.images.heads import Bounds, ImageError, read_head
from minisgl.utils.installed import how_to_get

if TYPE_CHECKING:
    from PIL.Image import Image

_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Members of `PIL.Image.Transpose` that make a picture upright, by the value of the Exif tag."""


def pillow_trouble() -> str:
    """Return why Pillow cannot be used, and how to install it; empty if it loads."""
    try:
        from PIL import Image, ImageOps  # noqa: F401
    except Exception as error:  # a damaged installation may raise anything
        absent = isinstance(error, ModuleNotFoundError) and error.name == "PIL"
        why = "is not installed" if absent else f"does not load ({type(error).__name__}: {error})"
        return f"images need Pillow, which {why}: {how_to_get('images')}"
    return ""


def need_pillow() -> None:
    """Raise `ImageError` if Pillow cannot be used."""
    if trouble := pillow_trouble():
        raise ImageError(trouble)


def decode(data: bytes, bounds: Bounds) -> Image:
    """Decode an image file: the first frame if it is animated. Raises `ImageError` if it is damaged, cut, of another
    format, or exceeds `bounds`."""
    need_pillow()
    from PIL import Image, UnidentifiedImageError

    bounds.check_bytes(len(data))
    head = read_head(data)
    bounds.check_pixels(head.width, head.height)
    try:
        with Image.open(io.BytesIO(head.pixels), formats=[head.format]) as opened:
            if opened.size != (head.width, head.height):
                raise ImageError(f"its head says {head.width} x {head.height} pixels, its body {opened.size}")
            picture = opened.convert("RGB")
        turn = _TURNS.get(head.orientation)
        return picture if turn is None else picture.transpose(Image.Transpose(turn))
    except Exception as error:  # a decoder of a hostile file may raise anything
        unknown = isinstance(error, UnidentifiedImageError)  # its text has an address in memory
        raise ImageError(f"the {head.format} image is damaged: {'no picture' if unknown else error}") from error


def upright(picture: Image, bounds: Bounds) -> Image:
    """Return a caller's own picture as `decode` would return its file."""
    need_pillow()
    from PIL import ImageOps

    bounds.check_pixels(*picture.size)
    try:
        return ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:  # it may be a file that is read only now
        raise ImageError(f"the image is damaged: {error}") from error
