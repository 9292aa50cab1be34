"""Markers of a prompt become the virtual ids of its images."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.images import PreparedImage, Tile, expand
from minisgl.prompt_image import digest_of, virtual_ids

MARKER = 7


def tile(num_tokens: int, seed: int = 0) -> Tile:
    pixels = bytes((seed,)) * num_tokens * 4
    return Tile(digest_of("tiny", (2, 2 * num_tokens), pixels), (2, 2 * num_tokens), num_tokens, pixels)


def prepared(num_tokens: int, seed: int = 0) -> PreparedImage:
    return PreparedImage((tile(num_tokens, seed),))


@pytest.mark.parametrize("places", [(), (0,), (5,), (0, 1), (2, 3, 5), (0, 5), (0, 1, 2, 3, 4, 5)])
def test_each_marker_becomes_the_ids_of_its_image(places: tuple[int, ...]) -> None:
    ids = np.array([MARKER if at in places else 100 + at for at in range(6)], np.int32)
    images = [tile(at + 1, at) for at in range(len(places))]
    expected, queue = list[int](), list(images)
    for token in ids.tolist():
        expected += virtual_ids((one := queue.pop(0)).digest, one.num_tokens).tolist() if token == MARKER else [token]
    cut = [PreparedImage(tuple(images[:2])), *(PreparedImage((one,)) for one in images[2:])]  # two tiles, then one each
    found, where = expand(ids, MARKER, cut)
    assert found.tolist() == expected and found.dtype == np.int32
    assert [(one.digest, one.grid, one.num_tokens, one.pixels) for one in where] == [
        (one.digest, one.grid, one.num_tokens, one.pixels) for one in images
    ]
    for placed in where:
        own = virtual_ids(placed.digest, placed.num_tokens)
        assert found[placed.start : placed.start + placed.num_tokens].tolist() == own.tolist()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_markers_is_an_error_with_both_numbers(count: int) -> None:
    ids = np.array([1, MARKER, MARKER, 2], np.int32)
    with pytest.raises(ValueError, match=rf"2 image markers \(token 7\) for {count} images"):
        expand(ids, MARKER, [prepared(2)] * count)


def test_the_same_image_has_the_same_ids_and_one_pixel_changes_all_of_them() -> None:
    ids = np.array([MARKER, MARKER, MARKER], np.int32)
    found, _ = expand(ids, MARKER, [prepared(64, 1), prepared(64, 1), prepared(64, 2)])
    first, second, third = np.split(found, 3)
    assert np.array_equal(first, second) and not np.any(first == third)
