"""Images in the torch engine: the vision tower is transformers' own module, its features are kept by digest, and each
step gets the features and the axes of its tokens.

Invariants: all methods run in the thread that launches steps; features stay while somebody holds them, and the least
recently used ones beyond `CACHE_BYTES` are dropped; a tower that fails gives NaN, so that its rows alone fail.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.engine.api import ImageCounts, SlotAssignment
from minisgl.engine.sight import Sight
from minisgl.models.api import Seen
from minisgl.prompt_image import PromptImage
from minisgl.step import Int32Array

_log = logging.getLogger("minisgl.engine")
CACHE_BYTES = 256 * 2**20  # of features that no request holds
Axes = npt.NDArray[np.int64]


class TorchTower:
    """A vision tower with its weights."""

    def __init__(self, module: Any, sight: Sight, dtype: torch.dtype, device: torch.device) -> None:
        assert sight.tower is not None and sight.processor is not None
        self.patches = sight.tower.patches
        self.width = (1 + len(self.patches.taps)) * sight.tower.out_size
        self.patch_bytes = sight.tower.patch_bytes
        self._module = module.to(device=device, dtype=dtype).eval()
        self._table = torch.from_numpy(sight.processor.table.copy()).to(device)
        self._dtype, self._device = dtype, device

    def tokens_of(self, image: PromptImage) -> tuple[int, int]:
        """Return the rows and columns of an image's tokens."""
        rows, columns = (side // self.patches.merge for side in image.grid)
        return rows, columns

    def features(self, image: PromptImage) -> Tensor:
        """Return an image's features [tokens, width]: embeddings, then what is added after each of the first layers."""
        size = self.patches.size
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).to(self._device)
        by_channel = pixels.view(-1, 3, size * size).long()
        values = torch.stack([self._table[channel][by_channel[:, channel]] for channel in range(3)], 1)
        frames = values.unsqueeze(2).expand(-1, -1, self.patches.frames, -1).reshape(len(values), -1)
        grid = torch.tensor([(1, *image.grid)], device=self._device)
        out = self._module(frames.to(self._dtype), grid)
        merged, deep = (out.pooler_output, out.deepstack_features) if hasattr(out, "pooler_output") else out[:2]
        return torch.cat((merged, *deep), 1)


def load_tower(
    folder: Path, raw: Mapping[str, Any], sight: Sight, dtype: torch.dtype, device: torch.device, *, dummy: bool
) -> TorchTower:
    """Load the tower of Qwen3-VL from the safetensors of `folder`, whose config.json is `raw`. Raises `ConfigError`."""
    import transformers
    from safetensors import safe_open
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    from minisgl.weights.stored import weight_files

    config = transformers.models.qwen3_vl.configuration_qwen3_vl.Qwen3VLVisionConfig(**raw["vision_config"])
    with torch.random.fork_rng(devices=[]):
        module = Qwen3VLVisionModel._from_config(config, attn_implementation="sdpa")
    if not dummy:
        found = dict[str, Tensor]()
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as tensors:
                names = [name for name in tensors.keys() if name.startswith(("visual.", "model.visual."))]  # noqa: SIM118
                found |= {name.partition("visual.")[2]: tensors.get_tensor(name) for name in names}
        try:
            module.load_state_dict(found)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{folder.name}: the vision tower: {reason}") from error
    return TorchTower(module, sight, dtype, device)


@dataclass(slots=True)
class _Place:
    image: PromptImage
    tokens: tuple[int, int]  # rows and columns
    features: Tensor | None = None  # until a chunk ends behind the image

    @property
    def end(self) -> int:
        return self.image.start + self.image.num_tokens

    @property
    def shift(self) -> int:
        """Return by how much positions after the image exceed their place on the axes."""
        return self.image.num_tokens - max(self.tokens)


@dataclass(slots=True)
class _Step:
    """The parts of a `Seen`, one of each by row."""

    axes: list[Axes]
    tokens: list[npt.NDArray[np.int64]]
    features: list[Tensor]


class TorchSight:
    """The images of an engine's slots. `shifts` [slots] int64 is on the device: how far the position of a slot's
    generated tokens lies before their place in the sequence."""

    def __init__(self, tower: TorchTower, slots: int, device: torch.device) -> None:
        self._tower = tower
        self._device = device
        self._places = dict[int, list[_Place]]()  # by slot, if it has images
        self._held = weakref.WeakValueDictionary[bytes, Tensor]()  # all that anybody holds, also `_kept`
        self._kept = OrderedDict[bytes, Tensor]()  # the least recently used first
        self._kept_bytes = 0
        self._runs = self._hits = 0
        self.shifts = torch.zeros(slots, dtype=torch.int64, device=device)

    def counts(self) -> ImageCounts:
        """Return the counters. Any thread may call it."""
        refs = self._held.valuerefs()  # a copy: iterating over `values()` would fail if a tower ends meanwhile
        sizes = [one.nbytes for ref in refs if (one := ref()) is not None]
        return ImageCounts(self._runs, self._hits, len(sizes), sum(sizes))

    def is_full(self) -> bool:
        """Return whether requests hold more features than the cache may keep."""
        return self.counts().num_bytes > CACHE_BYTES

    def change(self, freed: Sequence[int], assignments: Sequence[SlotAssignment]) -> None:
        """Forget the images of freed slots, and take those of new requests."""
        for slot in (*freed, *(one.slot for one in assignments)):
            self._places.pop(slot, None)
        for one in assignments:
            if one.images:
                self._places[one.slot] = [
                    _Place(image, self._tower.tokens_of(image), self._held.get(image.digest)) for image in one.images
                ]

    def are_behind(self, slots: Int32Array, seq_lens: Int32Array) -> bool:
        """Return true if the last token of each row follows all images of its slot, so that `shifts` apply to it."""
        rows = zip(slots.tolist(), seq_lens.tolist(), strict=True)
        return all(place.end < length for slot, length in rows for place in self._places.get(slot, ()))

    def apply(self, slots: Tensor, assignments: Sequence[SlotAssignment]) -> None:
        """Set `shifts` of the slots [n] of new requests, in the forward stream."""
        shifts = [sum(place.shift for place in self._places.get(one.slot, ())) for one in assignments]
        self.shifts[slots] = torch.tensor(shifts).to(self._device)

    def features_of(self, image: PromptImage) -> Tensor:
        """Return an image's features. They are NaN if the tower fails."""
        if (found := self._held.get(image.digest)) is not None:
            self._hits += 1
            self._keep(image.digest, found)
            return found
        self._runs += 1
        try:
            with torch.inference_mode():
                features = self._tower.features(image)
        except (RuntimeError, MemoryError, ValueError, TypeError) as error:
            _log.warning("the vision tower failed: %s", str(error).partition("\n")[0])
            shape = (image.num_tokens, self._tower.width)
            return torch.full(shape, float("nan"), device=self._device)
        self._held[image.digest] = features
        self._keep(image.digest, features)
        return features

    def _keep(self, digest: bytes, features: Tensor) -> None:
        if digest not in self._kept:
            self._kept_bytes += features.nbytes
        self._kept[digest] = features
        self._kept.move_to_end(digest)
        while self._kept_bytes > CACHE_BYTES:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes

    def for_step(
        self, slots: Int32Array, seq_lens: Int32Array, extend_lens: Int32Array, positions: Int32Array
    ) -> Seen | None:
        """Return the axes of a step's tokens and the features of those that are of images; None if no slot of the step
        has images. Runs the tower for features that nobody holds."""
        if not self._places or self._places.keys().isdisjoint(slots.tolist()):
            return None
        step, first = _Step([], [], []), 0
        for slot, end, length in zip(slots.tolist(), seq_lens.tolist(), extend_lens.tolist(), strict=True):
            self._row(step, self._places.get(slot, []), positions[first : first + length].astype(np.int64), first, end)
            first += length
        width = self._tower.width
        features = torch.cat(step.features) if step.features else torch.empty(0, width, device=self._device)
        tokens = np.concatenate([np.empty(0, np.int64), *step.tokens])
        return Seen(
            torch.from_numpy(np.concatenate(step.axes, 1)).to(self._device),
            torch.from_numpy(tokens).to(self._device),
            features,
        )

    def _row(
        self, step: _Step, places: Sequence[_Place], positions: npt.NDArray[np.int64], first: int, end: int
    ) -> None:
        """Add a row to `step`: its tokens are at `positions` of its sequence, which has `end` tokens, and begin with
        the step's token `first`."""
        begin, shift = end - len(positions), 0
        axes = np.tile(positions, (3, 1))
        for place in places:
            image = place.image
            low, high = max(begin, image.start), min(end, place.end)
            if low < high:
                at = np.arange(low, high) - image.start
                own = image.start - shift
                inside = slice(low - begin, high - begin)
                axes[:, inside] = own + np.stack([0 * at, at // place.tokens[1], at % place.tokens[1]])
                step.tokens.append(np.arange(first + low - begin, first + high - begin))
                if place.features is None:
                    place.features = self.features_of(image)
                step.features.append(place.features[at[0] : at[-1] + 1])
            if place.end <= end:
                place.features = None
            shift += place.shift
            axes[:, positions >= place.end] -= place.shift
        step.axes.append(axes)
