"""LoRA adapters in engines: the Protocol of an engine that supports them, and the check that an adapter fits a model.

Invariants: torch is not imported; an adapter that does not fit is one error that names the first such tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from minisgl.config import ConfigError
from minisgl.models.adaptable import adaptable_sizes, unsupported_reason
from minisgl.models.architectures import own_name
from minisgl.models.config import ModelConfig
from minisgl.weights.adapter import WEIGHTS, Adapter, Pair, load_adapter


@runtime_checkable
class Adapts(Protocol):
    """An engine that supports LoRA adapters. Requests name an adapter by its id, in `SamplingParams.adapter`."""

    def read_adapter(self, folder: str) -> Any:
        """Read an adapter's weights for `add_adapter`, in any thread; the engine's state does not change. Raises
        `ConfigError` if the adapter does not fit the model, `OSError` if a file cannot be read."""

    def add_adapter(self, number: int, adapter: Any) -> None:
        """Make `adapter` (a result of `read_adapter`) available to later launches under the id `number`."""

    def remove_adapter(self, number: int) -> None:
        """Remove the adapter with the id `number`. The caller guarantees that no later launch uses it."""


def find_adapter(folder: str, model: ModelConfig) -> Adapter:
    """Read the adapter in `folder`, by the model's own layer names. Raises `ConfigError` if it does not fit."""
    adapter = load_adapter(Path(folder))
    layers, pairs = adaptable_sizes(model), dict[str, Pair]()
    for stored, pair in adapter.pairs.items():
        name = (own_name(model.architecture, f"{stored}.weight") or stored).removesuffix(".weight")
        if name not in layers:
            raise ConfigError(f"{WEIGHTS}: {pair.a.name}: {unsupported_reason(model, name)}")
        if pair.sizes != layers[name]:
            own, wanted = (" x ".join(map(str, sizes)) for sizes in (pair.sizes, layers[name]))
            raise ConfigError(f"{WEIGHTS}: {pair.a.name}: is for a layer of {own} (in x out), the model's is {wanted}")
        pairs[name] = pair
    return Adapter(adapter.file, pairs)
