"""Finds the vision tower and the image processor of a model, or the reason why it reads text only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.config import ConfigError
from minisgl.images import Processor, pillow_trouble, read_processor
from minisgl.models.architectures import is_multimodal, is_vision_tensor
from minisgl.models.config import ModelConfig, load_config, read_config
from minisgl.models.towers import FAMILIES, Tower, find_tower
from minisgl.weights.gguf_folder import NO_TOWER, seeing_folder, tower_file
from minisgl.weights.stored import stored_tensors, weight_files


class Sight(NamedTuple):
    """The tower and the processor of a model; None if it reads text only. `reason`: why, if it has a vision part.
    `weights`: the folder or GGUF file with the tower's tensors, of `num_bytes`."""

    tower: Tower | None = None
    processor: Processor | None = None
    reason: str = ""
    weights: Path | None = None
    num_bytes: int = 0

    def line(self) -> str:
        """Return what the start and `minisgl doctor` report; empty for a text model."""
        if self.reason:
            return f"text only: the vision part is not loaded: {self.reason}"
        if self.tower is None:
            return ""
        if trouble := pillow_trouble():
            return f"text only: {trouble}"
        file = f", from {self.weights.name}" if self.weights is not None and self.weights.is_file() else ""
        size = f", {self.num_bytes / 2**20:.0f} MiB" if self.num_bytes >= 2**20 else ""
        return f"images: the vision tower has {self.tower.layers.num_layers} layers{size}{file}"


def sight_at(source: Path, *, dummy: bool) -> Sight:
    """Find the tower and the processor of the model at `source`. Raises `ConfigError`."""
    folder, reason = described(source, None)
    return find_sight(source, folder, read_config(folder)[0], load_config(folder), dummy=dummy, reason=reason)


def described(source: Path, mmproj: str | None, *, own_tokenizer: bool = True) -> tuple[Path, str]:
    """Return the folder with the config and the tokenizer of the model at `source`, and why it does not describe a
    tower, if a flag or a file decides that. `mmproj`: the flag. Raises `ConfigError`."""
    if not source.is_dir():
        return seeing_folder(source, mmproj, own_tokenizer=own_tokenizer)
    if mmproj not in (None, NO_TOWER):
        raise ConfigError(f"--mmproj {mmproj}: must be left out, or {NO_TOWER}: a folder has its own vision tower")
    return source, "" if mmproj is None else f"--mmproj {mmproj}"


def find_sight(
    source: Path, folder: Path, raw: Mapping[str, Any], model: ModelConfig, *, dummy: bool, reason: str = ""
) -> Sight:
    """Find the tower and the processor of the model at `source`, whose files of text are in `folder`. `dummy`: there
    are no weights. `reason`: that of `described`. Raises `ConfigError` if they are damaged."""
    if reason:
        return Sight(reason=reason)
    if not (is_multimodal(model.architecture) or model.other_half):
        return Sight()
    if (weights := source if source.is_dir() else tower_file(folder)) is None:
        return Sight(reason="a GGUF model's must be in a file of its own: name it by --mmproj")
    if model.architecture not in FAMILIES:
        return Sight(reason=f"that of {model.architecture} is not supported")
    try:
        processor, tower = read_processor(folder, max_tokens=1), find_tower(raw, model)
    except ConfigError as error:
        if source.is_dir():
            raise
        raise ConfigError(f"{weights.name}: {error}") from error
    if processor is None:
        return Sight(reason="preprocessor_config.json is missing, or its image_processor_type is not supported")
    if tower is None:
        return Sight(reason="config.json has no vision_config")
    if dummy:
        return Sight(tower, processor, weights=weights)
    num_bytes = weights.stat().st_size if weights.is_file() else _tensor_bytes(folder)
    if not num_bytes:
        return Sight(reason="its tensors are missing")
    return Sight(tower, processor, weights=weights, num_bytes=num_bytes)


def _tensor_bytes(folder: Path) -> int:
    """Return the bytes of the vision tower's tensors in a folder of safetensors."""
    tensors = (one for file in weight_files(folder) for one in stored_tensors(file))
    return sum(one.nbytes for one in tensors if is_vision_tensor(one.name))


def image_fields(tower: Tower | None) -> dict[str, Any]:
    """Return the fields of `EngineInfo` about images."""
    if tower is None:
        return {}
    return {"sees": True, "patch_bytes": tower.patch_bytes, "patches_per_side": tower.patches.merge}
