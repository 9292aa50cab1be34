"""Adapters as engines see them: what an engine that knows them can do, and which folder fits a model.

Invariants: torch is not imported; what does not fit is one error that names the first tensor, before anything changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from minisgl.config import ConfigError
from minisgl.models.adaptable import adaptable, why_not
from minisgl.models.architectures import own_name
from minisgl.models.config import ModelConfig
from minisgl.weights.adapter import WEIGHTS, Adapter, Pair, load_adapter


@runtime_checkable
class Adapts(Protocol):
    """An engine that knows adapters. Requests name them by number, in their `SamplingParams`."""

    def read_adapter(self, folder: str) -> Any:
        """For `add_adapter`; in any thread, and nothing has changed yet. Raises `ConfigError`, `OSError`."""

    def add_adapter(self, number: int, adapter: Any) -> None:
        """For launches from now on."""

    def remove_adapter(self, number: int) -> None:
        """No launch from now on names it."""


def find_adapter(folder: str, model: ModelConfig) -> Adapter:
    """One whose layers, by the model's own names, and sizes are the model's. Raises `ConfigError`."""
    found = load_adapter(Path(folder))
    layers, pairs = adaptable(model), dict[str, Pair]()
    for stored, pair in found.pairs.items():
        name = (own_name(model.architecture, f"{stored}.weight") or stored).removesuffix(".weight")
        if name not in layers:
            raise ConfigError(f"{WEIGHTS}: {pair.a.name}: {why_not(model, name)}")
        if pair.sizes != layers[name]:
            own, wanted = (" x ".join(map(str, sizes)) for sizes in (pair.sizes, layers[name]))
            raise ConfigError(f"{WEIGHTS}: {pair.a.name}: is for a layer of {own} (in x out), the model's is {wanted}")
        pairs[name] = pair
    return Adapter(found.file, pairs)
