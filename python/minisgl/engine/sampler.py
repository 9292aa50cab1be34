"""From logits to tokens.

Invariants: greedy is the exact argmax, the lowest id on ties; otherwise the token is a function of the row's logits,
its parameters, its seed and its position only, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """Parameters by row, [n] each, on the host."""

    temperature: Tensor  # float32, 0 is greedy
    top_k: Tensor  # int64, at most 0 is off
    top_p: Tensor  # float32, 1 is off
    min_p: Tensor  # float32, 0 is off
    seed: Tensor  # int64
    position: Tensor  # int64, of the token to be sampled


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """logits [n, vocab] of any float dtype -> [n] int64."""
    sampled = rows.temperature > 0
    if not bool(sampled.any()):
        return logits.max(-1).indices  # the first on ties, and much faster than argmax on bfloat16
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    greedy = (~sampled).nonzero().flatten().to(logits.device)
    if len(greedy):
        tokens[greedy] = logits[greedy].max(-1).indices
    chosen = sampled.nonzero().flatten()
    chosen_device = chosen.to(logits.device)
    scaled = logits[chosen_device].float() / rows.temperature[chosen, None].to(logits.device)
    probabilities = scaled.softmax(-1)
    min_p = rows.min_p[chosen]
    unlikely = (min_p > 0).nonzero().flatten()
    if len(unlikely):
        at = unlikely.to(logits.device)
        floor = probabilities[at].amax(-1, keepdim=True) * min_p[unlikely, None].to(at.device)
        probabilities[at] = probabilities[at].masked_fill(probabilities[at] < floor, 0.0)
    top_k, top_p = rows.top_k[chosen], rows.top_p[chosen]
    truncated = ((top_k > 0) | (top_p < 1)).nonzero().flatten()
    if len(truncated):
        at = truncated.to(logits.device)
        probabilities[at] = truncate(probabilities[at], top_k[truncated].to(at.device), top_p[truncated].to(at.device))
    uniform = uniforms(rows.seed[chosen], rows.position[chosen]).to(logits.device)
    tokens[chosen_device] = inverse_cdf(probabilities, uniform)
    return tokens


def truncate(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the k most likely tokens, then all but the fewest of these whose share reaches p (nucleus sampling,
    Holtzman et al. 2019). Ties go to the lower id."""
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probabilities.shape[-1], device=probabilities.device)
    beyond_k = (top_k > 0)[:, None] & (rank >= top_k[:, None])
    ordered = ordered.masked_fill(beyond_k, 0.0)
    mass = ordered.cumsum(-1, dtype=torch.float64)
    before = mass - ordered
    limit = top_p.double()[:, None] * mass[:, -1:]
    ordered = ordered.masked_fill((before >= limit) & (rank > 0) & (top_p < 1)[:, None], 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, ids, ordered)


def inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first token, in order of ids, whose cumulative probability exceeds uniform times the total."""
    cdf = probabilities.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:].contiguous()
    found = torch.searchsorted(cdf, uniform[:, None] * total, right=True).squeeze(-1)
    # rounding may make the target the total: then the last token with any probability
    last = torch.searchsorted(cdf, total, right=False).squeeze(-1)
    return torch.minimum(found, last)


def uniforms(seed: Tensor, position: Tensor) -> Tensor:
    """[n] int64 each -> [n] float64 in [0, 1): the finalizer of splitmix64 (Steele, Lea, Flood 2014), twice."""
    bits = _finalize(_finalize(seed) ^ (position * _GOLDEN))
    return _shift(bits, 11).double() * 2.0**-53


def _finalize(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical right shift: torch's is arithmetic."""
    return (x >> count) & ((1 << (64 - count)) - 1)
