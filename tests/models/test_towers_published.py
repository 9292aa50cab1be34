"""Vision towers of published models, by their configs: no weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl import envs
from minisgl.images import read_processor
from minisgl.models.config import load_config, read_config
from minisgl.models.towers import find_tower, with_images

PUBLISHED = {"qwen3.8-27b": ((), 248056, [11, 11, 10]), "qwen3-vl-embedding-8b": ((8, 16, 24), 151655, [24, 20, 20])}
"""Folders of `MINISGL_DATA/vision`, with the tower's taps, the marker of an image, and RoPE pairs by axis."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_tower_of_a_published_model_is_found(name: str) -> None:
    folder = (envs.data_dir() or Path()) / "vision" / name
    if not folder.is_dir():
        pytest.skip(f"MINISGL_DATA has no vision/{name}")
    taps, marker, pairs = PUBLISHED[name]
    raw, model, processor = read_config(folder)[0], load_config(folder), read_processor(folder, max_tokens=1024)
    tower = find_tower(raw, model)
    assert tower is not None and processor is not None and processor.marker_id == marker
    layers, patches = tower.layers, tower.patches
    assert (layers.num_layers, layers.head_dim, tower.out_size) == (27, 72, model.hidden_size)
    assert (patches.size, patches.merge, patches.side, patches.taps) == (16, 2, 48, taps)
    axes = with_images(model, raw, tower).rope_axes
    assert [axes.count(axis) for axis in range(3)] == pairs
