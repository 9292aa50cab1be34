"""Image files for tests: proper ones of each format, hostile ones from a seed, and model folders with a processor.

`python -m tests.helpers.image_files FIRST LAST MAX_PIXELS` decodes the hostile files of these seeds in a process of its
own, and prints what became of them and by how many bytes the process grew.
"""

from __future__ import annotations

import io
import json
import random
import re
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from minisgl.images import Bounds, ImageError
from minisgl.images.decode import decode


class _Broken(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("built for another Python")


BROKEN_PILLOW = _Broken("PIL")
ROOT = Path(__file__).parents[2]
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
EXIF_TURNS = range(1, 9)
QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}
QWEN3_MODEL = {
    "model_type": "qwen3_vl",
    "image_token_id": 7,
    "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
GEMMA3 = {
    "image_processor_type": "Gemma3ImageProcessor",
    "do_convert_rgb": None,
    "do_pan_and_scan": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "size": {"height": 896, "width": 896},
}
GEMMA3_MODEL = {
    "model_type": "gemma3",
    "image_token_index": 9,
    "mm_tokens_per_image": 256,
    "vision_config": {"patch_size": 14, "image_size": 896},
}


def model_folder(path: Path, processor: dict[str, Any] = QWEN3, model: dict[str, Any] = QWEN3_MODEL) -> Path:
    """Write the two files of a model folder that describe its image processor."""
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    (path / "config.json").write_text(json.dumps(model))
    return path


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return a picture with noise and a slope in it, so that each way of resizing and each turn shows."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 4))
    slope = np.linspace(0, 128, width)[None, :, None] + np.linspace(0, 64, height)[:, None, None]
    mixed = ((values + slope) % 256).astype(np.uint8)
    if mode.startswith("I"):
        return Image.fromarray((mixed[:, :, 0].astype(np.uint16) << 8) + mixed[:, :, 1])
    return Image.fromarray(mixed).convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """Return the bytes of an image file; a PNG of noise becomes no smaller by compression."""
    options = {"compress_level": 1, **options} if format == "PNG" else options
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def by_pillow(data: bytes) -> np.ndarray[Any, Any]:
    """Return the pixels as transformers' `load_image` makes them, with Pillow alone."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def exif(turn: int, order: str = "<") -> bytes:
    """Return an Exif block with an orientation."""
    head = b"II*\0" if order == "<" else b"MM\0*"
    return b"Exif\0\0" + head + struct.pack(f"{order}IHHHIHHI", 8, 1, 0x0112, 3, 1, turn, 0, 0)


def chunk(name: bytes, body: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def with_chunks(data: bytes, *chunks: bytes) -> bytes:
    """Insert chunks behind the head of a PNG file."""
    return data[:33] + b"".join(chunks) + data[33:]


def with_segments(data: bytes, marker: int, *bodies: bytes) -> bytes:
    """Insert segments at the beginning of a JPEG file."""
    return data[:2] + b"".join(struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body for body in bodies) + data[2:]


def with_block(data: bytes, block: bytes) -> bytes:
    """Insert a block before the first frame of a GIF file."""
    at = data.index(b"\x2c\0\0\0\0", 13)
    return data[:at] + block + data[at:]


def with_size(data: bytes, width: int, height: int) -> bytes:
    """Replace the size in the head of a file, with a right checksum."""
    if data.startswith(b"\x89PNG"):
        return data[:8] + chunk(b"IHDR", struct.pack(">II", width, height) + data[24:29]) + data[33:]
    if data.startswith(b"GIF"):
        return data[:6] + struct.pack("<HH", width & 0xFFFF, height & 0xFFFF) + data[10:]
    if data.startswith(b"RIFF"):
        canvas = struct.pack("<I", width - 1 & 0xFFFFFF)[:3] + struct.pack("<I", height - 1 & 0xFFFFFF)[:3]
        extended = b"VP8X" + struct.pack("<II", 10, 0x02) + canvas
        return b"RIFF" + struct.pack("<I", len(data) + 10) + b"WEBP" + extended + data[12:]
    size = struct.pack(">HH", height & 0xFFFF, width & 0xFFFF)
    return re.sub(rb"(\xff[\xc0-\xc2]\0.\x08)....", lambda found: found[1] + size, data, count=1, flags=re.DOTALL)


def _proper(rng: random.Random) -> bytes:
    mode = rng.choice(("RGB", "L", "P", "RGBA", "LA", "CMYK", "1", "I;16"))
    formats = {"CMYK": ("JPEG",), "I;16": ("PNG",), "LA": ("PNG", "WEBP"), "RGBA": ("PNG", "WEBP", "GIF")}
    format = rng.choice(formats.get(mode, FORMATS if mode in ("RGB", "L") else ("PNG", "GIF")))
    image = picture(rng.randrange(1, 90), rng.randrange(1, 90), rng.randrange(99), mode)
    options: dict[str, Any] = {"exif": exif(rng.randrange(10))} if format != "GIF" and rng.random() < 0.3 else {}
    if format == "JPEG":
        options |= {"progressive": rng.random() < 0.3, "quality": rng.randrange(5, 100)}
    return encoded(image, format, **options)


def _animated(rng: random.Random) -> bytes:
    frames = [picture(40, 30, seed) for seed in range(rng.randrange(2, 30))]
    return encoded(frames[0], rng.choice(("GIF", "WEBP", "PNG")), save_all=True, append_images=frames[1:])


def _cut(rng: random.Random) -> bytes:
    data = _proper(rng)
    return data[: rng.randrange(len(data))]


def _flipped(rng: random.Random) -> bytes:
    data = bytearray(_proper(rng))
    for _ in range(rng.randrange(1, 20)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _wrong_size(rng: random.Random) -> bytes:
    sides = (0, 1, 7, 100, 1000, 65535, 2**24, 2**31 - 1)
    return with_size(_proper(rng), rng.choice(sides), rng.choice(sides))


@cache
def _zeros() -> bytes:
    """Return 50 MB, compressed."""
    return zlib.compress(bytes(50 << 20))


def _bomb(rng: random.Random) -> bytes:
    """Return a small file whose head is honest about a huge picture, or whose metadata unfolds to much."""
    small, photo = encoded(picture(8, 8)), encoded(picture(8, 8), "JPEG")
    zeros = _zeros()
    tags = b"".join(struct.pack("<HHII", tag, 3, 30_000, 8) for tag in range(5000))
    unfolds = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 5000) + tags
    side = rng.choice((3000, 20_000, 60_000))
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: with_size(small, side, side),
        lambda: encoded(Image.new("1", (side // 10, side // 10))),
        lambda: encoded(Image.new("L", (4000, 3000)), "JPEG", quality=1),
        lambda: with_chunks(small, *[chunk(b"zTXt", b"a\0\0" + zeros)] * rng.randrange(1, 5)),
        lambda: with_chunks(small, chunk(b"iCCP", b"a\0\0" + zeros)),
        lambda: with_chunks(small, chunk(b"eXIf", unfolds[6:])),
        lambda: with_segments(photo, 0xE1, unfolds[:65_000], *[unfolds[:6] + bytes(60_000)] * 20),
        lambda: with_scans(encoded(Image.new("RGB", (600, 600)), "JPEG", progressive=True), rng.randrange(1, 100)),
        lambda: with_size(encoded(picture(8, 8), "GIF"), side, side),
        lambda: with_size(encoded(picture(8, 8), "WEBP"), min(side, 16_000), min(side, 16_000)),
    )
    return rng.choice(kinds)()


def with_scans(data: bytes, count: int) -> bytes:
    """Append scans to a progressive JPEG that refine nothing: a table with one code, and that code for all blocks."""
    table = b"\xff\xc4\0\x14\x10\1" + bytes(15) + b"\xe0"
    return data[:-2] + table + b"\xff\xda\0\x08\1\1\0\1\x3f\x10\0\0" * count + b"\xff\xd9"


def _other_type(rng: random.Random) -> bytes:
    image = picture(20, 20)
    heads = (
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff",
        b"RIFF\x10\0\0\0WEBPVP8 ",
        b"GIF89a",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
    )
    texts = (b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"<html>", b"%PDF-1.7", b"MZ", b"\x7fELF", b"\0" * 50)
    made = [encoded(image, format) for format in ("BMP", "TIFF", "ICO", "PPM", "TGA", "PCX", "DDS")]
    return rng.choice((*made, *texts, *(head + rng.randbytes(rng.randrange(200)) for head in heads)))


def _garbage(rng: random.Random) -> bytes:
    """Return a proper file with chunks, segments or blocks of noise in it, few or many."""
    count, noise = rng.choice((1, 3, 3000, 70_000)), rng.randbytes(rng.randrange(40))
    names = (
        b"tEXt",
        b"iTXt",
        b"zTXt",
        b"iCCP",
        b"tRNS",
        b"PLTE",
        b"eXIf",
        b"gAMA",
        b"acTL",
        b"fcTL",
        b"fdAT",
        b"IDAT",
        b"abcd",
    )
    gif = encoded(picture(20, 20), "GIF")
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: with_chunks(
            encoded(picture(20, 20, mode=rng.choice(("RGB", "P", "L")))), *[chunk(rng.choice(names), noise)] * count
        ),
        lambda: with_segments(encoded(picture(20, 20), "JPEG"), rng.randrange(0xC0, 0x100), *[noise] * count),
        lambda: with_block(gif, b"\x21\xfe" + b"\1a" * count + b"\0"),
        lambda: with_block(gif, rng.choice((b"\x21\xff", b"\x21\xf9")) + bytes((len(noise),)) + noise),
        lambda: encoded(picture(20, 20), "WEBP") + (b"abcd" + struct.pack("<I", len(noise)) + noise) * count,
    )
    return rng.choice(kinds)()


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    _proper, _animated, _cut, _flipped, _wrong_size, _bomb, _other_type, _garbage,
)  # fmt: skip


def hostile(seed: int) -> tuple[str, bytes]:
    """Return the kind of file that a seed makes, and the file."""
    make = KINDS[seed % len(KINDS)]
    return make.__name__.strip("_"), make(random.Random(seed))


def decoded(data: bytes, bounds: Bounds) -> np.ndarray[Any, Any] | ImageError:
    """Return the pixels of a file, or why it is refused."""
    try:
        return np.asarray(decode(data, bounds))
    except ImageError as error:
        return error


def outcome(kind: str, data: bytes, found: np.ndarray[Any, Any] | ImageError, bounds: Bounds) -> str:
    """Return `refused` or `right`, or what is wrong. A right picture is Pillow's, unless Pillow refuses the file for
    what is left out here, such as text."""
    if isinstance(found, ImageError):
        return "refused" if kind not in ("proper", "animated") and len(str(found)) > 20 else f"refused: {found}"
    if found.size > 3 * bounds.max_pixels:
        return "too large"
    try:
        return "right" if kind == "bomb" or np.array_equal(found, by_pillow(data)) else "another picture"
    except Exception:
        return "right"


def peak(run: Callable[[], Any]) -> tuple[Any, int]:
    """Run something, and return its result and by how many bytes this process grew meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is there now
    before = _memory("VmRSS")
    return run(), _memory("VmHWM") - before


def _memory(name: str) -> int:
    return int(re.findall(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10


def cost_of_largest(format: str) -> float:
    """Return by how many bytes a pixel this process grows when it decodes the largest picture, beside its file."""
    modes = {"JPEG": "CMYK", "GIF": "P"}
    options: dict[str, dict[str, Any]] = {
        "PNG": {"exif": exif(5), "compress_level": 1},
        "JPEG": {"exif": exif(5), "progressive": True, "subsampling": 0},
        "WEBP": {"exif": exif(5), "lossless": True, "method": 0},
    }
    image = picture(1000, 1000, mode=modes.get(format, "RGBA")).resize((4000, 4000), Image.Resampling.NEAREST)
    data = encoded(image, format, **options.get(format, {}))
    decoded(encoded(picture(8, 8), "WEBP"), Bounds())
    pixels, grown = peak(partial(decoded, data, Bounds()))
    assert not isinstance(pixels, ImageError) and pixels.size == 3 * Bounds().max_pixels
    return (grown - 2 * len(data)) / Bounds().max_pixels


def main(first: int, last: int, max_pixels: int) -> None:
    """Decode the hostile files of a range of seeds, and print the outcomes and the growth in bytes."""
    bounds = Bounds(max_pixels)
    decode(encoded(picture(8, 8), "WEBP"), bounds)  # imports what there is to import
    found, wrong, most = Counter[str](), list[str](), (0, "")
    for seed in range(first, last):
        kind, data = hostile(seed)
        pixels, grown = peak(partial(decoded, data, bounds))
        most = max(most, (grown, f"seed {seed}, {kind}"))
        result = outcome(kind, data, pixels, bounds)
        found[f"{kind} {result}" if result in ("right", "refused") else "wrong"] += 1
        wrong += [f"seed {seed}, {kind}: {result}"] if result not in ("right", "refused") else []
    print(json.dumps({"found": found, "wrong": wrong, "grown": most}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
