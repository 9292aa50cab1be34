"""Adapters of a torch model: their ids, and the adapter of each request slot.

Invariants: a step computes with the adapters that its rows were assigned, all rows of a step in one forward.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.engine.adapters import find_adapter
from minisgl.engine.api import SlotAssignment
from minisgl.models.api import Model
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.step import Int32Array, Int64Array

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""LoRA factors by layer name: A and scale * B, float32."""


class TorchAdapters:
    def __init__(self, model: Model, num_slots: int) -> None:
        self._native = model if isinstance(model, Decoder) else None
        self._by_slot = np.zeros(num_slots, np.int64)
        self._numbers: set[int] = set()

    @property
    def _model(self) -> Decoder:
        if self._native is None:
            raise ConfigError("adapters: they need native layers: use --model-impl native")
        return self._native

    @property
    def config(self) -> ModelConfig:
        """The model's configuration. Raises `ConfigError` if the model does not support adapters."""
        return self._model.config

    def assign(self, assignment: SlotAssignment) -> None:
        self._by_slot[assignment.slot] = assignment.sampling.adapter

    def of_tokens(self, slots: Int32Array, extend_lens: Int32Array) -> Int64Array | None:
        """Return the adapter id of each token, 0 for none; None if no token has an adapter."""
        if not self._numbers and not self._by_slot.any():
            return None
        by_row = self._by_slot[slots]
        return np.repeat(by_row, extend_lens) if by_row.any() else None

    def prepare(self, by_token: Int64Array | None, device: torch.device) -> None:
        """Set the adapters for the forward of these tokens. Raises `RuntimeError` if one is not loaded."""
        if by_token is None:
            if self._native is not None:
                self._native.adapter_rows.clear()
            return
        if missing := set(by_token.tolist()) - self._numbers - {0}:
            raise RuntimeError(f"adapter {missing.pop()} is not there")
        self._model.adapter_rows.set(by_token, device)

    def read(self, folder: str) -> Pairs:
        """Read the adapter in `folder`: A and scaled B by layer. Raises `ConfigError` or `OSError`."""
        factors = find_adapter(folder, self.config).read()
        return {name: (torch.from_numpy(a), torch.from_numpy(b)) for name, (a, b) in factors.items()}

    def add(self, number: int, pairs: Pairs) -> None:
        self._model.put_adapter(number, pairs)
        self._numbers.add(number)

    def remove(self, number: int) -> None:
        self._model.drop_adapter(number)
        self._numbers.discard(number)
