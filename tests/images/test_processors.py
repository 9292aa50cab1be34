"""Patches and sizes are those of transformers' processors, and folders are read or refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from minisgl.config import ConfigError
from minisgl.images import ImageError, Processor, Tile, processors, read_processor
from minisgl.prompt_image import digest_of
from tests.helpers.image_files import GEMMA3, GEMMA3_MODEL, QWEN3, QWEN3_MODEL, encoded, exif, model_folder, picture

CAP = 1024
CLIP = {  # Qwen2-VL's own numbers
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
}
CLIP_MODEL = {"model_type": "qwen2_vl", "image_token_id": 3, "vision_config": {"spatial_merge_size": 2}}
SMOL = {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 1536}}
SMOL_MODEL = {"image_token_id": 3, "scale_factor": 3, "vision_config": {"image_size": 384, "patch_size": 14}}
TOKENS = ("<fake_token_around_image>", "<image>", "<global-img>")
SIZES = ((1, 1), (200, 1), (1, 200), (31, 33), (64, 64), (480, 640), (2000, 300), (1024, 1024), (1100, 1020))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    return read(model_folder(tmp_path_factory.mktemp("qwen")))


def read(folder: Path, max_tokens: int = CAP) -> Processor:
    found = read_processor(folder, max_tokens=max_tokens)
    assert found is not None
    return found


def one_tile(processor: Processor, image: Image.Image | bytes, max_tokens: int | None = None) -> Tile:
    """Return the only tile of a prepared image, which leaves the text of the chat template as it is."""
    prepared = processor.prepare(image, max_tokens=max_tokens)
    [tile] = prepared.tiles
    assert (prepared.num_tokens, prepared.num_bytes) == (tile.num_tokens, len(tile.pixels))
    return tile


def values(processor: Processor, tile: Tile) -> np.ndarray[Any, Any]:
    """Return what a tower reads: float32 [patches, 3, patch * patch]."""
    pixels = np.frombuffer(tile.pixels, np.uint8).reshape(tile.grid[0] * tile.grid[1], 3, -1)
    found: np.ndarray[Any, Any] = processor.table[np.arange(3)[:, None], pixels]
    return found


def assert_equal_to_qwen(processor: Processor, theirs: Any, image: Image.Image, max_tokens: int) -> None:
    edge = processor.family.patch * processor.family.merge
    size = {"shortest_edge": theirs.size["shortest_edge"], "longest_edge": max_tokens * edge**2}
    size["longest_edge"] = min(size["longest_edge"], theirs.size["longest_edge"])
    expected = theirs(image.convert("RGB"), size=size, return_tensors="np")
    prepared = one_tile(processor, encoded(image))
    assert [[1, *prepared.grid]] == expected["image_grid_thw"].tolist()
    assert prepared.num_tokens == prepared.grid[0] * prepared.grid[1] // 4 <= max_tokens
    frames = expected["pixel_values"].reshape(-1, 3, 2, processor.family.patch**2)
    for frame in range(2):
        assert values(processor, prepared).tobytes() == np.ascontiguousarray(frames[:, :, frame]).tobytes()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_pixels_equal_transformers_to_the_bit(qwen: Processor, width: int, height: int) -> None:
    assert_equal_to_qwen(qwen, Qwen2VLImageProcessorPil(**QWEN3), picture(width, height, 1), CAP)


@pytest.mark.slow
def test_pixels_of_many_sizes_equal_transformers_to_the_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for settings_, model in ((QWEN3, QWEN3_MODEL), (CLIP, CLIP_MODEL)):
        for seed in range(100):
            processor = read(model_folder(tmp_path, settings_, model), cap := int(rng.integers(200, 2000)))
            long = int(2 ** rng.uniform(0, 11))
            short = max(-(-long // 200), int(long * rng.uniform()))
            width, height = rng.permutation((long, short)).tolist()
            mode = ("RGB", "L", "P", "RGBA")[seed % 4]
            assert_equal_to_qwen(
                processor, Qwen2VLImageProcessorPil(**settings_), picture(width, height, seed, mode), cap
            )


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "I;16"])
def test_pixels_of_each_kind_of_picture_equal_transformers_to_the_bit(qwen: Processor, mode: str) -> None:
    assert_equal_to_qwen(qwen, Qwen2VLImageProcessorPil(**QWEN3), picture(90, 50, 2, mode), CAP)


def test_numbers_that_a_file_leaves_out_are_those_of_the_class(tmp_path: Path) -> None:
    processor = read(model_folder(tmp_path, CLIP, CLIP_MODEL))
    assert_equal_to_qwen(processor, Qwen2VLImageProcessorPil(**CLIP), picture(300, 200, 3), CAP)
    bare = {"image_processor_type": "Qwen2VLImageProcessorPil"}
    processor = read(model_folder(tmp_path, bare, CLIP_MODEL), 5000)
    assert_equal_to_qwen(processor, Qwen2VLImageProcessorPil(), picture(2000, 1000, 3), 5000)


@pytest.mark.parametrize(
    "changes",
    [
        {"do_rescale": False},
        {"do_normalize": False},
        {"rescale_factor": 0.01, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.9, 0.8, 0.7]},
        {"resample": 2},
    ],
)
def test_each_number_of_the_file_counts(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = {"image_token_id": 7, "vision_config": {"depth": 2}}
    processor = read(model_folder(tmp_path, QWEN3 | changes, model))
    assert_equal_to_qwen(processor, Qwen2VLImageProcessorPil(**QWEN3 | changes), picture(120, 77, 4), CAP)


@pytest.mark.parametrize(("width", "height"), [(200, 150), (61, 300), (1500, 900)])
def test_pixels_are_within_a_step_of_the_torch_backend(qwen: Processor, width: int, height: int) -> None:
    """Torchvision's resize of bytes is `interpolate`, and it rescales and normalises in one operation. As transformers'
    own two backends they differ by one of 255 steps in few values, and by two in hardly any."""
    image = picture(width, height, 6)
    prepared = one_tile(qwen, image)
    size = [16 * side for side in prepared.grid]
    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(tensor, size=size, mode="bicubic", antialias=True)
    mean, std = torch.full((3, 1, 1), 0.5) * 255, torch.full((3, 1, 1), 0.5) * 255
    theirs = ((resized[0].float() - mean) / std).reshape(3, size[0] // 32, 2, 16, size[1] // 32, 2, 16)
    theirs = theirs.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, 256)
    steps = np.abs(values(qwen, prepared) - theirs.numpy()) * 127.5
    assert steps.max() < 2.001 and np.mean(steps > 0.001) < 0.01 and np.mean(steps > 1.001) < 1e-4


@given(long=st.integers(1, 30_000), ratio=st.floats(1, 201), lying=st.booleans(), cap=st.integers(200, 16_384))
@settings(max_examples=1000, deadline=None)
def test_sizes_are_those_of_transformers_and_fit_the_limit(long: int, ratio: float, lying: bool, cap: int) -> None:
    short = max(1, int(long / ratio))
    height, width = (short, long) if lying else (long, short)
    rule = partial(processors.smart_resize, factor=32, min_pixels=65_536, max_pixels=16_777_216)
    try:
        expected = smart_resize(height, width, 32, 65_536, min(16_777_216, cap * 1024))
    except ValueError:
        with pytest.raises(ImageError, match="one side is over 200 times the other"):
            rule(height, width, cap)
        return
    assert rule(height, width, cap) == expected
    assert expected[0] * expected[1] <= cap * 1024


@given(long=st.integers(1, 3000), ratio=st.floats(1, 200), cap=st.integers(1, 200))
@settings(max_examples=300, deadline=None)
def test_a_low_limit_holds_or_says_how_many_tokens_it_would_be(long: int, ratio: float, cap: int) -> None:
    try:
        rows, columns = processors.smart_resize(
            long, max(1, round(long / ratio)), cap, factor=32, min_pixels=65_536, max_pixels=16_777_216
        )
    except ImageError as error:
        assert f"the limit is {cap}" in str(error) or "over 200 times" in str(error)
    else:
        assert 1 <= rows * columns // 1024 <= cap and rows % 32 == columns % 32 == 0


def test_a_limit_below_the_smallest_size_makes_that_smaller(qwen: Processor) -> None:
    assert one_tile(qwen, encoded(picture(1, 1)), max_tokens=16).grid == (8, 8)
    assert one_tile(qwen, encoded(picture(1, 1))).grid == (16, 16)


def test_a_request_lowers_the_limit_and_cannot_raise_it(qwen: Processor) -> None:
    data = encoded(picture(1500, 1500))
    assert qwen.prepare(data).num_tokens == qwen.prepare(data, max_tokens=5000).num_tokens == 1024
    assert qwen.prepare(data, max_tokens=256).num_tokens == 256


def test_the_digest_is_of_kind_grid_and_pixels(qwen: Processor, tmp_path: Path) -> None:
    image = picture(64, 64)
    first = one_tile(qwen, encoded(image))
    assert first.digest == digest_of(qwen.kind, first.grid, first.pixels)
    assert first == one_tile(qwen, encoded(image, "WEBP", lossless=True)) == one_tile(qwen, image)
    image.putpixel((5, 5), (0, 0, 0))
    assert one_tile(qwen, encoded(image)).digest != first.digest
    turned = one_tile(qwen, encoded(picture(64, 96), exif=exif(6)))
    assert turned.grid[::-1] == one_tile(qwen, encoded(picture(64, 96))).grid
    changes = (
        {"image_mean": [0.5, 0.5, 0.4]},
        {"image_std": [0.5, 0.4, 0.5]},
        {"temporal_patch_size": 1},
        {"merge_size": 1},
    )
    kinds = {
        read(model_folder(tmp_path, QWEN3 | one, {"image_token_id": 7, "vision_config": {"depth": 2}})).kind
        for one in changes
    }
    assert len(kinds | {qwen.kind}) == 5


def test_a_processor_is_the_same_for_all_threads(qwen: Processor) -> None:
    with pytest.raises(ValueError, match="read-only"):
        qwen.table[0, 0] = 1
    with pytest.raises(AttributeError):
        qwen.kind = ""  # type: ignore[misc]
    assert qwen.marker_id == 7 and qwen.table.dtype == np.float32 and not qwen.family.marker


@pytest.mark.parametrize(("width", "height"), [(1, 1), (3000, 10), (640, 480), (896, 896)])
def test_gemmas_pixels_equal_transformers_to_the_bit(tmp_path: Path, width: int, height: int) -> None:
    processor, image = read(model_folder(tmp_path, GEMMA3, GEMMA3_MODEL)), picture(width, height, 8)
    prepared = one_tile(processor, encoded(image), max_tokens=100)
    expected = Gemma3ImageProcessorPil(**GEMMA3)(image, return_tensors="np")["pixel_values"][0]
    blocks = expected.reshape(3, 16, 4, 14, 16, 4, 14)  # the tower averages blocks of 4 x 4 patches
    patches = blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(4096, 3, 196)
    assert (prepared.grid, prepared.num_tokens, processor.max_tokens, processor.marker_id) == ((64, 64), 256, 256, 9)
    assert values(processor, prepared).tobytes() == np.ascontiguousarray(patches).tobytes()
    begin = "<start_of_image>"
    assert processor.family.marker == begin
    assert processor.prepare(image).text == f"\n\n{begin}<image_soft_token><end_of_image>\n\n"


def idefics3(path: Path, edge: int, tile: int, patch: int, merge: int, **more: Any) -> Path:
    processor = {"size": {"longest_edge": edge}, "max_image_size": {"longest_edge": tile}, **more}
    tower = {"image_size": tile, "patch_size": patch}
    model = {"image_token_id": 5, "scale_factor": merge, "vision_config": tower}
    return model_folder(path, {"image_processor_type": "SmolVLMImageProcessor"} | processor, model)


PUBLISHED = ((2048, 512, 16, 4), (1536, 384, 14, 3), (1456, 364, 14, 2))  # SmolVLM 256M, 2.2B, Idefics 3
OTHERS = ((1455, 364, 14, 2), (300, 364, 14, 2), (1000, 512, 16, 4))


@pytest.mark.parametrize("numbers", [*PUBLISHED, *OTHERS])
@pytest.mark.parametrize("splits", [True, False])
def test_tiles_equal_transformers_to_the_bit(tmp_path: Path, numbers: tuple[int, ...], splits: bool) -> None:
    edge, tile, patch, merge = numbers
    folder = idefics3(tmp_path, edge, tile, patch, merge, do_image_splitting=splits)
    processor, rows = read(folder, 1 << 20), tile // patch // merge
    theirs = Idefics3ImageProcessorPil(**json.loads((folder / "preprocessor_config.json").read_text()))
    for width, height in (
        (1, 1),
        (1, 700),
        (3000, 10),
        (33, 31),
        (640, 480),
        (tile - 1, tile + 1),
        (edge + 1, edge // 3),
    ):
        image = picture(width, height, 9)
        expected = theirs(image, return_tensors="np", return_row_col_info=True)
        prepared = processor.prepare(encoded(image))
        assert len(prepared.tiles) == expected["pixel_values"].shape[1]
        for one, pixels in zip(prepared.tiles, expected["pixel_values"][0], strict=True):
            side = rows * merge * patch  # the tower reads whole patches
            blocks = pixels[:, :side, :side].reshape(3, rows, merge, patch, rows, merge, patch)
            patches = blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, patch**2)
            assert (one.grid, one.num_tokens) == ((rows * merge, rows * merge), rows**2)
            assert values(processor, one).tobytes() == np.ascontiguousarray(patches).tobytes()
        text = (expected["rows"][0][0], expected["cols"][0][0], 1, *TOKENS)
        assert prepared.text == get_image_prompt_string(*text) and processor.family.marker == "<image>"


def test_a_narrow_picture_has_a_tile_however_sides_are_rounded(tmp_path: Path) -> None:
    processor = read(idefics3(tmp_path, 392, 392, 14, 2))  # 392 * (1 / 392) < 1
    assert one_tile(processor, picture(1, 3000)).grid == (28, 28)


def test_a_limit_of_tokens_makes_fewer_tiles(tmp_path: Path) -> None:
    processor = read(idefics3(tmp_path, 2048, 512, 16, 4))
    for limit, count in ((1 << 20, 17), (1024, 17), (1023, 10), (256, 5), (255, 1), (1, 1)):
        assert len(processor.prepare(picture(300, 300), max_tokens=limit).tiles) == count
    assert len(processor.prepare(picture(900, 300), max_tokens=255).tiles) == 4, "three of a row, and the whole"


def nested(folder: Path) -> None:
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": QWEN3 | {"patch_size": 16}}))
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN3 | {"patch_size": 1}))


def saved(folder: Path) -> None:
    Qwen2VLImageProcessorPil(**QWEN3).save_pretrained(folder)


@pytest.mark.parametrize("write", [nested, saved])
def test_a_folder_of_transformers_5_is_read(tmp_path: Path, qwen: Processor, write: Callable[[Path], None]) -> None:
    write(model_folder(tmp_path))
    assert read(tmp_path).kind == qwen.kind


@pytest.mark.parametrize(
    ("processor", "model"),
    [
        (QWEN3, {"model_type": "qwen3"}),
        (QWEN3, QWEN3_MODEL | {"vision_config": None}),
        (QWEN3 | {"image_processor_type": "PixtralImageProcessor"}, QWEN3_MODEL),
        ({"feature_extractor_type": "WhisperFeatureExtractor"}, QWEN3_MODEL),
    ],
)
def test_a_folder_without_a_processor_that_is_known_has_none(tmp_path: Path, processor: Any, model: Any) -> None:
    assert read_processor(model_folder(tmp_path, processor, model), max_tokens=CAP) is None


def test_a_folder_without_files_has_none(tmp_path: Path) -> None:
    assert read_processor(tmp_path, max_tokens=CAP) is None
    assert read_processor(tmp_path / "gone", max_tokens=CAP) is None
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert read_processor(tmp_path / "model.gguf", max_tokens=CAP) is None


@pytest.mark.parametrize(
    ("processor", "model", "reason"),
    [
        (QWEN3 | {"patch_size": "16"}, QWEN3_MODEL, "Expected `int | null`, got `str` - at `\\$.patch_size`"),
        (QWEN3 | {"patch_size": 0}, QWEN3_MODEL, "at `\\$.patch_size`"),
        (QWEN3 | {"patch_size": 14}, QWEN3_MODEL, "patch_size 14: must be 16"),
        (QWEN3 | {"merge_size": 4}, QWEN3_MODEL, "merge_size 4: must be 2"),
        (QWEN3 | {"temporal_patch_size": 1}, QWEN3_MODEL, "temporal_patch_size 1: must be 2"),
        (QWEN3 | {"size": {"height": 5}}, QWEN3_MODEL, "must have shortest_edge and longest_edge"),
        (QWEN3 | {"image_mean": [0.5]}, QWEN3_MODEL, "length >= 3"),
        (QWEN3 | {"image_std": [0, 1, 1]}, QWEN3_MODEL, "no zero in image_std"),
        (QWEN3 | {"do_resize": False}, QWEN3_MODEL, "not do_resize false"),
        (QWEN3, QWEN3_MODEL | {"image_token_id": None}, "must have an image_token_id"),
        (QWEN3, QWEN3_MODEL | {"image_token_id": -1}, "image_token_id"),
        (QWEN3, QWEN3_MODEL | {"vision_config": 5}, "vision_config"),
        (GEMMA3 | {"do_pan_and_scan": True}, GEMMA3_MODEL, "do_pan_and_scan true: must be false"),
        (GEMMA3 | {"size": {"height": 448, "width": 448}}, GEMMA3_MODEL, "size 448: must be 896"),
        (GEMMA3 | {"size": {"height": 896, "width": 448}}, GEMMA3_MODEL, "must be a square"),
        (GEMMA3, GEMMA3_MODEL | {"mm_tokens_per_image": 100}, "makes 100 tokens"),
        (SMOL, SMOL_MODEL, "max_image_size 364: must be 384"),
        (SMOL | {"max_image_size": {"longest_edge": 384}}, SMOL_MODEL | {"scale_factor": 5}, "squares of 5 x 5"),
        (SMOL | {"size": {"height": 8}}, SMOL_MODEL | {"vision_config": {"image_size": 364}}, "longest_edge of 4096"),
    ],
)
def test_a_damaged_folder_is_an_error_that_names_the_field(
    tmp_path: Path, processor: Any, model: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_processor(model_folder(tmp_path, processor, model), max_tokens=CAP)


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", "\ud800"])
def test_a_file_that_is_no_json_object_is_an_error_with_its_name(tmp_path: Path, file: str, text: str) -> None:
    (model_folder(tmp_path) / file).write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError, match=file):
        read_processor(tmp_path, max_tokens=CAP)
