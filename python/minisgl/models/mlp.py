"""The token-wise part of a decoder layer: an MLP, or routed experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.distributed import Group, Shard, ShardRange
from minisgl.kernels.ops import route
from minisgl.layers.experts import Experts
from minisgl.layers.linear import Linear, RowLinear
from minisgl.models.architectures import MoeConfig
from minisgl.models.config import ModelConfig


class Mlp:
    """A gated MLP, down(activation(gate(x)) * up(x)) (Shazeer 2020), sharded over the ranks of a group."""

    def __init__(self, config: ModelConfig, name: str, dtype: torch.dtype, device: torch.device, group: Group) -> None:
        inner = ShardRange.of(config.intermediate_size, group.rank, group.size)
        self._size = inner.length
        self._is_gelu = config.activation == "gelu"
        self._gate_up = Linear(
            config.hidden_size,
            {f"{name}.gate_proj": inner, f"{name}.up_proj": inner},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )
        self._down = RowLinear(
            group,
            inner,
            f"{name}.down_proj",
            config.hidden_size,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )

    def __call__(self, x: Tensor) -> Tensor:
        both = self._gate_up(x)
        gate = both[:, : self._size]
        gate = F.gelu(gate, approximate="tanh") if self._is_gelu else F.silu(gate)
        return self._down(gate.mul_(both[:, self._size :]))

    def pack(self) -> None:
        self._gate_up.pack()
        self._down.pack()

    def warm_up(self) -> None:
        """Do nothing: an MLP has no kernels to compile."""

    def checkpoint(self) -> dict[str, Tensor]:
        return self._gate_up.checkpoint() | self._down.checkpoint()

    def shards(self) -> dict[str, Shard]:
        return self._gate_up.shards() | self._down.shards()

    def stacked(self) -> dict[str, tuple[Tensor, list[str]]]:
        return {}

    def linears(self) -> list[Linear | RowLinear]:
        return [self._gate_up, self._down]


class SparseMlp:
    """Routed experts: a linear router selects the `experts_per_token` most likely experts of each token, weighted by
    their probabilities. The selection stays on the device."""

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, name: str, dtype: torch.dtype, device: torch.device, group: Group
    ) -> None:
        self._per_token, self._normalise = moe.experts_per_token, moe.norm_topk_prob
        size = config.hidden_size
        self._router = Linear(size, {f"{name}.gate": moe.num_experts}, bias=False, dtype=dtype, device=device)
        self._experts = Experts(
            f"{name}.experts", moe.num_experts, size, moe.intermediate_size, dtype=dtype, device=device, group=group
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._experts(x, *route(self._router(x), self._per_token, normalise=self._normalise))

    def pack(self) -> None:
        """Do nothing: an expert has few tokens at a time, for which packing does not pay."""

    def warm_up(self) -> None:
        route(self._router.weight[:, :1].mT, self._per_token, normalise=self._normalise)
        self._experts.warm_up()

    def checkpoint(self) -> dict[str, Tensor]:
        return self._router.checkpoint() | self._experts.checkpoint()

    def shards(self) -> dict[str, Shard]:
        return self._experts.shards()

    def stacked(self) -> dict[str, tuple[Tensor, list[str]]]:
        return self._experts.stacked()

    def linears(self) -> list[Linear | RowLinear]:
        """Return no layers: adapters of experts are not supported, because each token would need its own."""
        return []
