"""A model's own sampling defaults: generation_config.json as fields of `SamplingParams`.

Invariants: the result passes `SamplingParams.check`; a missing file or field changes nothing, except for the embedded
model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minisgl.config import MODEL_SMOLLM2, ConfigError, GenerationConfig
from minisgl.sampling_params import ParamError, SamplingParams

FILE = "generation_config.json"
_HINT = "or use --generation-config none"
EMBEDDED: Mapping[str, Any] = {"temperature": 0.2, "top_p": 0.9}
"""Sampling defaults of the embedded model, from its model card; its GGUF file lacks them."""
_FIELDS: dict[str, tuple[str, type]] = {  # field of the file -> field and type of SamplingParams
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repetition_penalty", float),
    "max_new_tokens": ("max_tokens", int),
}


def read_defaults(model_dir: str | Path | None, choice: GenerationConfig, model: str) -> Mapping[str, Any]:
    """Return the defaults of `SamplingParams` fields that requests omit; empty for the choice `none`. `model` is the
    value of --model, `model_dir` the folder of its files. `do_sample` false means temperature 0, `top_k` 0 means all.
    Raises `ConfigError` for an invalid value."""
    if model_dir is None or choice == "none":
        return {}
    if model == MODEL_SMOLLM2 and not Path(model).exists():  # not a folder of that name
        return EMBEDDED
    file = Path(model_dir) / FILE
    if not file.is_file():
        return {}
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{FILE}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{FILE}: must be a JSON object")
    defaults = dict[str, Any]()
    for name, (field, kind) in _FIELDS.items():
        if (value := raw.get(name)) is not None:
            defaults[field] = _number(name, value, kind)
    if raw.get("do_sample") is False:
        defaults["temperature"] = 0.0
    if defaults.get("top_k") == 0:
        defaults["top_k"] = -1
    try:
        SamplingParams(**defaults).check()
    except ParamError as error:
        name = next(name for name, (field, _) in _FIELDS.items() if field == error.field)
        raise ConfigError(f"{FILE}: {name}: {error.reason}: correct it, {_HINT}") from error
    return defaults


def _number(name: str, value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and value % 1 != 0):
        raise ConfigError(f"{FILE}: {name}: {value!r} is no {'integer' if kind is int else 'number'}: {_HINT[3:]}")
    return kind(value)


def show_defaults(defaults: Mapping[str, Any]) -> str:
    """Return the defaults for the log, such as `temperature 0.6, top_p 0.9`."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())
