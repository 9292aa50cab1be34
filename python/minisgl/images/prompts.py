"""Prompts with images: each marker of a template becomes the virtual ids of its image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl.images.processors import PreparedImage
from minisgl.prompt_image import PromptImage, virtual_ids
from minisgl.step import Int32Array


def expand(
    ids: Int32Array, marker_id: int, images: Sequence[PreparedImage]
) -> tuple[Int32Array, tuple[PromptImage, ...]]:
    """Replace the k-th marker of a prompt by the virtual ids of tile k of the images, and return the tiles with their
    places. Raises `ValueError` if the prompt has another number of markers than the images have tiles."""
    markers, tiles = np.flatnonzero(ids == marker_id), [tile for image in images for tile in image.tiles]
    if len(markers) != len(tiles):
        of_tiles = f" of {len(tiles)} tiles" if len(tiles) != len(images) else ""
        found = f"the prompt has {len(markers)} image markers (token {marker_id})"
        raise ValueError(f"{found} for {len(images)} images{of_tiles}")
    pieces, places, done, length = list[Int32Array](), list[PromptImage](), 0, 0
    for marker, tile in zip(markers.tolist(), tiles, strict=True):
        start = length + marker - done
        pieces += (ids[done:marker], virtual_ids(tile.digest, tile.num_tokens))
        places.append(PromptImage(tile.digest, start, tile.num_tokens, tile.grid, tile.pixels))
        done, length = marker + 1, start + tile.num_tokens
    return np.concatenate([*pieces, ids[done:]]).astype(np.int32, copy=False), tuple(places)
