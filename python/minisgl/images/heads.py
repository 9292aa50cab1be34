"""The head of an image file: its format, size and orientation, read before any pixel is decoded.

A file is taken apart here, so that a decoder gets what makes pixels and nothing else: no text, no profiles, no Exif
values, no comments, no frames of an APNG. Most hostile files attack those.

Invariants: reading costs time and memory linear in the bytes of the file; every error is an `ImageError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_PARTS = 65_536  # chunks or segments of a file; each costs a turn of a loop
_LONGEST_SIDE = 65_535  # of JPEG and GIF, too; a PNG of 16 million x 1 pixels takes 700 MB and seconds to resize
_MOST_SCANS = 64  # of a progressive JPEG, which needs about ten; each costs a pass over all pixels
_JPEG_PLAIN = frozenset((0x00, 0x01, *range(0xD0, 0xD9)))  # markers without a segment
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_KEPT = frozenset((*range(0xC0, 0xE1), 0xEE))  # tables, frames, JFIF, and Adobe's segment, which names the colours
_PNG_KEPT = frozenset((b"IHDR", b"PLTE", b"IDAT", b"IEND"))
_EXIF = b"Exif\0\0"


class ImageError(ValueError):
    """An image that cannot be used. The text says why: its format, its size, or the bound that it exceeds."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one image, checked before work is done: pixels of the picture, bytes of its file."""

    max_pixels: int = 16_000_000
    max_bytes: int = 32 << 20
    before: int = 0  # bytes of other files under the same limit

    def check_pixels(self, width: int, height: int) -> None:
        """Raise `ImageError` if a picture of this size is empty, has too many pixels or too long a side."""
        if width < 1 or height < 1:
            raise ImageError(f"the image has {width} x {height} pixels")
        if max(width, height) > _LONGEST_SIDE:
            raise ImageError(f"the image has {width} x {height} pixels, more than {_LONGEST_SIDE} a side")
        if width * height > self.max_pixels:
            raise ImageError(f"the image has {width} x {height} pixels, more than the limit of {self.max_pixels}")

    def check_bytes(self, num_bytes: int) -> None:
        """Raise `ImageError` if a file has too many bytes."""
        if num_bytes + self.before > self.max_bytes:
            others = f", and those before it {self.before}" if self.before else ""
            raise ImageError(f"the image has {num_bytes} bytes{others}, more than the limit of {self.max_bytes}")


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an image file. `format` is Pillow's name for it, `pixels` the file without metadata, and
    `orientation` the value of the Exif tag, 1 to 8: how the picture is to be turned."""

    format: str
    width: int
    height: int
    orientation: int
    pixels: bytes


def read_head(data: bytes) -> Head:
    """Return the head of an image file. Raises `ImageError` if it is no PNG, JPEG, WebP or GIF, or is damaged."""
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            return _png(data)
        if data.startswith(b"\xff\xd8\xff"):
            return _jpeg(data)
        if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            return _webp(data)
        if data.startswith((b"GIF87a", b"GIF89a")):
            return _gif(data)
    except (struct.error, IndexError) as error:
        raise ImageError("the image ends within its head") from error
    raise ImageError("the image has no bytes" if not data else "the image is no PNG, JPEG, WebP or GIF file")


def _png(data: bytes) -> Head:
    if data[12:16] != b"IHDR":
        raise ImageError("the PNG image has no IHDR chunk at its beginning")
    width, height = struct.unpack_from(">II", data, 16)
    kept, exif = [data[:8]], b""
    for name, start, end in _chunks(data, 8, ">I4s", name_first=False, around=12):
        if name in _PNG_KEPT:
            kept.append(data[start:end])
        elif name == b"eXIf":
            exif = data[start + 8 : end - 4]
        if name == b"IEND":
            break
    return Head("PNG", width, height, _orientation(exif), b"".join(kept))


def _webp(data: bytes) -> Head:
    width, height, exif = 0, 0, b""
    for name, start, end in _chunks(data, 12, "<4sI", name_first=True, around=8):
        body = start + 8
        if start == 12 and name == b"VP8X":  # the size of the canvas, less one, in 24 bits each
            low, high = struct.unpack_from("<IH", data, body + 4)
            width, height = (low & 0xFFFFFF) + 1, (low >> 24 | high << 8) + 1
        elif start == 12 and name == b"VP8L":
            (packed,) = struct.unpack_from("<I", data, body + 1)
            width, height = (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
        elif start == 12 and name == b"VP8 ":
            width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, body + 6))
        elif name == b"EXIF":
            exif = data[body:end]
    return Head("WEBP", width, height, _orientation(exif), data)


def _chunks(data: bytes, at: int, layout: str, *, name_first: bool, around: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, start and end of each chunk: 8 bytes of `layout` (name and length) and its body, `around` bytes
    longer than the body. WebP's chunks have even lengths."""
    for _ in range(_MOST_PARTS):
        if at + 8 > len(data):
            return
        first, second = struct.unpack_from(layout, data, at)
        name, length = (first, second) if name_first else (second, first)
        end = at + around + length
        yield name, at, end
        at = end + (length & 1 if name_first else 0)
    raise ImageError(f"the image has more than {_MOST_PARTS} chunks")


def _jpeg(data: bytes) -> Head:
    width, height, kept, exif, at = 0, 0, [b"\xff\xd8"], list[bytes](), 2
    for _ in range(_MOST_PARTS):
        at = data.find(b"\xff", at)  # a decoder, too, skips other bytes between segments
        if at < 0 or (marker := data[at + 1]) == 0xD9:
            raise ImageError("the JPEG image ends before its pixels begin")
        if marker in _JPEG_PLAIN or marker == 0xFF:
            at += 1 if marker == 0xFF else 2
            continue
        if marker == 0xDA:
            break
        (length,) = struct.unpack_from(">H", data, at + 2)
        segment = data[at : at + 2 + length]
        if marker in _JPEG_FRAMES:
            if width:
                raise ImageError("the JPEG image has two sizes")
            height, width = struct.unpack_from(">HH", segment, 5)
        if marker in _JPEG_KEPT:
            kept.append(segment)
        elif marker == 0xE1 and segment.startswith(_EXIF, 4):
            exif.append(segment[10:])
        at += 2 + length
    else:
        raise ImageError(f"the image has more than {_MOST_PARTS} segments")
    if data.count(b"\xff\xda", at) > _MOST_SCANS:
        raise ImageError(f"the JPEG image has more than {_MOST_SCANS} scans")
    kept.append(data[at:])
    return Head("JPEG", width, height, _orientation(b"".join(exif)), b"".join(kept))


def _gif(data: bytes) -> Head:
    """Read up to the first frame, whose corner may lie outside of the screen: then the picture is larger."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    kept = [data[:at]]
    while data[at] == 0x21:  # an extension, in blocks of up to 255 bytes
        start, at = at, at + 2
        while data[at]:
            at += 1 + data[at]
        at += 1
        if data[start + 1] == 0xF9:  # the frame's transparency: the colour where there is no frame
            kept.append(data[start:at])
    if data[at] != 0x2C:
        raise ImageError("the GIF image has no frame at its beginning")
    left, top, columns, rows = struct.unpack_from("<HHHH", data, at + 1)
    return Head("GIF", max(width, left + columns), max(height, top + rows), 1, b"".join((*kept, data[at:])))


def _orientation(exif: bytes) -> int:
    """Return the orientation of an Exif block, 1 if it has none or is damaged."""
    tiff = exif.removeprefix(_EXIF)
    order = ">" if tiff.startswith(b"MM") else "<"
    try:
        (at,) = struct.unpack_from(f"{order}I", tiff, 4)
        (entries,) = struct.unpack_from(f"{order}H", tiff, at)
        for entry in range(at + 2, at + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(f"{order}HHI", tiff, entry)
            if tag == 0x0112:
                layout = {3: "H", 4: "I"}.get(kind) if count == 1 else None
                (value,) = struct.unpack_from(f"{order}{layout}", tiff, entry + 8) if layout else (1,)
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1
