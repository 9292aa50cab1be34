"""The description of a model, and its parsing from config.json.

Invariants: every field that changes the computation is read or refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from minisgl.config import ConfigError, ModelImpl, Unsupported
from minisgl.models.architectures import (
    ARCHITECTURES,
    ClampedSwiglu,
    Heads,
    LatentConfig,
    MoeConfig,
    Patches,
    PerLayer,
    QueryGrowth,
    Ranges,
    ScaledSilu,
    Slopes,
    StateKind,
    Streams,
    check_activation,
    find_architecture,
    is_multimodal,
    no_windows,
    text_config,
)
from minisgl.models.rope import RopeConfig, context_length, inverse_frequencies, parse_rope
from minisgl.weights.names import CHECKPOINT, GGUF, whole_names, with_flat
from minisgl.weights.quantization import Packing, parse_packing

MAX_LAYERS = 4096  # limit of layers: more mean a damaged file
Activation = Literal["silu", "gelu", "gelu_erf", "relu2"] | ScaledSilu | ClampedSwiglu
"""Activation of an MLP's gate. "gelu" is the tanh approximation, "gelu_erf" the exact one."""
Norms = Literal["before", "behind", "both", "parallel", "apart", "over"]
"""Norms of a layer. before: before attention and MLP; behind: after each, before the residual addition; both: both of
them; parallel: one norm whose output attention and MLP read in parallel; apart: parallel with a norm for each; over:
after each residual addition (post-norm)."""
HeadNorms = Literal["none", "head", "heads", "whole", "rotated", "plain"]
"""Norms of q and k. Before RoPE: none, head (per head), heads (per head with separate weights), whole (over all heads).
After RoPE: rotated (per head), plain (per head without weights, in layers with RoPE)."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The description of a model. The CPU engine reads the fields by the same names, except those of `NOT_COMPUTED`.
    Properties that may differ between layers are tuples by layer. Scales are factors; caps are soft, 0 means none."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # of most layers; pages have this many
    head_dim: int  # of most layers; pages have this size
    vocab_size: int
    norm_eps: float
    ropes: tuple[RopeConfig, ...]  # RoPE tables of the layers
    rotary: tuple[int | None, ...]  # by layer: index of its RoPE table; None: no RoPE
    max_position: int
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    windows: tuple[int | None, ...]
    """Sliding window by layer: number of tokens that a token attends to, itself included; None: all before it."""
    attention_scale: float  # of the scores q k
    packing: Packing | None  # format of packed weights; None: not packed
    dtype: str
    eos_ids: tuple[int, ...]
    heads: tuple[Heads, ...]
    intermediate_sizes: tuple[int, ...]  # of the MLP by layer; 0: none
    attends: tuple[bool, ...]  # by layer: whether it has attention
    state_layers: tuple[bool, ...]  # by layer: whether it has a recurrent `state`
    attention_gates: bool = False  # attention outputs are gated; the gate is projected with the queries
    value_norm: bool = False  # values are normalized per head, without weights
    state: StateKind | None = None  # recurrent state of layers, instead of or in addition to KV
    layer_scales: bool = False  # each layer's output is multiplied by a scale of its own
    per_layer: PerLayer | None = None
    streams: Streams | None = None
    gate_cuts: tuple[float, ...] = ()
    """Threshold of MLP gates by layer, in standard deviations above their mean; smaller gates become 0. 0: none."""
    rotary_share: float = 1.0  # share of each head that RoPE rotates, from its start
    mlp_bias: bool = False
    down_bias: bool = False  # the MLP's down projection has a bias, even if its other matrices have none
    head_bias: bool = False
    learned_positions: int = 0  # size of the table of learned positions that are added to embeddings; 0: none
    first_position: int = 0  # row of the first position in that table
    token_types: int = 0  # size of the table of token types that are added to embeddings; 0: none
    pair_types: bool = False  # the second sequence of a pair has token type 1
    embedding_norm: bool = False  # embeddings are normalized
    bare_first: bool = False  # the first layer has no norm before attention
    last_norm: bool = True  # there is a norm after the last layer
    distances: Ranges | Slopes | None = None  # bias by distance that is added to scores
    both_ways: bool = False
    """Bidirectional attention (an encoder): over the whole sequence, or over a window on both sides."""
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None  # MLA; then `num_kv_heads` and `head_dim` are those of pages
    norms: Norms = "before"
    qk_norm: HeadNorms = "none"
    layer_norm: bool = False  # norms subtract the mean, too
    norm_bias: bool = False
    norm_offset: float = 0.0  # added to the norm weights of a checkpoint
    activation: Activation = "silu"  # of the MLP's gate
    gated: bool = True  # false: the MLP is down(activation(up(x)))
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of the outputs of attention and MLP
    logits_scale: float = 1.0
    value_scale: float = 1.0
    attention_cap: float = 0.0
    sinks: bool = False  # each head has a sink: a score that takes part in the softmax and has no value
    logits_cap: float = 0.0
    query_growth: QueryGrowth | None = None
    chunked: bool = False  # windows are chunks of the sequence: a token attends to earlier ones of its own chunk
    left_out: tuple[str, ...] = ()
    """Name prefixes of tensors that need not be loaded, such as those of MTP layers."""
    rope_axes: tuple[int, ...] = ()
    """Axis (0 time, 1 row, 2 column) whose position counts for each RoPE pair; empty: all are equal."""
    deep_features: int = 0  # number of first layers after which features of images are added (DeepStack)
    patches: Patches | None = None  # of a vision tower, in place of token embeddings
    num_mtp: int = 0
    """MTP layers of the checkpoint, after the last layer, which predict tokens after the next."""
    mtp: bool = False  # the last layer is the first of them; it is loaded to draft
    other_half: tuple[str, ...] = ()
    """Name prefixes of the vision tensors of a GGUF file, which are not loaded."""

    @property
    def rotary_dim(self) -> int:
        """The number of values of each head that RoPE rotates, for models whose layers do not differ."""
        return int(self.head_dim * self.rotary_share) if self.latent is None else self.head_dim - self.latent.rank

    @property
    def rotary_dims(self) -> tuple[int, ...]:
        """The number of values of each head that RoPE rotates, by RoPE table."""
        if self.latent is not None:
            return (self.rotary_dim,) * len(self.ropes)
        by_table = {table: heads.head_dim for table, heads in zip(self.rotary, self.heads, strict=True)}
        return tuple(int(by_table.get(table, self.head_dim) * self.rotary_share) for table in range(len(self.ropes)))

    @property
    def intermediate_size(self) -> int:
        """The intermediate size of the largest MLP."""
        return max(self.intermediate_sizes)

    def context_len(self, max_seq_len: int | None) -> int:
        """Return the context length in tokens: --max-seq-len, which dynamic RoPE scaling lets exceed the model's, or
        the model's. An encoder's has one token more than positions: the one that ends a request. Raises `ConfigError`.
        """
        own = self.max_position + 1 if self.both_ways else self.max_position
        if max_seq_len is None:
            return own
        is_dynamic = self.ropes[0].rope_type == "dynamic"
        longest = int(self.max_position * self.ropes[0].factor) if is_dynamic else own
        if max_seq_len > longest:
            stretched = f" of {own} with its dynamic scaling" if is_dynamic else ""
            raise ConfigError(f"--max-seq-len {max_seq_len}: must be at most {longest}, the context{stretched}")
        return max_seq_len


def load_config(model_dir: str | Path) -> ModelConfig:
    """Load a model's description: config.json with the EOS ids of generation_config.json. Raises `ConfigError`."""
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
    """Read config.json and generation_config.json; the second is empty if it is missing. Raises `ConfigError`."""
    folder = Path(model_dir)
    raw = _read_json(folder / "config.json", required=True)
    return raw, _read_json(folder / "generation_config.json", required=False)


def is_native(model_dir: str | Path, impl: ModelImpl) -> bool:
    """Return whether native layers run the model, not those of transformers. Raises `ConfigError`."""
    if impl != "auto":
        return impl == "native"
    architecture = ARCHITECTURES.get(_architecture(read_config(model_dir)[0]))
    return architecture is not None and architecture.on_torch


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Parse a config as transformers 4 (rope_theta, rope_scaling, torch_dtype) or 5 (rope_parameters, dtype) writes it.
    Raises `ConfigError`, or `KeyError`, `TypeError` or `ValueError` for malformed fields."""
    architecture = _architecture(raw)
    rules = find_architecture(architecture)
    if is_multimodal(architecture):
        raw = text_config(raw, architecture)
    raw = {**raw, **{name: raw[other] for other, name in rules.fields.items() if other in raw}}
    own = dict(rules.describe(raw))
    num_layers = own.get("num_layers") or int(raw["num_hidden_layers"])
    num_heads = own.get("num_heads") or int(raw["num_attention_heads"])
    if "activation" not in own:
        check_activation(raw)
    head_dim = own.get("head_dim") or int(raw.get("head_dim") or int(raw["hidden_size"]) // num_heads)
    if head_dim < 1:
        raise ConfigError(f"config.json: head_dim: {head_dim}: must be at least 1")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise Unsupported(f"config.json: num_hidden_layers: {num_layers}: must be 1..{MAX_LAYERS}")
    bias = bool(raw.get("attention_bias", False))
    rope, local = own.pop("rope", None) or parse_rope(raw), own.pop("local_rope", None)
    windows, rotated = own.pop("windows", None) or no_windows(raw), own.pop("rotated", (True,) * num_layers)
    kv_heads = own.get("num_kv_heads") or int(raw.get("num_key_value_heads") or num_heads)
    inner = own.pop("intermediate_size", None)
    if "intermediate_sizes" not in own:
        inner = int(raw["intermediate_size"]) if inner is None else inner
        own["intermediate_sizes"] = (inner,) * num_layers
    tables = (0 if window is None or local is None else 1 for window in windows)
    as_llama: dict[str, Any] = {
        "hidden_size": int(raw["hidden_size"]),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "heads": tuple(Heads(kv_heads, head_dim, layer) for layer in range(num_layers)),
        "attends": (True,) * num_layers,
        "state_layers": (False,) * num_layers,
        "vocab_size": int(raw["vocab_size"]),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "ropes": (rope,) if local is None else (rope, local),
        "rotary": tuple(table if turns else None for table, turns in zip(tables, rotated, strict=True)),
        "windows": windows,
        "max_position": own.get("max_position") or context_length(raw, rope),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "qkv_bias": bias,
        "out_bias": bias,
        "attention_scale": float(head_dim**-0.5),
    }
    return ModelConfig(
        architecture=architecture,
        other_half=tuple(raw.get("other_half", ())),
        packing=parse_packing(raw),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_ids=eos_ids(raw, generation or {}),
        **{**as_llama, **own},
    )


NOT_COMPUTED = (
    "architecture",
    "num_kv_heads",
    "head_dim",
    "ropes",
    "rotary_share",
    "max_position",
    "packing",
    "dtype",
    "eos_ids",
    "other_half",
    "num_mtp",
)
"""Fields of `ModelConfig` that the CPU engine does not read."""


def computed(model: ModelConfig, context_len: int) -> dict[str, Any]:
    """Return the fields that the CPU engine reads for sequences of up to `context_len` tokens, encodable by msgspec:
    variants are tagged with their kind, RoPE configs become tables of radians per position."""
    fields = {name: getattr(model, name) for name in ModelConfig.__slots__ if name not in NOT_COMPUTED}
    fields |= {name: {one.kind: one} for name, one in fields.items() if hasattr(one, "kind")}
    dims = zip(model.ropes, model.rotary_dims, strict=True)
    return fields | {
        "inverse_frequencies": [inverse_frequencies(rope, dim, context_len).tolist() for rope, dim in dims],
        "rope_scales": [rope.attention_factor for rope in model.ropes],
        "left_out": (*model.left_out, *model.other_half),
    }


def with_mtp(model: ModelConfig) -> ModelConfig:
    """Return the model with its first MTP layer as one more layer, like the last one. Raises `ConfigError`."""
    if not model.num_mtp:
        raise ConfigError(f"--speculative mtp: {model.architecture}: config.json names no MTP layer that is supported")
    last = model.num_layers
    by_layer = ("attends", "state_layers", "rotary", "intermediate_sizes")
    fields: dict[str, Any] = {name: (*(values := getattr(model, name)), values[-1]) for name in by_layer}
    fields["heads"] = (*model.heads, replace(model.heads[-1], kv_of=last))
    fields["windows"] = (*model.windows, None)
    if model.moe is not None:
        fields["moe"] = replace(model.moe, layers=model.moe.layers | {last})
    return replace(model, num_layers=last + 1, mtp=True, **fields)


def _architecture(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures") or []
    if not architectures:
        raise ConfigError("config.json: architectures: missing: it says which model this is")
    return str(architectures[0])


def eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the EOS ids of config.json and generation_config.json, ascending."""
    return tuple(sorted({*_ids(raw.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}))


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(token_id) for token_id in value] if isinstance(value, list) else [int(value)]


def _read_json(file: Path, *, required: bool) -> dict[str, Any]:
    if not file.is_file():
        if required:
            raise ConfigError(f"{file.parent.name}: no {file.name}: not a model folder")
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file.parent.name}/{file.name}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file.parent.name}/{file.name}: must be a JSON object")
    return content


def tensor_names(config: ModelConfig) -> dict[str, dict[str, list[str]]]:
    """Return the tensor names of the model's parts in checkpoints and in GGUF files."""
    architecture = find_architecture(config.architecture)
    return {
        "checkpoint": with_flat(whole_names(CHECKPOINT, architecture.names, architecture.layers)),
        "gguf": whole_names(GGUF, architecture.gguf_names, ("blk.{layer}",)),
    }
