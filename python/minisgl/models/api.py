"""The protocol of a model for the torch engine, and what loading gives it, whoever wrote the layers.

Invariants: K and V pass through `attend` alone, once a layer, in ascending order; whatever else a forward needs is in
the weights, the ids and their positions, so that the tokens of a step may be of many sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minisgl.attention import LayerAttention

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [n, heads, k_dim], k [n, kv_heads, k_dim], v [n, kv_heads, v_dim]) -> [n, heads, v_dim]: stores k and
v of these tokens, then attends causally over each token's row, in the way of `Model.attention[layer]`."""


class Model(Protocol):
    """Its weights are there. All ranks of a group call it alike."""

    @property
    def attention(self) -> Sequence[LayerAttention]:
        """By layer, on this rank."""

    @property
    def graph_obstacle(self) -> str:
        """Why a CUDA graph cannot hold `forward`; empty: it can."""

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[n] int64 ids at [n] int64 positions -> [n, hidden size], as `logits` takes them."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden size] -> [n, vocab_size] float32, on rank 0."""

    def warm_up(self) -> None:
        """Compile what `forward` may run at some number of tokens, so that no step waits for a compiler."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """`dtype` is a name of `dtypes.DTYPES`, chosen because of `why`."""

    model: Model
    architecture: str
    vocab_size: int
    context_len: int
    eos_ids: tuple[int, ...]
    dtype: str
    why: str
    details: str = ""  # for people, as those of `EngineInfo`
