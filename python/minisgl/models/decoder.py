"""The decoder-only transformer of Llama and its relatives, configured by a `ModelConfig`.

Invariants: pure functions of the inputs and the weights; K and V pass through `attend`, which stores and reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minisgl.attention import LayerAttention
from minisgl.config import Unsupported
from minisgl.distributed import ALONE, Group, Shard, ShardRange
from minisgl.layers.adapters import AdapterRows
from minisgl.layers.embedding import Embedding
from minisgl.layers.experts import graph_obstacle
from minisgl.layers.linear import Linear, RowLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotary, Rotation
from minisgl.models.api import Attend, Seen
from minisgl.models.architectures import find_architecture, own_name
from minisgl.models.config import ModelConfig
from minisgl.models.mlp import Mlp, SparseMlp
from minisgl.models.rope import inverse_frequencies


def _norm(config: ModelConfig, name: str, size: int, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    return RMSNorm(name, size, config.norm_eps, dtype=dtype, device=device, offset=config.norm_offset)


class _Attention:
    def __init__(
        self,
        config: ModelConfig,
        name: str,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
    ) -> None:
        self._layer = layer
        self._table = config.rotary[layer]
        heads = ShardRange.of(config.num_heads, group.rank, group.size)
        kv_heads = ShardRange.of_kv_heads(config.num_kv_heads, group.rank, group.size)
        self._heads, self._kv_heads, self._head_dim = heads.length, kv_heads.length, config.head_dim
        q, kv = heads.times(config.head_dim), kv_heads.times(config.head_dim)
        self._qkv = Linear(
            config.hidden_size,
            {f"{name}.q_proj": q, f"{name}.k_proj": kv, f"{name}.v_proj": kv},
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self._out = RowLinear(
            group, q, f"{name}.o_proj", config.hidden_size, bias=config.out_bias, dtype=dtype, device=device
        )
        self._norms: tuple[RMSNorm, RMSNorm] | None = None
        if config.qk_norm == "head":
            q_norm, k_norm = (_norm(config, f"{name}.{one}_norm", config.head_dim, dtype, device) for one in "qk")
            self._norms = (q_norm, k_norm)

    def __call__(self, x: Tensor, rotations: Sequence[Rotation], attend: Attend) -> Tensor:
        heads = self._qkv(x).view(x.shape[0], self._heads + 2 * self._kv_heads, self._head_dim)
        qk, v = heads[:, : self._heads + self._kv_heads], heads[:, self._heads + self._kv_heads :]
        if self._norms is not None:
            q_norm, k_norm = self._norms
            qk = torch.cat((q_norm(qk[:, : self._heads]), k_norm(qk[:, self._heads :])), 1)
        if self._table is not None:
            qk = rotations[self._table](qk)
        attended = attend(self._layer, qk[:, : self._heads], qk[:, self._heads :], v)
        return self._out(attended.reshape(x.shape[0], -1))

    def pack(self) -> None:
        self._qkv.pack()
        self._out.pack()

    def checkpoint(self) -> dict[str, Tensor]:
        tensors = self._qkv.checkpoint() | self._out.checkpoint()
        for norm in self._norms or ():
            tensors |= norm.checkpoint()
        return tensors

    def shards(self) -> dict[str, Shard]:
        return self._qkv.shards() | self._out.shards()

    def linears(self) -> list[Linear | RowLinear]:
        return [self._qkv, self._out]


class _Layer:
    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device, group: Group) -> None:
        name = f"model.layers.{index}"

        def norm(own: str) -> RMSNorm:
            return _norm(config, f"{name}.{own}", config.hidden_size, dtype, device)

        self._before = norm("input_layernorm")
        self._attention = _Attention(config, f"{name}.self_attn", index, dtype, device, group)
        self._between = norm("pre_feedforward_layernorm" if config.norms == "both" else "post_attention_layernorm")
        self._behind: tuple[RMSNorm, RMSNorm] | None = None
        if config.norms == "both":
            self._behind = norm("post_attention_layernorm"), norm("post_feedforward_layernorm")
        self._mlp: Mlp | SparseMlp
        if config.moe is not None and index in config.moe.layers:
            self._mlp = SparseMlp(config, config.moe, f"{name}.mlp", dtype, device, group)
        else:
            self._mlp = Mlp(config, f"{name}.mlp", dtype, device, group)

    def __call__(self, x: Tensor, rotations: Sequence[Rotation], attend: Attend) -> Tensor:
        attended = self._attention(self._before(x), rotations, attend)
        if self._behind is None:
            x = x + attended
            return x.add_(self._mlp(self._between(x)))
        of_attention, of_mlp = self._behind
        x = x + of_attention(attended)
        return x.add_(of_mlp(self._mlp(self._between(x))))

    def pack(self) -> None:
        self._attention.pack()
        self._mlp.pack()

    def warm_up(self) -> None:
        self._mlp.warm_up()

    def checkpoint(self) -> dict[str, Tensor]:
        tensors = self._attention.checkpoint() | self._mlp.checkpoint()
        for norm in (self._before, self._between, *(self._behind or ())):
            tensors |= norm.checkpoint()
        return tensors

    def shards(self) -> dict[str, Shard]:
        return self._attention.shards() | self._mlp.shards()

    def stacked(self) -> dict[str, tuple[Tensor, list[str]]]:
        return self._mlp.stacked()

    def linears(self) -> list[Linear | RowLinear]:
        return [*self._attention.linears(), *self._mlp.linears()]


class Decoder:
    """A decoder. Parameters are uninitialized until a loader has filled every tensor of `checkpoint`. With a `group` it
    holds one rank's shard, and all ranks call its methods in the same order."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_position: int | None = None,
        group: Group = ALONE,
    ) -> None:
        self.config = config
        heads = ShardRange.of(config.num_heads, group.rank, group.size).length
        kv_heads = ShardRange.of_kv_heads(config.num_kv_heads, group.rank, group.size).length
        scale = None if config.attention_scale == config.head_dim**-0.5 else config.attention_scale
        self.attention = tuple(
            LayerAttention(heads, kv_heads, config.head_dim, config.head_dim, window, scale)
            for window in config.windows
        )
        self.graph_obstacle = graph_obstacle() if config.moe is not None else ""
        self.adapter_rows = AdapterRows()
        """Adapters of the step's tokens, to be set before `forward`."""
        size, vocab_size = config.hidden_size, config.vocab_size
        self._tokens = Embedding("model.embed_tokens", vocab_size, size, dtype=dtype, device=device, group=group)
        self._layers = [_Layer(config, i, dtype, device, group) for i in range(config.num_layers)]
        self._norm = _norm(config, "model.norm", size, dtype, device)
        self._scale: Tensor | None = None
        if config.embedding_scale != 1.0:
            self._scale = torch.tensor(config.embedding_scale, dtype=dtype, device=device)
        self._head = self._tokens
        if not config.tie_word_embeddings:
            self._head = Embedding("lm_head", vocab_size, size, dtype=dtype, device=device, group=group)
        longest = max_position or config.max_position
        self._rotaries = [
            Rotary(
                torch.from_numpy(inverse_frequencies(rope, config.rotary_dim, longest)),
                longest,
                rope.attention_factor,
                dtype=dtype,
                device=device,
            )
            for rope in config.ropes
        ]

    def pack(self) -> None:
        """Convert the weights to the fastest layout. Call after every tensor of `checkpoint` is filled."""
        self._head.pack(read=self._head is self._tokens)
        for layer in self._layers:
            layer.pack()

    def warm_up(self) -> None:
        """Compile the kernels of all layers (see `Model.warm_up`)."""
        for layer in self._layers:
            layer.warm_up()

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, seen: Seen | None = None) -> Tensor:
        """Compute the hidden states [n, hidden_size] after the final norm of ids [n] int64 at positions [n] int64.
        `seen`: what the tokens have of images, whose axes take the place of `positions`."""
        if seen is None:
            rotations = [rotary.at(positions) for rotary in self._rotaries]
        else:
            rotations = [rotary.at_axes(seen.axes, self.config.rope_axes) for rotary in self._rotaries]
            input_ids = input_ids.index_fill(0, seen.tokens, 0)  # the ids of images are virtual
        x = self._tokens(input_ids)
        if self._scale is not None:
            x = x * self._scale
        parts: Sequence[Tensor] = ()
        if seen is not None:
            first, *parts = seen.features.to(x.dtype).split(self.config.hidden_size, 1)
            x = x.index_copy(0, seen.tokens, first)
        for index, layer in enumerate(self._layers):
            x = layer(x, rotations, attend)
            if seen is not None and index < len(parts):
                x = x.index_add(0, seen.tokens, parts[index])
        return self._norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, vocab_size] float32 of hidden states [n, hidden_size]; on rank 0 (see `Embedding`)."""
        return self._head.logits(hidden)

    def checkpoint(self) -> dict[str, Tensor]:
        """Return every tensor name of a checkpoint and the (part of a) parameter that it fills."""
        tensors = self._tokens.checkpoint() | self._norm.checkpoint() | self._head.checkpoint()
        for layer in self._layers:
            tensors |= layer.checkpoint()
        return tensors

    def put_adapter(self, number: int, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Load a rank's shard of adapter `number`; `pairs`: unsharded A [r, in] and scaled B [out, r] by layer name."""
        for layer in self._layers:
            for linear in layer.linears():
                if own_pairs := {name: pairs[name] for name in linear.names() if name in pairs}:
                    linear.put_adapter(self.adapter_rows, number, own_pairs)

    def drop_adapter(self, number: int) -> None:
        for layer in self._layers:
            for linear in layer.linears():
                linear.drop_adapter(number)

    def own_name(self, name: str) -> str | None:
        """Return the name in `checkpoint` of a checkpoint's tensor; None if the model does not use it."""
        return own_name(self.config.architecture, name)

    def shards(self) -> dict[str, Shard]:
        """Return this rank's shard of each sharded tensor, by the names of `checkpoint` and `stacked`."""
        parts = self._tokens.shards() | self._head.shards()
        for layer in self._layers:
            parts |= layer.shards()
        return parts

    def stacked(self) -> dict[str, tuple[Tensor, list[str]]]:
        """Return stacked tensors that a checkpoint may have instead: name to the parameter that it fills, and the names
        of `checkpoint` that it replaces."""
        tensors = dict[str, tuple[Tensor, list[str]]]()
        for layer in self._layers:
            tensors |= layer.stacked()
        return tensors


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int | None = None,
    group: Group = ALONE,
) -> Decoder:
    """Return an uninitialized model. `max_position` limits the rotary tables to the served context. Raises
    `Unsupported` for an architecture that only the CPU engine supports."""
    if not find_architecture(config.architecture).on_torch or config.query_growth is not None:
        raise Unsupported(
            f"config.json: architectures: {config.architecture}: torch has no native layers for it: use --engine cpu"
        )
    return Decoder(config, dtype=dtype, device=device, max_position=max_position, group=group)
