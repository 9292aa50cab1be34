"""Processors: how the image processor that a model folder describes turns pictures into patches of its vision tower.

`FAMILIES` has a row for each class of processor that transformers names in `preprocessor_config.json`.

Invariants: a processor is immutable, and one serves all threads. The patches are Pillow's pixels to the bit; `table`
has what transformers makes of each of their values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl.config import ConfigError
from minisgl.images.decode import decode, upright
from minisgl.images.heads import Bounds, ImageError
from minisgl.prompt_image import digest_of

if TYPE_CHECKING:
    from PIL.Image import Image

_LONGEST = 200  # the ratio of the sides at which Qwen's processor stops
_UNLIMITED = 1 << 31  # tokens
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 30)]
_Three = Annotated[list[float], msgspec.Meta(min_length=3, max_length=3)]


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of pixels as a vision tower reads it. `grid` has its patches (rows, columns), `pixels` is uint8
    [rows * columns, 3 * patch * patch] in the tower's order, each patch channel by channel; `digest` is of all that."""

    digest: bytes
    grid: tuple[int, int]
    num_tokens: int
    pixels: bytes


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as a model reads it: one tile, or several and last a tile of the whole. `text` replaces the chat
    template's marker before the prompt is tokenized, and has a marker for each tile; empty: the marker stays.
    `limited`: the limit of tokens made it smaller."""

    tiles: tuple[Tile, ...]
    text: str = ""
    limited: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(tile.num_tokens for tile in self.tiles)

    @property
    def num_bytes(self) -> int:
        return sum(len(tile.pixels) for tile in self.tiles)


Sizing = Callable[[int, int, int], list[tuple[int, int]]]
"""A rule that takes a picture's height and width and the limit of tokens, and returns the heights and widths to which
the picture is resized, one after the other. Raises `ImageError`."""


def smart_resize(
    height: int, width: int, max_tokens: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return Qwen's size: sides are multiples of `factor`, their ratio stays about the same, and the number of pixels
    lies between the two limits where it can. A token is a square of `factor`. Raises `ImageError`."""
    if max(height, width) > _LONGEST * min(height, width):
        raise ImageError(f"the image has {width} x {height} pixels: one side is over {_LONGEST} times the other")
    most = min(max_pixels, max_tokens * factor**2)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < (least := min(min_pixels, most)):
        grow = math.sqrt(least / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    if (tokens := rows * columns // factor**2) > max_tokens:  # a long picture and a low limit
        raise ImageError(
            f"the image has {width} x {height} pixels: it takes {tokens} tokens, the limit is {max_tokens}"
        )
    return rows, columns


def tile_sizes(height: int, width: int, max_tokens: int, *, edge: int, tile: int, tokens: int) -> list[tuple[int, int]]:
    """Return Idefics 3's sizes: the longer side becomes `edge`, then both sides become multiples of `tile`. `edge` is
    reduced until the tiles, of `tokens` each, fit `max_tokens`; the tile of the whole picture does not count."""
    first = second = (tile, tile)
    for longest in (*range(edge, tile, -tile), min(edge, tile)):
        ratio = width / height
        short = int(longest / ratio if width >= height else longest * ratio)
        first = _lying(longest, max(1, short + short % 2), width >= height)
        lying, ratio = first[1] >= first[0], first[1] / first[0]
        long = math.ceil(max(first) / tile) * tile
        second = _lying(long, math.ceil(max(1, int(long / ratio if lying else long * ratio)) / tile) * tile, lying)
        if second[0] * second[1] // tile**2 * tokens <= max_tokens:
            break
    return [first, second]


def _lying(long: int, short: int, lying: bool) -> tuple[int, int]:
    """Return the height and the width of a picture with these sides."""
    return (short, long) if lying else (long, short)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A class of processors with the numbers of one folder. Patches of `patch` x `patch` pixels stand together in
    squares of `merge` x `merge`. `tile`: the side of the squares into which larger pictures are cut. `marker`: the text
    of the chat template that stands for an image; `text` makes what replaces it of the rows and columns of tiles."""

    numbers: tuple[str | int, ...]  # its name, and what changes pixels or positions
    sizing: Sizing
    patch: int
    merge: int
    patches_per_token: int
    num_tokens: int | None = None  # of every image
    tile: int | None = None
    marker: str = ""
    text: Callable[[int, int], str] = lambda rows, columns: ""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: int  # Pillow's number of a filter


@dataclass(frozen=True, slots=True, eq=False)
class Processor:
    """The image processor of one model folder. `kind` has the family and all numbers that change pixels or positions;
    `table` (float32 [3, 256]) has what the tower reads for each value of a pixel, by channel. `marker_id` is the token
    that a prompt has once for each image, `max_tokens` the limit of an image."""

    kind: str
    table: npt.NDArray[np.float32] = field(repr=False)
    marker_id: int
    max_tokens: int
    resample: int
    family: Family

    def prepare(
        self, data: bytes | Image, *, bounds: Bounds | None = None, max_tokens: int | None = None
    ) -> PreparedImage:
        """Decode an image (or take a picture of Pillow's), resize it, and cut it into patches. `max_tokens` lowers the
        limit. Raises `ImageError`. It takes milliseconds to seconds: not for an event loop."""
        bounds = bounds or Bounds()
        picture = decode(data, bounds) if isinstance(data, bytes) else upright(data, bounds)
        limit = self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens)
        sizes = self.family.sizing(picture.height, picture.width, limit)
        limited = sizes != self.family.sizing(picture.height, picture.width, _UNLIMITED)
        for height, width in sizes:
            picture = picture.resize((width, height), self.resample)
        whole, side = np.asarray(picture), self.family.tile
        if side is None or max(picture.size) <= side:
            return PreparedImage((self._tile(whole),), self.family.text(0, 0), limited)
        rows, columns = picture.height // side, picture.width // side
        places = [(row * side, column * side) for row in range(rows) for column in range(columns)]
        cut = [self._tile(whole[top : top + side, left : left + side]) for top, left in places]
        cut.append(self._tile(np.asarray(picture.resize((side, side), self.resample))))
        return PreparedImage(tuple(cut), self.family.text(rows, columns), limited)

    def _tile(self, pixels: npt.NDArray[np.uint8]) -> Tile:
        """Cut pixels [height, width, 3] into patches. Those behind the last whole patch are left out."""
        patch, merge = self.family.patch, self.family.merge
        grid, square = (pixels.shape[0] // patch, pixels.shape[1] // patch), patch * merge
        pixels = pixels[: grid[0] * patch, : grid[1] * patch]
        parts = pixels.reshape(pixels.shape[0] // square, merge, patch, pixels.shape[1] // square, merge, patch, 3)
        patches = parts.transpose(0, 3, 1, 4, 6, 2, 5).tobytes()
        num_tokens = grid[0] * grid[1] // self.family.patches_per_token
        return Tile(digest_of(self.kind, grid, patches), grid, num_tokens, patches)


class _Settings(msgspec.Struct, frozen=True):
    """Fields of a processor's file. None: the class of the processor decides, as for null in transformers."""

    do_resize: bool | None = None
    do_rescale: bool | None = None
    do_normalize: bool | None = None
    do_pan_and_scan: bool | None = None
    do_image_splitting: bool | None = None
    max_image_size: dict[str, _Count] | None = None
    resample: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    rescale_factor: float | None = None
    image_mean: _Three | None = None
    image_std: _Three | None = None
    size: dict[str, _Count] | None = None
    min_pixels: _Count | None = None
    max_pixels: _Count | None = None
    patch_size: _Count | None = None
    merge_size: _Count | None = None
    temporal_patch_size: _Count | None = None

    def table(self, mean: Sequence[float], std: Sequence[float]) -> npt.NDArray[np.float32]:
        """Return what transformers makes of 0 to 255 by channel. `mean` and `std` are those of the class."""
        values = np.arange(256, dtype=np.float64)
        if self.do_rescale is not False:
            values *= 1 / 255 if self.rescale_factor is None else self.rescale_factor
        table = np.repeat(values.astype(np.float32)[:, None], 3, axis=1)
        if self.do_normalize is not False:
            table -= np.array(self.image_mean or mean, np.float32)
            table /= np.array(self.image_std or std, np.float32)
        table = np.ascontiguousarray(table.T)
        table.setflags(write=False)
        return table


class _Vision(msgspec.Struct, frozen=True):
    """The part of `config.json` about the vision tower."""

    patch_size: _Count | None = None
    spatial_merge_size: _Count | None = None
    temporal_patch_size: _Count | None = None
    image_size: _Count | None = None


class _Model(msgspec.Struct, frozen=True):
    """The parts of `config.json` that concern images. The marker has one of two names."""

    vision_config: _Vision
    image_token_id: _Id | None = None
    image_token_index: _Id | None = None
    mm_tokens_per_image: _Count = 256
    scale_factor: _Count = 2


def _qwen(settings: _Settings, model: _Model, folder: Path) -> Family:
    """Qwen2-VL's processor, which Qwen3-VL and Qwen3.5 use with other numbers."""
    patch, merge, temporal = settings.patch_size or 14, settings.merge_size or 2, settings.temporal_patch_size or 2
    tower = model.vision_config
    _agree("patch_size", patch, tower.patch_size)
    _agree("merge_size", merge, tower.spatial_merge_size)
    _agree("temporal_patch_size", temporal, tower.temporal_patch_size)
    size = settings.size or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    least, most = settings.min_pixels or size.get("shortest_edge"), settings.max_pixels or size.get("longest_edge")
    if least is None or most is None:
        raise ConfigError(f"size {size}: must have shortest_edge and longest_edge")
    return Family(
        numbers=("qwen2vl", patch, merge, temporal),
        sizing=lambda *size: [smart_resize(*size, factor=patch * merge, min_pixels=least, max_pixels=most)],
        patch=patch,
        merge=merge,
        patches_per_token=merge**2,
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        resample=3,
    )


def _gemma3(settings: _Settings, model: _Model, folder: Path) -> Family:
    """Gemma 3's processor without pan and scan. The tower averages squares of patches to a fixed number of tokens."""
    if settings.do_pan_and_scan:
        raise ConfigError("do_pan_and_scan true: must be false, crops of an image are not supported")
    size, tokens = settings.size or {"height": 224, "width": 224}, model.mm_tokens_per_image
    patch, height, width = model.vision_config.patch_size or 14, size.get("height", 0), size.get("width", 0)
    _agree("size", height, model.vision_config.image_size)
    across = math.isqrt(tokens)  # tokens a side
    if height != width or height % patch or across**2 != tokens or height // patch % across:
        raise ConfigError(f"size {size}: must be a square of patches of {patch} pixels that makes {tokens} tokens")
    names = _read(folder / "tokenizer_config.json") or {}
    begin = names.get("boi_token") or "<start_of_image>"
    soft, end = names.get("image_token") or "<image_soft_token>", names.get("eoi_token") or "<end_of_image>"
    return Family(
        numbers=("gemma3", patch, tokens),
        sizing=lambda *_: [(height, width)],
        patch=patch,
        merge=height // patch // across,
        patches_per_token=(height // patch // across) ** 2,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        resample=2,
        num_tokens=tokens,
        marker=begin,
        text=lambda *_: f"\n\n{begin}{soft}{end}\n\n",
    )


def _idefics3(settings: _Settings, model: _Model, folder: Path) -> Family:
    """Idefics 3's processor, which SmolVLM uses with other numbers."""
    size, largest = settings.size or {"longest_edge": 4 * 364}, settings.max_image_size or {"longest_edge": 364}
    edge, tile = size.get("longest_edge", 0), largest.get("longest_edge", 0)
    patch, merge = model.vision_config.patch_size or 32, model.scale_factor
    side = model.vision_config.image_size or 224
    _agree("max_image_size", tile, side)
    if not 0 < edge <= 4096 or tile // patch % merge or tile < patch:
        need = f"longest_edge of 4096 at most, and of squares of {merge} x {merge} patches of {patch} pixels"
        raise ConfigError(f"size {size}, max_image_size {largest}: must have a {need}")
    tokens, splits = (tile // patch // merge) ** 2, settings.do_image_splitting is not False

    def sizing(height: int, width: int, limit: int) -> list[tuple[int, int]]:
        if splits:
            return tile_sizes(height, width, limit, edge=edge, tile=tile, tokens=tokens)
        return [tile_sizes(height, width, _UNLIMITED, edge=edge, tile=tile, tokens=tokens)[0], (tile, tile)]

    return Family(
        numbers=("idefics3", patch, merge),
        sizing=sizing,
        patch=patch,
        merge=merge,
        patches_per_token=merge**2,
        tile=tile,
        marker=_IMAGE,
        text=_text_of_tiles,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        resample=1,
    )


_IMAGE, _FAKE = "<image>", "<fake_token_around_image>"


def _text_of_tiles(rows: int, columns: int) -> str:
    """Return the text of an image of Idefics 3 that is cut into tiles, which is that of its processor."""
    line = "".join(f"{_FAKE}<row_{{0}}_col_{column + 1}>{_IMAGE}" for column in range(columns)) + "\n"
    tiles = "".join(line.format(row + 1) for row in range(rows))
    return f"{tiles}{chr(10) if rows else ''}{_FAKE}<global-img>{_IMAGE}{_FAKE}"


FAMILIES: dict[str, Callable[[_Settings, _Model, Path], Family]] = {
    "Qwen2VLImageProcessor": _qwen,
    "Gemma3ImageProcessor": _gemma3,
    "Idefics3ImageProcessor": _idefics3,
    "SmolVLMImageProcessor": _idefics3,
}
"""Classes of image processors, without the endings `Fast` and `Pil` of other backends."""


def read_processor(model_dir: Path, *, max_tokens: int) -> Processor | None:
    """Return the image processor of a model folder, None if it describes none, or one that is not in `FAMILIES`.
    `max_tokens` limits the tokens of an image. Raises `ConfigError` if the files are damaged or disagree."""
    config = _read(model_dir / "config.json")
    described = (_read(model_dir / "processor_config.json") or {}).get("image_processor")
    described = described or _read(model_dir / "preprocessor_config.json")
    if not isinstance(described, dict) or not config or not config.get("vision_config"):
        return None
    name = str(described.get("image_processor_type")).removesuffix("Fast").removesuffix("Pil")
    if name not in FAMILIES:
        return None
    try:
        settings, model = msgspec.convert(described, _Settings), msgspec.convert(config, _Model)
        marker = model.image_token_index if model.image_token_id is None else model.image_token_id
        if marker is None or settings.do_resize is False or 0 in (settings.image_std or ()):
            raise ConfigError("it must have an image_token_id, not do_resize false, and no zero in image_std")
        family = FAMILIES[name](settings, model, model_dir)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"the image processor of {model_dir}: {error}") from error
    table = settings.table(family.mean, family.std)
    return Processor(
        kind=" ".join([*map(str, family.numbers), table[:, [0, 255]].tobytes().hex()]),  # the ends fix mean and std
        table=table,
        marker_id=marker,
        max_tokens=family.num_tokens or max_tokens,
        resample=family.resample if settings.resample is None else settings.resample,
        family=family,
    )


def _agree(name: str, value: int, tower: int | None) -> None:
    """Raise `ConfigError` if a processor and its tower name different numbers."""
    if tower is not None and value != tower:
        raise ConfigError(f"{name} {value}: must be {tower} as in the vision_config of config.json")


def _read(file: Path) -> dict[str, Any] | None:
    """Return the object of a JSON file, None if there is no such file. Raises `ConfigError`."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: must be a JSON object")
    return found
