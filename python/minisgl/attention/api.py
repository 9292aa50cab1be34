"""The interface of an attention backend.

Invariants: one `prepare` per step, then `attend` once per layer, ascending; all rows store before any row reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention parameters of one layer (with tensor parallelism: of one rank's heads)."""

    heads: int
    kv_heads: int
    k_dim: int  # of a query and of K
    v_dim: int  # of V and of the output
    window: int | None = None  # number of tokens that a token attends to, itself included; None: all
    scale: float | None = None  # of the products q k; None: k_dim ** -0.5
    softcap: float | None = None  # a score s becomes softcap * tanh(s / softcap); None: unchanged


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """The rows of a step on the device of the KV pool, int32: views that hold their values once its forward runs."""

    slots: Tensor  # [rows]
    seq_lens: Tensor  # [rows]
    kv_indptr: Tensor  # [rows + 1] prefix sums of pages per row
    out_loc: Tensor  # [tokens]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRows:
    """The rows of a step, on the host. The first `num_decode` rows have one token each."""

    num_decode: int
    slots: Int32Array  # [rows] row of the page table
    seq_lens: Int32Array  # [rows] tokens after the step
    extend_lens: Int32Array  # [rows] tokens in this step
    out_loc: Int32Array  # [tokens] pool slot of each token's K and V
    device: DeviceRows | None = None  # the rows on the device, if the engine provides them


class AttentionBackend(Protocol):
    graph_obstacle: ClassVar[str]
    """Reason why a CUDA graph cannot capture `attend` of one-token rows; empty if it can, at the sizes that the backend
    was made for. `attend` then reads the same addresses as at the capture; `prepare`, which is never captured, fills
    them before each replay."""

    def prepare(self, rows: AttentionRows, page_table: Tensor) -> None:
        """Prepare a step for all layers. `page_table` [slots, pages per request] int32 or int64 is up to date."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k [tokens, kv_heads, k_dim] and v [tokens, kv_heads, v_dim], then return the attention of q [tokens,
        heads, k_dim] as [tokens, heads, v_dim]; see `models.Attend`."""

    def read(self, layer: int, q: Tensor) -> Tensor:
        """Return the attention of q [tokens, heads, k_dim] after the step's K and V are stored, as by `attend`."""
