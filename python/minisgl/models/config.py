"""A model's config.json, as the layers read it.

Which linear layers of a model an adapter may change, and their sizes.

Invariants: every field that changes the computation is read or refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from minisgl.config import ConfigError, ModelImpl
from minisgl.models.architectures import (
    ARCHITECTURES,
    ClampedSwiglu,
    Heads,
    LatentConfig,
    MoeConfig,
    PerLayer,
    QueryGrowth,
    Ranges,
    ScaledSilu,
    Slopes,
    StateKind,
    Streams,
    check_activation,
    find_architecture,
    has_text_half,
    no_windows,
    text_config,
)
from minisgl.models.rope import RopeConfig, context_length, parse_rope
from minisgl.weights.names import CHECKPOINT, GGUF, whole_names, with_flat
from minisgl.weights.quantization import Packing, parse_packing

Activation = Literal["silu", "gelu", "gelu_erf", "relu2"] | ScaledSilu | ClampedSwiglu
"""GELU is by its tanh, and by the error function."""
Norms = Literal["before", "behind", "both", "parallel", "apart", "over"]
"""Where a layer has norms: before attention and MLP; behind both, before they are added; before and behind; one before
both, which read the same numbers and are added together; one before each, the rest as with one; behind both, over the
sums of what they give and the hidden numbers."""
HeadNorms = Literal["none", "head", "heads", "whole", "rotated", "plain"]
"""Norms of q and k before rotation: none; over each head; over each head with weights of its own; over all heads at
once. Or over each head behind rotation, with weights (rotated) or without (plain: in layers that rotate)."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The one description of a model. `windows`, by layer: a token attends to as many tokens, itself included; None:
    to all before it. `rotated`, by layer: whether q and k are; if not, attention knows no positions there. `packing`:
    how the checkpoint's weights are packed. Scales multiply; caps are soft, 0 means none."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    windows: tuple[int | None, ...]
    rotated: tuple[bool, ...]
    attention_scale: float  # of the products of q and k
    packing: Packing | None
    dtype: str
    eos_ids: tuple[int, ...]
    heads: tuple[Heads, ...] = ()  # by layer, if layers differ; `num_kv_heads` and `head_dim` are then of most
    attention_gates: bool = False  # of what attention gives, projected with the queries
    value_norm: bool = False  # of each head, without weights
    inner_sizes: tuple[int, ...] = ()  # in place of `intermediate_size`, by layer, if layers differ; 0: it has no MLP
    attends: tuple[bool, ...] = ()  # by layer: whether it has attention, if not all have
    state: StateKind | None = None  # what layers keep of each sequence in place of keys and values, or beside them
    state_layers: tuple[bool, ...] = ()  # by layer: whether it does
    layer_scales: bool = False  # all that a layer gives is multiplied by a number of its own
    per_layer: PerLayer | None = None
    streams: Streams | None = None
    gate_cuts: tuple[float, ...] = ()
    """By layer: by how many standard deviations above their mean the gates of an MLP are cut; 0: they are not."""
    local_rope: RopeConfig | None = None  # of layers with a window, if it is another one
    rotary_share: float = 1.0  # of each head, from its first number on
    mlp_bias: bool = False
    down_bias: bool = False  # of the MLP's way out, where its other matrices have none
    head_bias: bool = False
    learned_positions: int = 0  # that have numbers of their own, added to embeddings
    first_position: int = 0  # the row that the first position has of them
    token_types: int = 0  # kinds of tokens that have numbers of their own, added to embeddings
    pair_types: bool = False  # the second of two texts has tokens of the second kind
    embedding_norm: bool = False  # embeddings are normalised
    bare_first: bool = False  # the first layer has no norm before attention
    last_norm: bool = True  # there is one behind the last layer
    distances: Ranges | Slopes | None = None  # by which scores have numbers added
    both_ways: bool = False
    """An encoder: tokens attend to those behind them, too: to all of their text, or to as many as before them."""
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None  # `num_kv_heads` and `head_dim` are then of what pages hold
    norms: Norms = "before"
    qk_norm: HeadNorms = "none"
    layer_norm: bool = False  # norms take the mean off, too
    norm_bias: bool = False
    norm_offset: float = 0.0  # what a checkpoint's weights of norms lack
    activation: Activation = "silu"  # what the gate of an MLP goes through
    gated: bool = True  # else the MLP is down(activation(up(x)))
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logits_scale: float = 1.0
    value_scale: float = 1.0
    attention_cap: float = 0.0
    sinks: bool = False  # each head has a score that takes its part of the weights and gives no value
    logits_cap: float = 0.0
    query_growth: QueryGrowth | None = None
    chunked: bool = False  # windows are chunks of the text: a token attends to those of its own chunk before it
    left_out: tuple[str, ...] = ()
    """How the names of tensors begin that are no part of the decoder: they predict tokens after the next (MTP)."""
    other_half: tuple[str, ...] = ()
    """The same of a GGUF file that has what sees, too."""

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The tables that layers rotate by."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def rotary(self) -> tuple[int | None, ...]:
        """By layer: which of `ropes`; None: q and k are not rotated."""
        local = 0 if self.local_rope is None else 1
        chosen = (0 if window is None else local for window in self.windows)
        return tuple(rope if rotated else None for rope, rotated in zip(chosen, self.rotated, strict=True))

    @property
    def rotary_dim(self) -> int:
        """How many numbers of each head are rotated, where layers do not differ."""
        return int(self.head_dim * self.rotary_share) if self.latent is None else self.head_dim - self.latent.rank

    @property
    def rotary_dims(self) -> tuple[int, ...]:
        """By table: how many numbers of each head are rotated."""
        if not self.heads:
            return (self.rotary_dim,) * len(self.ropes)
        by_table = {table: heads.head_dim for table, heads in zip(self.rotary, self.heads, strict=True)}
        return tuple(int(by_table.get(table, self.head_dim) * self.rotary_share) for table in range(len(self.ropes)))

    @property
    def layer_heads(self) -> tuple[Heads, ...]:
        return self.heads or tuple(Heads(self.num_kv_heads, self.head_dim, layer) for layer in range(self.num_layers))

    @property
    def layer_attends(self) -> tuple[bool, ...]:
        return self.attends or (True,) * self.num_layers

    @property
    def layer_has_state(self) -> tuple[bool, ...]:
        return self.state_layers or (False,) * self.num_layers

    @property
    def layer_inner_sizes(self) -> tuple[int, ...]:
        return self.inner_sizes or (self.intermediate_size,) * self.num_layers

    def context_len(self, max_seq_len: int | None) -> int:
        """With --max-seq-len, which may stretch the context of a model whose rotary scaling is dynamic. The token that
        ends a request has no position in an encoder: there is room for it beside them. Raises `ConfigError`."""
        own = self.max_position + 1 if self.both_ways else self.max_position
        if max_seq_len is None:
            return own
        is_dynamic = self.rope.rope_type == "dynamic"
        longest = int(self.max_position * self.rope.factor) if is_dynamic else own
        if max_seq_len > longest:
            stretched = f", {longest} at most with its dynamic scaling" if is_dynamic else ""
            raise ConfigError(f"--max-seq-len {max_seq_len}: the model's context is {own}{stretched}")
        return max_seq_len


def load_config(model_dir: str | Path) -> ModelConfig:
    """From config.json, with the EOS ids of generation_config.json added. Raises `ConfigError`."""
    raw, generation = read_config(model_dir)
    try:
        return parse_config(raw, generation)
    except ConfigError:
        raise
    except KeyError as error:
        raise ConfigError(f"config.json: {error.args[0]}: missing") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json: {error}") from error


def read_config(model_dir: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json as they are; the second may be missing. Raises `ConfigError`."""
    folder = Path(model_dir)
    raw = _read_json(folder / "config.json", required=True)
    return raw, _read_json(folder / "generation_config.json", required=False)


def is_native(model_dir: str | Path, impl: ModelImpl) -> bool:
    """Whether the layers of this package compute the model, not those of transformers. Raises `ConfigError`."""
    if impl != "auto":
        return impl == "native"
    found = ARCHITECTURES.get(_architecture(read_config(model_dir)[0]))
    return found is not None and found.on_torch


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """`raw` as transformers writes it: 4 (rope_theta, rope_scaling, torch_dtype) or 5 (rope_parameters, dtype)."""
    architecture = _architecture(raw)
    known = find_architecture(architecture)
    if has_text_half(architecture):
        raw = text_config(raw, architecture)
    raw = {**raw, **{name: raw[other] for other, name in known.fields.items() if other in raw}}
    own = known.describe(raw)
    num_layers = own.get("num_layers") or int(raw["num_hidden_layers"])
    num_heads = own.get("num_heads") or int(raw["num_attention_heads"])
    if "activation" not in own:
        check_activation(raw)
    head_dim = own.get("head_dim") or int(raw.get("head_dim") or int(raw["hidden_size"]) // num_heads)
    if head_dim < 1:
        raise ConfigError(f"config.json: head_dim: {head_dim}: must be at least 1")
    bias = bool(raw.get("attention_bias", False))
    rope = own.get("rope") or parse_rope(raw)
    as_llama: dict[str, Any] = {
        "hidden_size": int(raw["hidden_size"]),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": int(raw.get("num_key_value_heads") or num_heads),
        "head_dim": head_dim,
        "intermediate_size": own["intermediate_size"] if "intermediate_size" in own else int(raw["intermediate_size"]),
        "vocab_size": int(raw["vocab_size"]),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope": rope,
        "max_position": own.get("max_position") or context_length(raw, rope),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "qkv_bias": bias,
        "out_bias": bias,
        "rotated": (True,) * num_layers,
        "attention_scale": float(head_dim**-0.5),
    }
    if "windows" not in own:
        as_llama["windows"] = no_windows(raw)
    return ModelConfig(
        architecture=architecture,
        other_half=tuple(raw.get("other_half", ())),
        packing=parse_packing(raw),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_ids=eos_ids(raw, generation or {}),
        **{**as_llama, **own},
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures") or []
    if not architectures:
        raise ConfigError("config.json: architectures: missing: it says which model this is")
    return str(architectures[0])


def eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Those of both files, in order."""
    return tuple(sorted({*_ids(raw.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}))


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(one) for one in value] if isinstance(value, list) else [int(value)]


def _read_json(file: Path, *, required: bool) -> dict[str, Any]:
    if not file.is_file():
        if required:
            raise ConfigError(f"{file.parent.name}: no {file.name}: not a model folder")
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file.parent.name}/{file.name}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file.parent.name}/{file.name}: must be a JSON object")
    return found


def tensor_names(config: ModelConfig) -> dict[str, dict[str, list[str]]]:
    """What the parts of the model are called in checkpoints and in GGUF files."""
    known = find_architecture(config.architecture)
    return {
        "checkpoint": with_flat(whole_names(CHECKPOINT, known.names, known.layers)),
        "gguf": whole_names(GGUF, known.gguf_names, ("blk.{layer}",)),
    }


def adapter_places(config: ModelConfig) -> dict[str, tuple[int, str]]:
    """Layer and part, as `tensor_names` has it, of each linear layer that an adapter may change, by name such as
    "model.layers.0.self_attn.q_proj": attention that is not over latents, and MLPs that are not routed experts."""
    names = tensor_names(config)["checkpoint"]
    found: dict[str, tuple[int, str]] = {}
    as_is = config.latent is None and not config.attention_gates
    attention = ("q", "k", "v", "qkv", "out") if as_is else ()
    for layer in range(config.num_layers):
        dense = config.moe is None or layer not in config.moe.layers
        mlp = ("gate", "up", "gate_up", "down") if config.gated else ("up", "down")
        heads = config.layer_heads[layer]
        missing = {"k", "v"} if heads.kv_of != layer else {"v"} if heads.values_are_keys else set()
        if not config.layer_attends[layer]:
            missing = set(attention)
        if config.layer_inner_sizes[layer] == 0:
            missing = missing | set(mlp)
        for part in (*attention, *(mlp if dense else ())):
            if part in names and part not in missing:
                found[names[part][0].format(layer=layer)] = layer, part
    return found


def adaptable(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) by name."""
    size, found = config.hidden_size, dict[str, tuple[int, int]]()
    for name, (layer, part) in adapter_places(config).items():
        heads, inner = config.layer_heads[layer], config.layer_inner_sizes[layer]
        q, kv = config.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        sizes = {"q": (size, q), "k": (size, kv), "v": (size, kv), "qkv": (size, q + 2 * kv), "out": (q, size)}
        sizes |= {"gate": (size, inner), "up": (size, inner), "gate_up": (size, 2 * inner), "down": (inner, size)}
        found[name] = sizes[part]
    return found


def why_not(config: ModelConfig, name: str) -> str:
    """Says why a layer is not in `adaptable`."""
    if config.moe is not None and ".mlp." in name:
        return "adapters of routed experts and of their router are not computed"
    if config.latent is not None and ".self_attn." in name:
        return "adapters of attention over latents are not computed"
    if config.attention_gates and ".self_attn." in name:
        return "adapters of attention with gates are not computed"
    if name.endswith(("embed_tokens", "lm_head")):
        return "adapters of embeddings and of the head are not computed"
    if config.state is not None and (".conv." in name or ".mamba." in name or ".linear_attn." in name):
        return "adapters of layers that keep a state are not computed"
    return "the model has no such linear layer"
