"""Routed experts: many small MLPs, of which each token uses a few (Shazeer et al. 2017).

There are two forms. Where a Triton kernel supports the weights (`kernels.experts`), all experts are one operation that
asks the device for nothing. Elsewhere the host asks how many tokens each expert has and multiplies expert by expert: on
the CPU that is the fast way; on a device it waits, and no CUDA graph can hold it.

Invariants: every used expert multiplies all its tokens at once; the weights of all experts are in two tensors, of each
of which a rank has an equal slice; a token's result does not depend on the other tokens, except for the rounding of
products of another size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.distributed import ALONE, Group, Shard, ShardRange
from minisgl.kernels import experts as kernel
from minisgl.kernels.ops import triton_is_installed
from minisgl.layers.products import linear


def _routed(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    form = kernel.run if kernel.serves(gate_up) else grouped
    return form(x, gate_up, down, chosen, weights)


@torch.library.custom_op("minisgl::routed_experts", mutates_args=())
def _opaque(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Run routed experts as one opaque operation: the compiler cannot compile either form."""
    return _routed(x, gate_up, down, chosen, weights)


@_opaque.register_fake
def _(x: Tensor, *others: Tensor) -> Tensor:
    return torch.empty_like(x)


def grouped(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute `kernels.experts.run` on any device, expert by expert."""
    (num_tokens, per_token), size = chosen.shape, down.shape[2]
    flat = chosen.flatten()
    order = flat.argsort(stable=True)  # uses sorted by expert
    counts = flat.bincount(minlength=len(down)).tolist()
    rows = x[order // per_token]
    out = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            use = slice(start, start + count)
            both = linear(rows[use], gate_up[expert])
            inner = F.silu(both[:, :size]).mul_(both[:, size:])
            out[order[use]] = linear(inner, down[expert])
            start += count
    return (out.view(num_tokens, per_token, x.shape[1]) * weights.unsqueeze(-1)).sum(1)


def graph_obstacle() -> str:
    """Return the reason why a CUDA graph cannot hold routed experts; empty if it can."""
    return "" if triton_is_installed() else "without Triton the host looks at which experts a step uses"


class Experts:
    """A set of `count` MLPs down(silu(gate(x)) * up(x)) without biases."""

    def __init__(
        self,
        name: str,
        count: int,
        hidden_size: int,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = ALONE,
    ) -> None:
        self._name = name
        self._group = group
        self._inner = ShardRange.of(size, group.rank, group.size)
        self._size = size = self._inner.length
        self.gate_up = torch.empty(count, 2 * size, hidden_size, dtype=dtype, device=device)
        self.down = torch.empty(count, hidden_size, size, dtype=dtype, device=device)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum [n, hidden_size] of each token's experts; chosen [n, k] int64, weights [n, k]."""
        routed = _opaque if torch.compiler.is_compiling() else _routed
        return self._group.all_reduce(routed(x, self.gate_up, self.down, chosen, weights))

    def warm_up(self) -> None:
        """Compile the kernels for steps of any size."""
        kernel.warm_up(self.gate_up, self.down)

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the parameters by a checkpoint's names, expert by expert."""
        tensors = dict[str, Tensor]()
        for expert in range(len(self.down)):
            name = f"{self._name}.{expert}"
            tensors[f"{name}.gate_proj.weight"] = self.gate_up[expert, : self._size]
            tensors[f"{name}.up_proj.weight"] = self.gate_up[expert, self._size :]
            tensors[f"{name}.down_proj.weight"] = self.down[expert]
        return tensors

    def shards(self) -> dict[str, Shard]:
        """Return this rank's shards, by the names of `checkpoint` and of `stacked`."""
        if self._group.size == 1:
            return {}
        inner, parts = self._inner, dict[str, Shard]()
        for expert in range(len(self.down)):
            name = f"{self._name}.{expert}"
            parts[f"{name}.gate_proj.weight"] = parts[f"{name}.up_proj.weight"] = Shard(0, (inner,))
            parts[f"{name}.down_proj.weight"] = Shard(1, (inner,))
        parts[f"{self._name}.gate_up_proj"] = Shard(1, (inner, inner))
        parts[f"{self._name}.down_proj"] = Shard(2, (inner,))
        return parts

    def stacked(self) -> dict[str, tuple[Tensor, list[str]]]:
        """Return the alternative, stacked layout (written by transformers 5 with `save_original_format=False`): name to
        the whole parameter, and the names of `checkpoint` that it replaces."""
        experts = [f"{self._name}.{expert}" for expert in range(len(self.down))]
        both = [f"{expert}.{part}_proj.weight" for expert in experts for part in ("gate", "up")]
        return {
            f"{self._name}.gate_up_proj": (self.gate_up, both),
            f"{self._name}.down_proj": (self.down, [f"{expert}.down_proj.weight" for expert in experts]),
        }
