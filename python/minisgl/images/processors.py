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
from functools import partial
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
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 30)]
_Three = Annotated[list[float], msgspec.Meta(min_length=3, max_length=3)]


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as a vision tower reads it. `grid` has its patches (rows, columns), `pixels` is uint8 [rows * columns,
    3 * patch * patch] in the tower's order, each patch channel by channel; `digest` is of all of that."""

    digest: bytes
    grid: tuple[int, int]
    num_tokens: int
    pixels: bytes


Sizing = Callable[[int, int, int], tuple[int, int]]
"""A rule that takes a picture's height and width and the limit of tokens, and returns the height and width to which the
picture is resized. Raises `ImageError`."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A class of processors with the numbers of one folder. Patches of `patch` x `patch` pixels stand together in
    squares of `merge` x `merge`. `rewrite`: text of the chat template, and what replaces it before it is tokenized."""

    numbers: tuple[str | int, ...]  # its name, and what changes pixels or positions
    sizing: Sizing
    patch: int
    merge: int
    patches_per_token: int
    num_tokens: int | None = None  # of every image
    rewrite: tuple[str, str] | None = None
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
        family, patch, merge = self.family, self.family.patch, self.family.merge
        height, width = family.sizing(picture.height, picture.width, limit)
        pixels = np.asarray(picture.resize((width, height), self.resample))
        grid, square = (height // patch, width // patch), patch * merge
        parts = pixels.reshape(height // square, merge, patch, width // square, merge, patch, 3)
        patches = parts.transpose(0, 3, 1, 4, 6, 2, 5).tobytes()
        num_tokens = grid[0] * grid[1] // family.patches_per_token
        return PreparedImage(digest_of(self.kind, grid, patches), grid, num_tokens, patches)


class _Settings(msgspec.Struct, frozen=True):
    """Fields of a processor's file. None: the class of the processor decides, as for null in transformers."""

    do_resize: bool | None = None
    do_rescale: bool | None = None
    do_normalize: bool | None = None
    do_pan_and_scan: bool | None = None
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
        sizing=partial(smart_resize, factor=patch * merge, min_pixels=least, max_pixels=most),
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
        sizing=lambda *_: (height, width),
        patch=patch,
        merge=height // patch // across,
        patches_per_token=(height // patch // across) ** 2,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        resample=2,
        num_tokens=tokens,
        rewrite=(begin, f"\n\n{begin}{soft}{end}\n\n"),
    )


FAMILIES: dict[str, Callable[[_Settings, _Model, Path], Family]] = {
    "Qwen2VLImageProcessor": _qwen,
    "Gemma3ImageProcessor": _gemma3,
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
