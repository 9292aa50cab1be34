"""`kernels.token_mask` in Triton: a program for each block of a row's ids; it writes only what may not come.

Invariants: how many rows there are and where they lie in a step's buffer is not compiled in: a step never waits for the
compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["rows", "bits"])  # type: ignore[untyped-decorator, unused-ignore]
def _mask(logits, rows, bits, vocab, stride, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    word = tl.load(bits + at * words + ids // 32, mask=inside, other=-1)
    banned = inside & (((word >> (ids % 32)) & 1) == 0)
    tl.store(logits + row * stride + ids, float("-inf"), mask=banned)


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    vocab = logits.shape[1]
    grid = (len(rows), triton.cdiv(vocab, _BLOCK))
    _mask[grid](logits, rows, bits, vocab, logits.stride(0), bits.shape[1], BLOCK=_BLOCK)
