"""Images of a prompt: bytes become patches as a vision tower reads them, and markers become virtual ids.

It knows files, sizes and the rules of processors. Towers belong to `engine/`, the parts of a request to `server/`.
Pillow is optional: only `Processor.prepare` needs it. Start with `processors.py`, then `decode.py` and `heads.py`.
"""

from minisgl.images.decode import pillow_trouble
from minisgl.images.heads import Bounds, ImageError
from minisgl.images.processors import PreparedImage, Processor, Tile, read_processor
from minisgl.images.prompts import expand
from minisgl.images.sources import data_url, load, most_tokens

__all__ = [
    "Bounds",
    "ImageError",
    "PreparedImage",
    "Processor",
    "Tile",
    "data_url",
    "expand",
    "load",
    "most_tokens",
    "pillow_trouble",
    "read_processor",
]
