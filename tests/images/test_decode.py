"""Files become the pictures that transformers loads, hostile ones become errors, and none costs more than its bound."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from minisgl.images import Bounds, ImageError, pillow_trouble
from minisgl.images.decode import decode, upright
from minisgl.utils.installed import how_to_get
from tests.helpers.image_files import (
    BROKEN_PILLOW,
    EXIF_TURNS,
    ROOT,
    by_pillow,
    encoded,
    exif,
    model_folder,
    picture,
    with_chunks,
    with_size,
)

BOUNDS = Bounds()
FILES = {
    "grey": encoded(picture(33, 21, mode="L")),
    "grey JPEG": encoded(picture(33, 21, mode="L"), "JPEG"),
    "grey with alpha": encoded(picture(33, 21, mode="LA")),
    "alpha": encoded(picture(33, 21, mode="RGBA")),
    "alpha WebP": encoded(picture(33, 21, mode="RGBA"), "WEBP"),
    "lossless WebP": encoded(picture(33, 21), "WEBP", lossless=True),
    "palette": encoded(picture(33, 21, mode="P")),
    "palette with transparency": encoded(picture(33, 21, mode="P"), transparency=bytes(range(256))),
    "black and white": encoded(picture(33, 21, mode="1")),
    "16 bits": encoded(picture(33, 21, mode="I;16")),
    "CMYK": encoded(picture(33, 21, mode="CMYK"), "JPEG"),
    "YCCK": re.sub(rb"(Adobe.{6})\0", b"\\g<1>\2", encoded(picture(33, 21, mode="CMYK"), "JPEG"), flags=re.DOTALL),
    "progressive": encoded(picture(33, 21), "JPEG", progressive=True),
    "interlaced GIF": encoded(picture(33, 21, mode="P"), "GIF", interlace=True),
    "GIF with transparency": encoded(picture(33, 21, mode="P"), "GIF", transparency=3),
    "GIF with transparency around it": with_size(encoded(picture(33, 21), "GIF", transparency=3), 50, 40),
    "one pixel": encoded(picture(1, 1)),
    "one pixel JPEG": encoded(picture(1, 1), "JPEG"),
    "one pixel WebP": encoded(picture(1, 1), "WEBP"),
    "one pixel GIF": encoded(picture(1, 1), "GIF"),
} | {
    f"{format}, turn {turn}": encoded(picture(33, 21), format, exif=exif(turn))
    for format in ("PNG", "JPEG", "WEBP")
    for turn in EXIF_TURNS
}
ANIMATED = {
    format: encoded(
        picture(40, 30), format, save_all=True, append_images=[picture(40, 30, seed) for seed in range(1, 9)]
    )
    for format in ("GIF", "WEBP", "PNG")
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_the_picture_that_transformers_loads(name: str) -> None:
    from transformers.image_utils import load_image

    theirs = np.asarray(load_image(Image.open(io.BytesIO(FILES[name]))))
    assert np.array_equal(np.asarray(decode(FILES[name], BOUNDS)), theirs)
    assert np.array_equal(np.asarray(upright(Image.open(io.BytesIO(FILES[name])), BOUNDS)), theirs)


@pytest.mark.parametrize("format", ANIMATED)
def test_an_animation_costs_and_shows_its_first_frame(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_pillow(ANIMATED[format])
    loaded = list[object]()
    load: Any = ImageFile.ImageFile.load

    def noting(self: ImageFile.ImageFile) -> Any:
        loaded.append(self.tell())
        return load(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", noting)
    assert np.array_equal(np.asarray(decode(ANIMATED[format], BOUNDS)), expected)
    assert loaded and set(loaded) == {0}


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_too_many_pixels_are_refused_before_a_file_is_opened(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(picture(101, 100), format)
    assert decode(data, Bounds(max_pixels=10_100)).size == (101, 100)
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(ImageError, match="101 x 100 pixels, more than the limit of 10099"):
        decode(data, Bounds(max_pixels=10_099))
    with pytest.raises(ImageError, match="more than the limit of 99"):
        decode(data, Bounds(max_bytes=99))
    with pytest.raises(ImageError, match=r"101 x 100 pixels"):
        upright(picture(101, 100), Bounds(max_pixels=100))


def test_a_file_with_two_sizes_is_refused() -> None:
    data = encoded(picture(8, 8))
    larger = with_size(data, 5000, 5000)[8:33]
    with pytest.raises(ImageError, match=r"its head says 8 x 8 pixels, its body \(5000, 5000\)"):
        decode(with_chunks(data, larger), BOUNDS)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_pillow_may_use_no_other_decoder_than_that_of_the_head(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = list[object]()
    opened: Any = Image.open

    def noting(file: Any, formats: Any) -> Any:
        allowed.append(formats)
        return opened(file, formats=formats)

    monkeypatch.setattr(Image, "open", noting)
    decode(encoded(picture(8, 8), format), BOUNDS)
    assert allowed == [[format]]


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_cut_file_is_refused(format: str) -> None:
    data = encoded(picture(60, 50), format)
    for length in range(0, len(data) * 9 // 10, len(data) // 40):
        with pytest.raises(ImageError):
            decode(data[:length], BOUNDS)


def test_no_error_but_one_of_images_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(picture(4, 4))
    for error in (MemoryError(), RecursionError("deep"), SyntaxError("broken"), KeyError(5), AssertionError()):

        def broken(*_: Any, error: Exception = error, **__: Any) -> Any:
            raise error

        monkeypatch.setattr(Image.Image, "convert", broken)
        with pytest.raises(ImageError, match="damaged"):
            decode(data, BOUNDS)
        with pytest.raises(ImageError, match="damaged"):
            upright(Image.new("L", (2, 2)), BOUNDS)


def test_a_warning_of_pillow_is_an_error_of_the_image_where_warnings_are_errors() -> None:
    huge = with_size(encoded(picture(8, 8), "GIF"), 12_000, 12_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data in (huge, with_chunks(encoded(picture(8, 8)), b"\0\0\0\4IDATabcdabcd")):
            with pytest.raises(ImageError):
                decode(data, Bounds(max_pixels=200_000_000))


def test_text_of_an_error_has_no_address_in_memory() -> None:
    data = bytearray(encoded(picture(8, 8)))
    data[30] ^= 1  # the checksum of the head
    with pytest.raises(ImageError, match=r"the PNG image is damaged: no picture$"):
        decode(bytes(data), BOUNDS)


def apart(*arguments: str) -> str:
    """Run Python in a process whose freed memory goes back at once, so that its growth is a file's cost."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
    env |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, check=True, capture_output=True, env=env, cwd=ROOT, text=True).stdout


@pytest.mark.parametrize("last", [504, pytest.param(10_000, marks=(pytest.mark.slow, pytest.mark.timeout(1800)))])
def test_hostile_files_are_refused_or_right_and_cost_no_more_than_their_bound(last: int) -> None:
    report = json.loads(apart("-m", "tests.helpers.image_files", "0", str(last), "1000000"))
    assert report["wrong"] == []
    assert sum(report["found"].values()) == last
    assert {"bomb refused", "bomb right", "garbage right", "flipped right", "wrong_size right"} <= report[
        "found"
    ].keys()
    grown, file = report["grown"]
    assert grown < 24 * 1_000_000 + (16 << 20), file  # 24 bytes of a pixel, and the file


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_largest_picture_costs_at_most_24_bytes_a_pixel(format: str) -> None:
    program = f"from tests.helpers import image_files; print(image_files.cost_of_largest({format!r}))"
    assert float(apart("-c", program)) < 24


def test_without_pillow_all_but_decoding_works(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["PIL"] = None
from pathlib import Path
import numpy as np
from minisgl import images
from minisgl.images.fetch import Fetcher
processor = images.read_processor(Path(sys.argv[1]), max_tokens=9)
assert processor.table.shape == (3, 256)
assert images.data_url("data:image/png;base64,AAAA") == images.load(bytes(3))
one = images.Tile(bytes(32), (2, 2), 1, b"")
assert len(images.expand(np.array([1, 7], np.int32), 7, [images.PreparedImage((one,))])[0]) == 2
try:
    processor.prepare(bytes(3))
except images.ImageError as error:
    print(error)
"""
    said = apart("-c", program, str(model_folder(tmp_path)))
    assert said == "images need Pillow, which is not installed: pip install '.[images]' in the checkout\n"


@pytest.mark.parametrize(
    ("pillow", "why"),
    [
        (None, "images need Pillow, which is not installed: "),
        (BROKEN_PILLOW, "images need Pillow, which does not load (RuntimeError: built for another Python): "),
    ],
)
def test_a_pillow_that_does_not_load_is_an_error_that_says_how_to_install_it(
    pillow: ModuleType | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not pillow_trouble()
    file = encoded(picture(3, 2))
    monkeypatch.setitem(sys.modules, "PIL", pillow)  # type: ignore[arg-type]  # None: no such module
    assert pillow_trouble() == why + how_to_get("images")
    with pytest.raises(ImageError, match=re.escape(why)):
        decode(file, Bounds())
