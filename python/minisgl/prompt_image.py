"""An image as part of a prompt: what travels from the server to the engine, and the ids that stand for it.

An image takes `num_tokens` positions of the prompt. Each has a virtual id, which depends on all pixels of the image and
on the position within it. So everything that compares ids (prefix cache, page store, failover) works for images as it
is, and two different images share no page.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from minisgl.step import Int32Array

DIGEST_BYTES = 32
FIRST_VIRTUAL_ID = 1 << 30
"""Virtual ids are at least this and below twice this. No tokenizer has ids that large."""


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt. `digest` (32 bytes) is of the kind of model, `grid` and `pixels`. `start` is the position
    of the first of its `num_tokens` virtual ids in the prompt. `grid` has the number of patches (rows, columns).
    `pixels` are the patches in the tower's order, uint8 [rows * columns, 3 * patch * patch], channel by channel."""

    digest: bytes
    start: int
    num_tokens: int
    grid: tuple[int, int]
    pixels: bytes


def digest_of(kind: str, grid: tuple[int, int], pixels: bytes) -> bytes:
    """Return the digest of an image as a tower of this kind reads it: 32 bytes of BLAKE2b."""
    head = f"{kind} {grid[0]} {grid[1]} ".encode()
    return hashlib.blake2b(head + pixels, digest_size=DIGEST_BYTES, person=b"minisgl image").digest()


def virtual_ids(digest: bytes, num_tokens: int) -> Int32Array:
    """Return the ids of an image's positions: 30 bits of SHAKE-256 of the digest for each."""
    drawn = np.frombuffer(hashlib.shake_256(digest).digest(4 * num_tokens), "<u4")
    return (drawn % FIRST_VIRTUAL_ID + FIRST_VIRTUAL_ID).astype(np.int32)
