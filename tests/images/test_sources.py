"""Data URLs, files and bytes become what a processor takes."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

import pytest

from minisgl.images import Bounds, ImageError, data_url, load
from minisgl.images.sources import SLICE
from tests.helpers.image_files import encoded, picture

FILE = encoded(picture(3, 2))
TEXT = base64.b64encode(FILE).decode()


@pytest.mark.parametrize("head", ["data:image/png", "DATA:image/PNG", "data:image/svg+xml", "data:image/jpeg", "data:"])
def test_a_data_url_becomes_its_bytes(head: str) -> None:
    assert data_url(f"{head};base64,{TEXT}") == load(f"{head};base64,{TEXT}") == data_url(TEXT) == FILE


@pytest.mark.parametrize("num_bytes", [SLICE // 4 * 3 - 1, SLICE // 4 * 3, SLICE * 2 + 1])
def test_long_base64_is_decoded_in_slices(num_bytes: int) -> None:
    data = bytes(num_bytes - 1) + b"e"
    text = base64.b64encode(data).decode()
    assert data_url(text) == data_url(f"data:;base64,{text}") == data
    with pytest.raises(ImageError, match="padding at character"):
        data_url(base64.b64encode(bytes(SLICE // 4 * 3 - 1)).decode() + text)


@pytest.mark.parametrize(
    "url",
    [
        "http://a.example/a.png",
        "file:///etc/passwd",
        "data:",
        f"data:,{TEXT}",
        f"data:image/png,{TEXT}",
        f"data:image/png;charset=utf-8;base64,{TEXT}",
        f"data:image/{'x' * 80};base64,{TEXT}",
    ],
)
def test_another_url_is_refused_by_its_beginning(url: str) -> None:
    with pytest.raises(ImageError, match="must begin with data:image/png;base64,"):
        data_url(url)


@pytest.mark.parametrize(
    "body", ["a", "ab", "a===", "****", "ab\ncd", f"{TEXT} ", "YWJj-_==", " YWJj", "é" * 4, "%3D%3D"]
)
def test_invalid_base64_is_refused(body: str) -> None:
    with pytest.raises(ImageError, match="no valid base64"):
        data_url(f"data:image/png;base64,{body}")


def test_more_bytes_than_the_bound_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    exactly = Bounds(max_bytes=len(FILE))
    assert data_url(f"data:image/png;base64,{TEXT}", exactly) == FILE
    monkeypatch.setattr(binascii, "a2b_base64", None)
    with pytest.raises(ImageError, match=f"{len(FILE)} bytes, more than the limit of {len(FILE) - 1}"):
        data_url(f"data:image/png;base64,{TEXT}", Bounds(max_bytes=len(FILE) - 1))


def test_a_device_is_not_read() -> None:
    with pytest.raises(ImageError, match="is no regular file"):
        load("/dev/zero")


def test_files_bytes_and_pictures_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(FILE)
    drawn = picture(2, 2)
    assert load(tmp_path / "a.png") == load(str(tmp_path / "a.png")) == load(FILE) == FILE
    assert load(drawn) is drawn
    with pytest.raises(ImageError, match="more than the limit of 9"):
        load(tmp_path / "a.png", Bounds(max_bytes=9))
    for wrong in (tmp_path, tmp_path / "b.png", "a\0b"):
        with pytest.raises(ImageError, match="cannot be read"):
            load(wrong)
    with pytest.raises(ImageError, match="fetch a web address first"):
        load("https://a.example/a.png")
