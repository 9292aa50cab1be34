"""The Protocol of a model for the torch engine, and the result of loading one.

Invariants: K and V pass through `attend` alone, once a layer, in ascending order; everything else that a forward needs
is in the weights, the ids and their positions, so that the tokens of a step may belong to many sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minisgl.attention import LayerAttention

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of a layer, (layer, q [n, heads, k_dim], k [n, kv_heads, k_dim], v [n, kv_heads, v_dim]) -> [n, heads,
v_dim], stores k and v of these tokens, then attends causally within each row, as `Model.attention[layer]` says."""


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The images of a step as a model reads them. `axes` [3, n] int64 are the positions of all n tokens in time, rows
    and columns. `features` [m, width] belong to the tokens with the indices `tokens` [m] int64: the embedding, then
    what is added after each of the first layers."""

    axes: Tensor
    tokens: Tensor
    features: Tensor


class Model(Protocol):
    """A model with loaded weights. All ranks of a group call its methods in the same order."""

    @property
    def attention(self) -> Sequence[LayerAttention]:
        """Attention parameters by layer, for this rank's heads."""

    @property
    def graph_obstacle(self) -> str:
        """Reason why a CUDA graph cannot capture `forward`; empty if it can."""

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute the final hidden states [n, hidden size] of ids [n] int64 at positions [n] int64, for `logits`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, vocab_size] float32 from hidden states [n, hidden size]. Only rank 0 gets valid ones."""

    def warm_up(self) -> None:
        """Compile every kernel that `forward` may run for any number of tokens: no step may wait for a compiler."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A loaded model and its properties. `dtype` is a key of `dtypes.DTYPES`, `why` the reason for the choice."""

    model: Model
    architecture: str
    vocab_size: int
    context_len: int
    eos_ids: tuple[int, ...]
    dtype: str
    why: str
    details: str = ""  # description for logs, as in `EngineInfo`
