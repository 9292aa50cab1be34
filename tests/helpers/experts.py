"""Routed experts with random inputs and a plain reference, with which every implementation is compared.

The expected values come from a loop over tokens in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# relative to the largest result; half precision also rounds between the two matmuls
WITHIN = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Routed:
    """Inputs of `kernels.experts.run`, in its order."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    chosen: Tensor
    shares: Tensor

    def to(self, device: torch.device | str) -> Routed:
        return Routed(*(tensor.to(device) for tensor in self.inputs()))

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.gate_up, self.down, self.chosen, self.shares

    def of_tokens(self, tokens: slice) -> Routed:
        return Routed(self.x[tokens], self.gate_up, self.down, self.chosen[tokens], self.shares[tokens])


def draw(
    seed: int,
    *,
    tokens: int,
    experts: int,
    per_token: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype = torch.float32,
    favourites: int | None = None,
    device: torch.device | str = "cpu",
) -> Routed:
    """Draw inputs whose result is of magnitude 1. `favourites`: how many experts are ever chosen."""
    rng = torch.Generator(device).manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=device)

    liking = torch.rand(tokens, experts, generator=rng, device=device)
    if favourites is not None:
        liking[:, max(favourites, per_token) :] = 0.0
    shares, chosen = liking.topk(per_token, -1)
    return Routed(
        noise(tokens, hidden).to(dtype),
        (noise(experts, 2 * inner, hidden) / hidden**0.5).to(dtype),
        (noise(experts, hidden, inner) / max(inner, 1) ** 0.5).to(dtype),
        chosen,
        (shares / shares.sum(-1, keepdim=True).clamp(min=1e-6)).to(dtype),
    )


def plainly(routed: Routed) -> Tensor:
    """Return the result in float64, token by token, expert by expert."""
    x, gate_up, down, _, shares = (tensor.double() for tensor in routed.inputs())
    inner, out = down.shape[2], torch.zeros_like(x)
    for token, experts in enumerate(routed.chosen.tolist()):
        for share, expert in zip(shares[token], experts, strict=True):
            both = gate_up[expert] @ x[token]
            out[token] += share * (down[expert] @ (F.silu(both[:inner]) * both[inner:]))
    return out


def assert_near(found: Tensor, routed: Routed) -> None:
    assert found.dtype is routed.x.dtype and found.shape == routed.x.shape
    if not found.numel():
        return
    expected = plainly(routed.to("cpu"))
    off = float((found.cpu().double() - expected).abs().max())
    assert off <= WITHIN[found.dtype] * float(expected.abs().max().clamp(min=1e-3)), f"{off} off"
