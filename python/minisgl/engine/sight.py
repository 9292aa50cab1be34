"""Whether the CPU engine sees with a model: its vision tower and its image processor, or the reason why it reads text
only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.images import Processor, read_processor
from minisgl.models.architectures import is_multimodal, is_vision_tensor
from minisgl.models.config import ModelConfig
from minisgl.models.towers import FAMILIES, Tower, find_tower
from minisgl.utils.installed import how_to_get, missing
from minisgl.weights.stored import stored_tensors, weight_files


class Sight(NamedTuple):
    """The tower and the processor of a model; None if it reads text only. `reason`: why, if it has a vision part."""

    tower: Tower | None = None
    processor: Processor | None = None
    reason: str = ""

    def line(self) -> str:
        """Return what the start and `minisgl doctor` report; empty for a text model."""
        if self.reason:
            return f"text only: the vision part is not loaded: {self.reason}"
        if self.tower is None:
            return ""
        if missing("PIL"):
            return f"images: refused: Pillow is not installed: {how_to_get('images')}"
        return f"images: the vision tower has {self.tower.layers.num_layers} layers"


def find_sight(source: Path, folder: Path, raw: Mapping[str, Any], model: ModelConfig, *, dummy: bool) -> Sight:
    """Find the tower and the processor of the model at `source`, whose files of text are in `folder`. `dummy`: there
    are no weights. Raises `ConfigError` if they are damaged."""
    if not (is_multimodal(model.architecture) or model.other_half):
        return Sight()
    if not source.is_dir():
        return Sight(reason="that of a GGUF file is not supported")
    if model.packing is not None:
        return Sight(reason="that of a quantized folder is not supported")
    if model.architecture not in FAMILIES:
        return Sight(reason=f"that of {model.architecture} is not supported")
    if (processor := read_processor(folder, max_tokens=1)) is None:
        return Sight(reason="preprocessor_config.json is missing, or its image_processor_type is not supported")
    if (tower := find_tower(raw, model)) is None:
        return Sight(reason="config.json has no vision_config")
    if not dummy and not any(
        is_vision_tensor(one.name) for file in weight_files(folder) for one in stored_tensors(file)
    ):
        return Sight(reason="its tensors are missing")
    return Sight(tower, processor)
