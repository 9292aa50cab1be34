"""The head of a file says size and orientation, and a decoder gets nothing but what makes pixels."""

from __future__ import annotations

import io
import random
import struct
import zlib

import pytest
from PIL import Image

from minisgl.images import Bounds, ImageError
from minisgl.images.heads import read_head
from tests.helpers.image_files import (
    EXIF_TURNS,
    FORMATS,
    chunk,
    encoded,
    exif,
    picture,
    with_block,
    with_chunks,
    with_scans,
    with_segments,
    with_size,
)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA"])
def test_the_size_is_that_of_the_picture(format: str, mode: str) -> None:
    rng = random.Random(format + mode)
    for _ in range(10):
        width, height = rng.randrange(1, 400), rng.randrange(1, 400)
        options = {"lossless": rng.random() < 0.5} if format == "WEBP" else {"progressive": rng.random() < 0.5}
        image = picture(width, height, mode=mode)
        head = read_head(encoded(image.convert("RGB") if format == "JPEG" else image, format, **options))
        assert (head.format, head.width, head.height, head.orientation) == (format, width, height, 1)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("turn", [0, *EXIF_TURNS, 9, 300])
def test_the_orientation_is_read_from_exif(format: str, order: str, turn: int) -> None:
    head = read_head(encoded(picture(5, 4), format, exif=exif(turn, order)))
    assert head.orientation == (turn if turn in EXIF_TURNS else 1)


@pytest.mark.parametrize("length", range(len(exif(6))))
def test_a_cut_exif_block_means_no_orientation(length: int) -> None:
    whole = length >= len(exif(6)) - 6  # what follows the value is not read
    assert read_head(with_segments(encoded(picture(5, 4), "JPEG"), 0xE1, exif(6)[:length])).orientation in (
        (6,) if whole else (1,)
    )


def test_metadata_does_not_reach_the_decoder() -> None:
    secret = b"unfolded" * 100
    png, jpeg, gif = (encoded(picture(9, 9), format) for format in ("PNG", "JPEG", "GIF"))
    files = [
        *(
            with_chunks(png, chunk(name, secret))
            for name in (b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"eXIf", b"acTL", b"x" * 4)
        ),
        *(with_segments(jpeg, marker, secret) for marker in (0xE1, 0xE2, 0xED, 0xEF, 0xFE)),
        *(with_block(gif, bytes((0x21, label, 200)) + secret[:200] + b"\0") for label in (0xFE, 0xFF, 0x01)),
    ]
    for data in files:
        pixels = read_head(data).pixels
        assert b"unfolded" in data and b"unfolded" not in pixels
        Image.open(io.BytesIO(pixels)).load()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no bytes"),
        (b"GIF88a" + bytes(99), "no PNG, JPEG, WebP or GIF"),
        (b"<svg/>", "no PNG, JPEG, WebP or GIF"),
        (encoded(picture(4, 4), "BMP"), "no PNG, JPEG, WebP or GIF"),
        (b"\x89PNG\r\n\x1a\n", "no IHDR"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0", "ends within its head"),
        (b"\xff\xd8\xff", "ends within its head"),
        (b"\xff\xd8\xff\xd9", "ends before its pixels"),
        (b"\xff\xd8\xff\xe0\0\x04ab", "ends before its pixels"),
        (with_segments(encoded(picture(4, 4), "JPEG"), 0xC0, struct.pack(">BHHB", 8, 9, 9, 0)), "two sizes"),
        (b"GIF89a\1\0\1\0\0\0\0;", "no frame"),
        (b"GIF89a\1\0\1\0\0\0\0\x21\xfe\5", "ends within its head"),
        (with_chunks(encoded(picture(4, 4)), *[chunk(b"tEXt", b"")] * 70_000), "more than 65536 chunks"),
        (with_segments(encoded(picture(4, 4), "JPEG"), 0xFE, *[b""] * 70_000), "more than 65536 segments"),
        (with_scans(encoded(picture(4, 4), "JPEG", progressive=True), 60), "more than 64 scans"),
    ],
)
def test_what_is_no_image_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        read_head(data)


def test_a_frame_beyond_the_screen_makes_a_gif_larger() -> None:
    data = with_size(encoded(picture(30, 20), "GIF"), 5, 4)
    head = read_head(data)
    assert (head.width, head.height) == (30, 20) == Image.open(io.BytesIO(data)).size


def test_bounds_name_the_size_and_the_limit() -> None:
    bounds = Bounds(max_pixels=100, max_bytes=9)
    bounds.check_pixels(10, 10)
    bounds.check_bytes(9)
    with pytest.raises(ImageError, match="101 x 1 pixels, more than the limit of 100"):
        bounds.check_pixels(101, 1)
    Bounds().check_pixels(65_535, 1)
    with pytest.raises(ImageError, match="1 x 65536 pixels, more than 65535 a side"):
        Bounds().check_pixels(1, 65_536)
    with pytest.raises(ImageError, match="0 x 5 pixels"):
        bounds.check_pixels(0, 5)
    with pytest.raises(ImageError, match="10 bytes, more than the limit of 9"):
        bounds.check_bytes(10)


def test_a_png_without_its_end_keeps_what_is_there() -> None:
    data = encoded(picture(9, 9))
    assert read_head(data[:-20]).pixels == data[:-20]
    assert zlib.crc32(read_head(data).pixels) == zlib.crc32(data)
