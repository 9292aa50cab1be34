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
    """Replace the k-th marker of a prompt by the virtual ids of image k, and return the images with their places.
    Raises `ValueError` if the prompt has another number of markers than there are images."""
    markers = np.flatnonzero(ids == marker_id)
    if len(markers) != len(images):
        raise ValueError(f"the prompt has {len(markers)} image markers (token {marker_id}) for {len(images)} images")
    pieces, places, done, length = list[Int32Array](), list[PromptImage](), 0, 0
    for marker, image in zip(markers.tolist(), images, strict=True):
        start = length + marker - done
        pieces += (ids[done:marker], virtual_ids(image.digest, image.num_tokens))
        places.append(PromptImage(image.digest, start, image.num_tokens, image.grid, image.pixels))
        done, length = marker + 1, start + image.num_tokens
    return np.concatenate([*pieces, ids[done:]]).astype(np.int32, copy=False), tuple(places)
