"""Descriptions of vision towers: what of config.json is read, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl.config import ConfigError
from minisgl.models.config import load_config, parse_config, read_config
from minisgl.models.towers import Tower, find_tower, with_images
from tests.helpers.vision import gemma, idefics3, saved, seer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(seer(), tmp_path_factory.mktemp("seer"))


def tower_of(folder: Path, **vision: Any) -> Tower | None:
    raw = read_config(folder)[0]
    changed = raw | {"vision_config": {**raw["vision_config"], **vision}}
    return find_tower(changed, load_config(folder))


def test_a_tower_is_an_encoder_of_patches(folder: Path) -> None:
    tower = tower_of(folder)
    assert tower is not None and tower.patch_bytes == 3 * 4 * 4
    assert (tower.layers.num_layers, tower.layers.both_ways, tower.patches.taps) == (3, True, (0, 2))
    assert tower.layers.rope_axes == (1, 1, 1, 1, 2, 2, 2, 2), "half of the pairs by the row, half by the column"
    settings = tower.settings()
    assert settings["names"]["names"]["qkv"][:2] == [f"{p}visual.blocks.{{layer}}.attn.qkv" for p in ("model.", "")]
    half = settings["model"]["inverse_frequencies"][0][:4]
    assert settings["model"]["inverse_frequencies"] == [half + half]


@pytest.mark.parametrize(
    ("sections", "axes"),
    [([4, 2, 2], (0, 1, 2, 0, 1, 2, 0, 0)), ([2, 3, 3], (0, 1, 2, 0, 1, 2, 0, 1)), ([8, 0, 0], (0,) * 8)],
)
def test_axes_take_turns_until_a_section_is_used_up(folder: Path, sections: list[int], axes: tuple[int, ...]) -> None:
    raw, tower = read_config(folder)[0], tower_of(folder)
    raw["text_config"]["rope_parameters"]["mrope_section"] = sections
    assert tower is not None
    model = with_images(load_config(folder), raw, tower)
    assert model.deep_features == 2
    assert model.rope_axes == axes


@pytest.mark.parametrize("sections", [[4, 2], [4, 2, 3]])
def test_sections_that_do_not_fit_a_head_are_refused(folder: Path, sections: list[int]) -> None:
    raw, tower = read_config(folder)[0], tower_of(folder)
    raw["text_config"]["rope_parameters"]["mrope_section"] = sections
    assert tower is not None
    with pytest.raises(ConfigError, match=r"mrope_section: .* must be three numbers with the sum 8"):
        with_images(load_config(folder), raw, tower)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "silu"}, "hidden_act: 'silu' is not supported"),
        ({"in_channels": 4}, "in_channels: 4 is not supported"),
        ({"out_hidden_size": 64}, "out_hidden_size: 64: must be 48"),
        ({"num_heads": 3}, "num_heads: 3: must divide hidden_size 32 by fours"),
        ({"num_position_embeddings": 35}, "num_position_embeddings: 35: must be a square"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type: 'yarn' is not supported"),
        ({"depth": None}, "vision_config: int"),
    ],
)
def test_towers_that_we_cannot_compute_are_refused(folder: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tower_of(folder, **changes)


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(gemma(), tmp_path_factory.mktemp("gemma"))


def test_gemmas_tower_averages_blocks_of_patches(pooled: Path) -> None:
    tower = tower_of(pooled)
    assert tower is not None and tower.both_ways and tower.out_size == 48
    assert (tower.patches.side, tower.patches.merge, tower.layers.ropes, tower.layers.last_norm) == (8, 2, (), True)
    model = load_config(pooled)
    assert with_images(model, read_config(pooled)[0], tower) == model, "positions have one axis"
    names = tower.settings()["names"]["names"]
    assert "vision_tower.vision_model.post_layernorm" in names["norm"] and "up" in names and "merger_up" not in names


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"num_channels": 1}, "num_channels: 1 is not supported"),
        ({"num_attention_heads": 5}, "3 layers of 5 heads and 48 values, .* heads divide hidden_size"),
        ({"patch_size": 0}, "patches of 0: must be 1 at least"),
        ({"image_size": 34}, "mm_tokens_per_image: 16: must be a square that divides 8 x 8"),
        ({"image_size": 24}, "mm_tokens_per_image: 16: must be a square that divides 6 x 6"),
        ({"image_size": None}, "vision_config: int"),
    ],
)
def test_towers_of_gemma_that_we_cannot_compute_are_refused(pooled: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tower_of(pooled, **changes)


def test_a_number_of_tokens_that_is_no_square_is_refused(pooled: Path) -> None:
    for tokens in (0, -4, 8):
        with pytest.raises(ConfigError, match=f"mm_tokens_per_image: {tokens}: must be a square"):
            find_tower(read_config(pooled)[0] | {"mm_tokens_per_image": tokens}, load_config(pooled))


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(idefics3(), tmp_path_factory.mktemp("idefics3"))


def test_the_tower_of_idefics_3_joins_blocks_of_patches(joined: Path) -> None:
    raw, model = read_config(joined)[0], load_config(joined)
    tower = tower_of(joined)
    assert tower is not None and not tower.both_ways and tower.out_size == 48
    assert (tower.patches.side, tower.patches.merge, tower.layers.ropes, tower.layers.last_norm) == (8, 2, (), True)
    assert with_images(model, raw, tower) == model, "positions have one axis"
    text = {name: one for name, one in raw["text_config"].items() if name != "num_attention_heads"}
    assert parse_config(raw | {"text_config": text | {"hidden_size": 2048}}).num_heads == 32, "the class's own"
    few = {"image_size": 512, "patch_size": 16, "hidden_size": 768, "num_attention_heads": 12}
    published = find_tower(raw | {"vision_config": few, "scale_factor": 4}, model)
    assert published is not None and (published.patches.side, published.patches.merge) == (32, 4)
    assert (published.layers.num_layers, published.layers.intermediate_sizes[0]) == (12, 3072), "the class's own"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scale_factor": 3}, "scale_factor: 3: must divide 8, the patches in a row of a tile"),
        ({"scale_factor": 0}, "scale_factor: 0: must divide 8"),
        ({"vision_config": {"image_size": 16, "patch_size": 32}}, "scale_factor: 2: must divide 0"),
    ],
)
def test_towers_of_idefics_3_that_we_cannot_compute_are_refused(
    joined: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        find_tower(read_config(joined)[0] | changes, load_config(joined))
