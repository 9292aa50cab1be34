"""A model whose layers are transformers' own modelling code, on this package's attention.

A function of this module is registered in transformers' registry of attention functions and passes q, k and v to
`attend`. A step is one sequence [1, tokens] of all rows' tokens, each with its position; the page table behind `attend`
separates the rows. The output head, with its scales and soft caps, is the class's own, too: it runs with a body that
returns the hidden states that it was given.

Classes older than the registry get an adapted attention: the same projections and RoPE, with the scores computed by a
function of the registry.

Invariants: the n-th call of attention in a forward is layer n; the head multiplies into float32, in any weight dtype
(see `layers.wide`); nothing is kept between forwards. A module keeps its weights and all other attributes; with an
attention that is not registered it behaves as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from minisgl.attention import LayerAttention
from minisgl.layers.products import WideProduct, padded_rows, wide_product
from minisgl.models.api import Attend
from minisgl.models.transformers_config import ADAPTED, refused

NAME = "minisgl"  # in transformers' registry
CONTEXT = "_minisgl_context"  # attribute of a module that holds its `AttentionContext`


class AttentionContext:
    """The attention context of the current forward, shared by all modules of a model."""

    def __init__(self) -> None:
        self.attend: Attend | None = None
        self.layer = 0  # index of the next call
        self.num_tokens = 0  # tokens after these are padding
        self.observed: list[LayerAttention] = []  # calls that the probe recorded


def compute_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **arguments: object
) -> tuple[Tensor, None]:
    """Compute attention for a transformers layer: query [1, heads, n, k_dim], key and value [1, kv_heads, n, ...];
    returns ([1, n, heads, v_dim], None). The other arguments were checked by the probe."""
    context: AttentionContext = module.__dict__[CONTEXT]
    layer, n, padded = context.layer, context.num_tokens, query.shape[2]
    context.layer += 1
    assert context.attend is not None
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if n == padded:
        return context.attend(layer, q, k, v).unsqueeze(0), None
    out = context.attend(layer, q[:n], k[:n], v[:n])
    return F.pad(out, (0, 0, 0, 0, 0, padded - n)).unsqueeze(0), None


class _StubBody:
    """A replacement for a model's body that returns the hidden states that it was given."""

    def __init__(self) -> None:
        self.hidden = torch.empty(0)

    def __call__(self, *args: object, **settings: object) -> _Output:
        return _Output(self.hidden)

    @property
    def decoder(self) -> _StubBody:  # attribute in which OPT's head looks for its body
        return self


class _Output:
    """The output of `_StubBody`, as a head reads it: by name or index, and None for any other attribute."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class TransformersModel:
    """A causal language model of transformers, with weights and in eval mode; this object owns and changes it.
    `attention` is empty until `transformers_probe` has filled it. Raises `ConfigError`."""

    graph_obstacle = "transformers' code may ask the host at any point"

    def __init__(self, model: Any) -> None:
        self._model = model
        self.context = AttentionContext()
        self.attention: Sequence[LayerAttention] = ()
        AttentionInterface.register(NAME, compute_attention)
        for module in model.modules():
            module.__dict__[CONTEXT] = self.context
        if type(model).__name__ in ADAPTED:
            adapt(model)
        _make_wide(model.get_output_embeddings())
        # not by `base_model_prefix`: the text model may have the whole model's
        bodies = [named for named in model.named_children() if isinstance(named[1], PreTrainedModel)]
        if len(bodies) != 1:
            raise refused(type(model).__name__, f"it must have one model below its head, not {len(bodies)}")
        ((name, self.body),) = bodies
        self.hidden_size = int(model.get_output_embeddings().weight.shape[1])
        self._given = _StubBody()
        del model._modules[name]
        model.__dict__[name] = self._given
        weight = next(self.body.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.use_attention(NAME)

    def use_attention(self, name: str) -> None:
        """Make the layers use the registered attention function `name` from now on."""
        for config in {id(c): c for m in self.body.modules() if (c := getattr(m, "config", None))}.values():
            config._attn_implementation = name

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute hidden states (see `Model`). CPUs pad 16-bit inputs to a few token counts (see `layers.products`)."""
        context, n = self.context, len(input_ids)
        context.attend, context.layer, context.num_tokens = attend, 0, n
        if self.device.type == "cpu" and self.dtype is not torch.float32:
            padding = (0, padded_rows(n) - n)
            input_ids, positions = F.pad(input_ids, padding), F.pad(positions, padding)
        hidden = self.run_body(input_ids, positions)
        if context.layer != len(self.attention):
            raise RuntimeError(f"attention was asked {context.layer} times, not {len(self.attention)}")
        return hidden[:n]

    def run_body(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Run the body on [n] ids and [n] positions, with the current attention function; returns [n, hidden size]."""
        outputs = self.body(input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        hidden: Tensor = outputs[0][0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self._given.hidden = hidden.unsqueeze(0)
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        self._given.hidden = torch.empty(0)
        return logits.float()

    def warm_up(self) -> None:
        """Do nothing: transformers' layers have no kernels to compile."""


def _make_wide(head: Any) -> None:
    """Make a linear output head multiply in float32."""
    if type(head) is not torch.nn.Linear or head.weight.dtype is torch.float32:
        return
    table = head.weight.detach()
    bias = None if head.bias is None else head.bias.detach().float()

    product = WideProduct(table) if WideProduct.serves(table) else partial(wide_product, weight=table)

    def forward(x: Tensor) -> Tensor:
        y: Tensor = product(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias

    head.__dict__["forward"] = forward


def adapt(model: Any) -> None:
    """Replace the attention of modules of `model` that do not use the registry."""
    for module in model.modules():
        if isinstance(module, FalconAttention):
            module.forward = partial(_falcon, module, module.forward)


def _falcon(
    module: Any,
    own: Callable[..., Any],
    hidden_states: Tensor,
    *,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    **others: Any,
) -> Any:
    """Compute Falcon's attention without ALiBi. Its fused projection holds, for each KV head, the query heads, K and V;
    in the oldest form each head has all three."""
    scores = ALL_ATTENTION_FUNCTIONS.get(module.config._attn_implementation)
    if scores is None:
        return own(hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **others)
    batch, length, _ = hidden_states.shape
    fused = module.query_key_value(hidden_states)
    kv_heads = module.num_kv_heads
    fused = fused.view(batch, length, kv_heads, -1, module.head_dim)
    q, k, v = fused[:, :, :, :-2].flatten(2, 3), fused[:, :, :, -2], fused[:, :, :, -1]
    q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *position_embeddings)
    attended, _ = scores(module, q, k, v.transpose(1, 2), attention_mask)
    return module.dense(attended.reshape(batch, length, -1)), None
