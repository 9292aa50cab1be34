"""What is behind pooled hidden numbers: the dense layers that sentence-transformers keeps in folders of their own, and
the heads of cross encoders, which make a score of two texts.

Invariants: a layer that is not computed is refused by the name of its file or tensor; torch is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minisgl.config import ConfigError
from minisgl.weights.stored import Stored, stored_tensors, weight_files

Step = tuple[str, bytes, bytes, float]
"""Kind, weight, bias and epsilon, as `CpuEngine.set_heads` of the extension takes them; numbers are float32."""
Raw = Mapping[str, Any]
CLASSIFIES = "ForSequenceClassification"
_ACTIVATIONS: dict[str, list[Step]] = {
    "identity": [],
    "tanh": [("tanh", b"", b"", 0.0)],
    "gelu": [("gelu", b"", b"", 0.0)],
}


class Heads(NamedTuple):
    """`score`: the pooling that it wants, and its steps; None: the model gives no scores."""

    embedding: list[Step]
    score: tuple[str, list[Step]] | None


NO_HEADS = Heads([], None)


class _Tensors:
    """Of one folder, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Stored] = {
            one.name: one for file in weight_files(folder) for one in stored_tensors(file)
        }

    def linear(self, name: str) -> Step:
        return ("linear", self.data(f"{name}.weight"), self.data(f"{name}.bias", missing=b""), 0.0)

    def data(self, name: str, missing: bytes | None = None) -> bytes:
        """float32, as little-endian bytes."""
        if (found := self._known.get(name)) is None:
            if missing is None:
                raise ConfigError(f"{self._folder.name}: no tensor {name}: its head is not whole")
            return missing
        return bytes(np.ascontiguousarray(found.read(), "<f4").tobytes())


def read_heads(folder: Path, architecture: str, raw: Raw) -> Heads:
    """`raw`: config.json. Raises `ConfigError`."""
    make = next((make for name, make in _SCORES.items() if architecture == f"{name}{CLASSIFIES}"), None)
    return Heads(_dense_layers(folder), None if make is None else make(_Tensors(folder), raw))


def _dense_layers(folder: Path) -> list[Step]:
    """Those that modules.json names behind the pooling."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    steps: list[Step] = []
    for path in _dense_folders(file):
        place = folder / path / "config.json"
        try:
            raw = json.loads(place.read_text(encoding="utf-8"))
            name = str(raw.get("activation_function", "torch.nn.modules.activation.Tanh"))
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path}/config.json: {error!r}") from error
        if (then := _ACTIVATIONS.get(name.rpartition(".")[2].lower())) is None:
            raise ConfigError(f"{path}/config.json: activation_function: {name} is not supported")
        steps += [_Tensors(folder / path).linear("linear"), *then]
    return steps


def _dense_folders(file: Path) -> list[str]:
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        return [str(one["path"]) for one in modules if str(one["type"]).rpartition(".")[2] == "Dense"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file.name}: {error!r}") from error


def _bert(tensors: _Tensors, raw: Raw) -> tuple[str, list[Step]]:
    return "cls", [tensors.linear("bert.pooler.dense"), *_ACTIVATIONS["tanh"], tensors.linear("classifier")]


def _roberta(tensors: _Tensors, raw: Raw) -> tuple[str, list[Step]]:
    first, last = tensors.linear("classifier.dense"), tensors.linear("classifier.out_proj")
    return "cls", [first, *_ACTIVATIONS["tanh"], last]


def _modern_bert(tensors: _Tensors, raw: Raw) -> tuple[str, list[Step]]:
    if (name := raw.get("classifier_activation") or "gelu") != "gelu":
        raise ConfigError(f"config.json: classifier_activation: {name!r} is not supported: only gelu")
    if (pooling := raw.get("classifier_pooling") or "cls") not in ("cls", "mean"):
        raise ConfigError(f"config.json: classifier_pooling: {pooling!r} is not supported: only cls and mean")
    weight, bias = tensors.data("head.norm.weight"), tensors.data("head.norm.bias", missing=b"")
    norm: Step = ("layer_norm", weight, bias, float(raw.get("norm_eps", 1e-5)))
    return pooling, [tensors.linear("head.dense"), *_ACTIVATIONS["gelu"], norm, tensors.linear("classifier")]


_SCORES: dict[str, Callable[[_Tensors, Raw], tuple[str, list[Step]]]] = {
    "Bert": _bert,
    "Roberta": _roberta,
    "XLMRoberta": _roberta,
    "MPNet": _roberta,
    "ModernBert": _modern_bert,
}
"""By the architecture before `CLASSIFIES`."""
