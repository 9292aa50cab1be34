"""Which experts a token goes to, and with what share.

Invariants: the choice stays on its device; on a device equal logits go to the expert of the lower number, whatever else
is in the batch (in half precision some are equal, and `torch.topk` promises nothing about them).
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels.triton_available import use_triton


def serves(logits: Tensor) -> bool:
    """Whether the Triton form takes them. A compiler of whole models fuses the torch form by itself."""
    return use_triton(logits) and not torch.compiler.is_compiling()


def route(logits: Tensor, per_token: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """logits [n, experts] -> the `per_token` largest, [n, per_token] integers, and their probabilities [n, per_token],
    of the dtype of `logits`, from a softmax over all in float32. `normalise`: scaled to sum up to 1."""
    if serves(logits):
        from minisgl.kernels import routing_triton

        return routing_triton.route(logits.contiguous(), per_token, normalise)
    shares, chosen = logits.float().softmax(-1).topk(per_token, -1)
    if normalise:
        shares = shares / shares.sum(-1, keepdim=True)
    return chosen, shares.to(logits.dtype)
