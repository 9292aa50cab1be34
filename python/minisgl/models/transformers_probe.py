"""The probe of a transformers model: what its layers need of attention, and whether the model then computes correctly.

There are two runs, after loading. The first runs a few tokens and records each call: sizes, scale, soft cap, and the
window, which is that of the mask that transformers itself made. The second computes two short sequences in chunks, in
one batch, through pages, and compares the hidden states with those of transformers' own attention for each sequence
alone: a model that keeps other state between steps, or counts positions in its own way, differs.

Invariants: an argument of a layer that `LayerAttention` cannot express is an error that names it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from minisgl.attention import AttentionRows, KVPool, LayerAttention, TorchSdpa
from minisgl.models.transformers_config import refused
from minisgl.models.transformers_model import CONTEXT, NAME, AttentionContext, TransformersModel

_OBSERVED = "minisgl_observed"
_OWN = "eager"  # transformers' plainest attention, without any library; all classes have it
_TOKENS = 8
_PAGE = 4
_WITHIN = 1e-3  # maximum relative error of a token's hidden state in float32
_WITHIN_OF_HALVES = 0.1  # maximum relative error of the median token in 16 bits: rounding may change a token's experts
# exceptions of arbitrary model code
_FAILURES = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError)
# arguments of a call that have no effect here
_HARMLESS = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "head_mask",
    "is_causal",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_value",
    "past_key_values",
    "position_ids",
    "return_dict",
    "seq_idx",
    "token_type_ids",
    "use_cache",
}


class _UnsupportedError(Exception):
    """Error for an attention call with an argument that is not supported."""


def probe(model: TransformersModel, architecture: str, vocab_size: int) -> None:
    """Probe the model and fill `model.attention`. Raises `ConfigError` if the model needs unsupported attention."""
    AttentionInterface.register(_OBSERVED, _observe)
    AttentionMaskInterface.register(_OBSERVED, _mask)
    if "position_ids" not in inspect.signature(model.body.forward).parameters:
        raise refused(architecture, "its forward has no argument position_ids")
    context, positions = model.context, torch.arange(_TOKENS, device=model.device)
    context.observed = []
    model.use_attention(_OBSERVED)
    try:
        model.run_body(positions % vocab_size, positions)
    except _UnsupportedError as error:
        raise refused(architecture, str(error)) from error
    except _FAILURES as error:
        raise refused(architecture, f"its forward fails: {type(error).__name__}: {error}") from error
    finally:
        model.use_attention(NAME)
    if not context.observed:
        raise refused(architecture, "no layer uses the registry of attention functions")
    model.attention = tuple(context.observed)
    try:
        reason = _difference(model, vocab_size)
        outputs = model.logits(torch.zeros(1, model.hidden_size, dtype=model.dtype, device=model.device)).shape[1]
        if not reason and outputs != vocab_size:
            reason = f"its head has {outputs} outputs for {vocab_size} tokens"
    except _FAILURES as error:
        reason = f"its forward fails in steps: {type(error).__name__}: {error}"
    if reason:
        raise refused(architecture, reason)


def _mask(*args: Any, **settings: Any) -> Any:
    """Return transformers' own mask [1, 1, n, n], true for attended tokens, with its window as `window`."""
    settings |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    made: Any = sdpa_mask(*args, **settings)
    made.window = settings.get("local_size")
    return made


def _observe(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: Any = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **arguments: object,
) -> tuple[Tensor, None]:
    """Record a call of attention in the probe's first run; return zeros. Raises `_UnsupportedError` if it is
    unsupported."""
    for name, argument in arguments.items():
        if name not in _HARMLESS and argument is not None and argument is not False:
            raise _UnsupportedError(f"its attention has the argument {name}, which no backend supports")
    if dropout or not arguments.get("is_causal", getattr(module, "is_causal", True)):
        raise _UnsupportedError("its attention is not causal")
    if scaling is not None and not isinstance(scaling, float):
        raise _UnsupportedError("the scale of its attention is not a constant")
    window = sliding_window if attention_mask is None else _window(attention_mask, query.shape[2])
    k_dim = query.shape[3]
    context: AttentionContext = getattr(module, CONTEXT)
    context.observed.append(
        LayerAttention(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            k_dim=k_dim,
            v_dim=value.shape[3],
            window=window,
            scale=None if scaling is None or math.isclose(scaling, k_dim**-0.5, rel_tol=1e-6) else scaling,
            softcap=softcap or None,
        )
    )
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _window(mask: Any, tokens: int) -> int | None:
    """Return the window of a mask made by `_mask`, after checking its contents. Raises `_UnsupportedError` for other
    masks."""
    window: int | None = getattr(mask, "window", tokens)
    behind = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    seen = (behind >= 0) & (behind < (window or tokens))
    if not hasattr(mask, "window") or mask.shape[-2:] != seen.shape or not bool((mask.cpu() == seen).all()):
        raise _UnsupportedError("its attention mask is neither causal nor that of a sliding window")
    return window


def _difference(model: TransformersModel, vocab_size: int) -> str:
    """Return how the hidden states computed in steps differ from transformers' own; empty if they agree."""
    lengths = (_TOKENS, _TOKENS + 1)
    random = torch.Generator().manual_seed(0)
    texts = [torch.randint(vocab_size, (length,), generator=random).to(model.device) for length in lengths]
    ours = _in_steps(model, texts)
    model.use_attention(_OWN)
    try:
        theirs = [model.run_body(ids, torch.arange(len(ids), device=ids.device)).float() for ids in texts]
    finally:
        model.use_attention(NAME)
    errors = torch.cat([(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in zip(ours, theirs, strict=True)])
    if not bool(errors.isfinite().all()):
        return f"its hidden states are not finite in {str(model.dtype).removeprefix('torch.')}: choose another --dtype"
    exact = model.dtype is torch.float32
    error = float(errors.max() if exact else errors.median())
    if error <= (_WITHIN if exact else _WITHIN_OF_HALVES):
        return ""
    return f"computed in steps it differs from transformers' own attention, by {error:.1e} of a hidden state"


def _in_steps(model: TransformersModel, texts: Sequence[Tensor]) -> list[Tensor]:
    """Return the hidden states [n, size] of two sequences, computed in two steps: a chunk of each, then one token of
    the first with the rest of the second."""
    first, second = len(texts[0]), len(texts[1])
    columns = -(-second // _PAGE)
    # pages of the two sequences alternate, in descending order
    pages = torch.arange(2 * columns).flip(0).view(columns, 2).t().contiguous()
    pool = KVPool(model.attention, num_pages=2 * columns, page_size=_PAGE, dtype=model.dtype, device=model.device)
    backend = TorchSdpa.of(model.attention, pool)
    parts_by_row: list[list[Tensor]] = [[], []]
    for starts, ends in (((0, 0), (first - 1, _PAGE)), ((first - 1, _PAGE), (first, second))):
        places = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        out_loc = torch.cat([pages[row, at // _PAGE] * _PAGE + at % _PAGE for row, at in enumerate(places)])
        extend_lens = np.array([len(at) for at in places], np.int32)
        rows = AttentionRows(
            num_decode=int(extend_lens[0] == 1),
            slots=np.arange(2, dtype=np.int32),
            seq_lens=np.array(ends, np.int32),
            extend_lens=extend_lens,
            out_loc=out_loc.numpy().astype(np.int32),
        )
        backend.prepare(rows, pages.to(model.device))
        ids = torch.cat([text[at.to(text.device)] for text, at in zip(texts, places, strict=True)])
        hidden = model.forward(ids, torch.cat(places).to(model.device), backend.attend)
        for row, part in enumerate(hidden.float().split(extend_lens.tolist())):
            parts_by_row[row].append(part)
    return [torch.cat(parts) for parts in parts_by_row]
