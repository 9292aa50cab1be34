"""The table of supported architectures: for each, how its config.json differs from a Llama's, and how its files name
the tensors.

An architecture is a function from the config to the fields of `ModelConfig` in which it differs from Llama, and the
names in which its checkpoints and GGUF files differ from Llama's (`weights/names.py`). For models with vision the table
also says which config fields and tensors belong to the text model.

Invariants: an unknown architecture is an error before anything else of its config is read. Only tensors whose names are
known to belong to the vision part are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, ClassVar, Literal

from minisgl.config import ConfigError, Unsupported
from minisgl.models.rope import parse_rope, parse_two_ropes, sharpness
from minisgl.weights.gguf_config import MAMBA2_FIELDS, MAMBA_FIELDS, NEMOTRON_FIELDS
from minisgl.weights.names import PREFIX, Names

Raw = Mapping[str, Any]
Window = Literal["refused", "always", "layers", "switched", "pattern"]
"""Rule for layers with a sliding window. refused: none, and a config with one is an error; always: all, if one is set;
layers: with `use_sliding_window` those of `layer_types`, or from `max_window_layers` on; switched: all, with
`use_sliding_window`; pattern: those of `layer_types`, or all but every `sliding_window_pattern`-th."""
WINDOW = 4096  # default length if a config has a window without one


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture, by its differences from Llama. `describe` returns the differing `ModelConfig` fields for a
    config. `names`, `gguf_names`: tensor names in its files. `interleaved`, `gguf_interleaved`: rows of q and k
    alternate between the two RoPE halves. `gate_up_in_turns`: rows of an expert's fused gate-up tensor alternate.
    `on_torch`: the native torch layers support it. `fields`: config names that differ. `layers`: possible prefixes of a
    layer's tensors. `grouped`: fused qkv is grouped by KV head. `transposed`: matrices are [inputs, outputs].
    `gguf_tiled`: value heads that share a key head are not adjacent. `buffers`: suffixes of tensors without weights."""

    describe: Callable[[Raw], dict[str, Any]]
    names: Names = field(default_factory=dict)
    gguf_names: Names = field(default_factory=dict)
    interleaved: bool = False
    gguf_interleaved: bool = False
    gate_up_in_turns: bool = False
    on_torch: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[str, ...] = ("model.layers.{layer}",)
    grouped: bool = False
    transposed: bool = False
    gguf_tiled: bool = False
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class Heads:
    """KV heads of a layer. `kv_of`: the layer whose KV it uses. `values_are_keys`: values are the projected keys."""

    kv_heads: int
    head_dim: int
    kv_of: int
    values_are_keys: bool = False


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A short-convolution layer: a gated causal convolution over `length` tokens. Its state is the last inputs."""

    kind: ClassVar[str] = "short_conv"
    length: int
    bias: bool


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A gated delta net layer (arXiv 2412.06464). Its state is the last inputs of a convolution over `length` tokens,
    and a matrix [key_dim, value_dim] for each value head. A key head serves several value heads."""

    kind: ClassVar[str] = "delta_net"
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    length: int


Gating = Literal["alone", "before_norm", "behind_norm"]
"""Gating of a Mamba-2 layer's output: a gate alone, the gate before a norm, or the gate behind (after) a norm."""


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A Mamba-2 layer. Its state is the last `length` - 1 inputs of a convolution, and a matrix [size, head_dim] for
    each head. The heads of a group share B and C, and the norm is per group. `factors` multiply gate, x, B, C and dt;
    `out_scale` multiplies the output."""

    kind: ClassVar[str] = "mamba2"
    heads: int
    head_dim: int
    groups: int
    size: int
    length: int
    conv_bias: bool
    least_step: float
    most_step: float | None
    gating: Gating = "before_norm"
    factors: tuple[float, ...] = (1.0,) * 5
    out_scale: float = 1.0


StateKind = ShortConv | DeltaNet | Mamba2
"""Kind of a layer's recurrent state. `kind` is the variant's name in Rust."""


@dataclass(frozen=True, slots=True)
class Streams:
    """AltUp: hidden states in `count` streams (arXiv 2301.13310); LAuReL: a low-`rank` residual next to attention."""

    count: int
    rank: int


@dataclass(frozen=True, slots=True)
class PerLayer:
    """Per-layer embeddings: each layer adds a projection of `size` values of each token's id and embedding."""

    size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Patches:
    """The input of a vision tower: square patches of `size` pixels a side, taken from `frames` equal frames. Blocks of
    `merge` x `merge` patches stand together and become one token. Learned positions are those of a square of `side`
    patches a side. `taps`: layers after which a further merger makes features (DeepStack)."""

    size: int
    frames: int
    merge: int
    side: int
    taps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts of the layers in `layers`. `shared_size`: intermediate size of the shared expert, 0 for none;
    `shared_gated`: a gate of its own weights it. `choice_bias`: a bias is added to the scores that select experts, not
    to their weights. `groups`: experts are selected only from the `chosen_groups` groups with the largest sum of their
    `group_best` best scores. `bias`: experts have biases."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool  # the weights of a token's experts are scaled to sum to 1
    layers: frozenset[int]
    shared_size: int = 0
    shared_gated: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    choice_bias: bool = False
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 2
    least_sum: float = 1e-20  # lower limit of the sum that weights are divided by if they are scaled to sum to 1
    scale: float = 1.0  # factor of the weights, applied last
    sum_bias: bool = False  # bias of the sum of a token's experts
    expert_scale: bool = False  # an additional scale for each expert
    beside: bool = False  # a dense MLP runs in parallel to the experts, each with its own norms
    router_norm: bool = False  # the router reads hidden states normalized with its own weights
    weighs_input: bool = False  # weights multiply the experts' inputs, not their outputs
    router_bias: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ScaledSilu:
    """The activation silu(gate * g) * u * out, where g is the MLP's gate projection and u its up projection."""

    kind: ClassVar[str] = "scaled_silu"
    gate: float
    out: float


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The activation g * sigmoid(alpha * g) * (u + 1), with the gate g <= `limit` and |u| <= `limit`."""

    kind: ClassVar[str] = "clamped_swiglu"
    alpha: float
    limit: float


_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (MLA, arXiv 2405.04434): keys and values of all heads are computed from one latent of
    `rank` values, which a page stores together with the RoPE part of the key, shared by all heads. `query_rank`: size
    of the query latent, 0 for none; `plain_dim`: values of a head without RoPE; `value_dim`: size of a head's value."""

    rank: int
    query_rank: int
    plain_dim: int
    value_dim: int
    norm_eps: float = 1e-6  # of the latents' norms, independent of other norms


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Scale of queries by position: the query at position p is multiplied by 1 + beta ln(1 + floor((p + first) /
    every)). `unrotated`: only in layers without RoPE."""

    beta: float
    every: int
    first: int = 0
    unrotated: bool = False


@dataclass(frozen=True, slots=True)
class Ranges:
    """Relative position bias: distances fall into `count` buckets, each with a learned bias per head that is added to
    scores; distances from `most` on share one. `positions`: maximum sequence length."""

    kind: ClassVar[str] = "ranges"
    count: int
    most: int
    positions: int


@dataclass(frozen=True, slots=True)
class Slopes:
    """ALiBi (arXiv 2108.12409) in both directions: each head adds its slope times the distance between key and query to
    scores. `positions`: maximum sequence length."""

    kind: ClassVar[str] = "slopes"
    by_head: tuple[float, ...]
    positions: int

    @classmethod
    def of(cls, heads: int, positions: int) -> Slopes:
        """Return the slopes of the ALiBi paper: powers of one base; beyond 2^n heads, every other one of 2^(n+1)."""
        whole = 1 << (heads.bit_length() - 1)
        usual = [2.0 ** (-8 * (head + 1) / whole) for head in range(whole)]
        between = [2.0 ** (-4 * (2 * head + 1) / whole) for head in range(heads - whole)]
        return cls(tuple(-slope for slope in [*usual, *between]), positions)


def _moe(raw: Raw, **changes: Any) -> MoeConfig:
    num_layers, step = int(raw["num_hidden_layers"]), int(raw.get("decoder_sparse_step", 1))
    plain = set(raw.get("mlp_only_layers") or ())
    num_experts, per_token = _int_field(raw, _NUM_EXPERTS), _int_field(raw, _PER_TOKEN)
    if not 1 <= per_token <= num_experts:
        raise ConfigError(f"config.json: num_experts_per_tok: {per_token}: must be between 1 and {num_experts}")
    fields: dict[str, Any] = {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "norm_topk_prob": bool(raw.get("norm_topk_prob", False)),
        "layers": frozenset(i for i in range(num_layers) if i not in plain and (i + 1) % step == 0),
    }
    fields["intermediate_size"] = _int_field(raw, (changes.pop("size", "moe_intermediate_size"),))
    return MoeConfig(**{**fields, **changes})


def _int_field(raw: Raw, names: tuple[str, ...]) -> int:
    """Return an integer field of the config by the first of its names. A list (Hunyuan) must have equal elements."""
    name = next((name for name in names if raw.get(name) is not None), names[0])
    value = raw[name]
    if isinstance(value, list):
        if not value or any(element != value[0] for element in value):
            raise ConfigError(f"config.json: {name}: {value}: different values by layer are not supported")
        value = value[0]
    return int(value)


def _grouped_moe(raw: Raw, **changes: Any) -> MoeConfig:
    """Return the MoE settings of DeepSeek V3's routing (arXiv 2412.19437): sigmoid scores, a bias that balances the
    selection, expert groups, dense first layers and shared experts."""
    num_layers, first = int(raw["num_hidden_layers"]), int(raw.get("first_k_dense_replace") or 0)
    groups, chosen = int(raw.get("n_group") or 1), int(raw.get("topk_group") or 1)
    moe = _moe(
        raw,
        **{
            "layers": frozenset(range(first, num_layers)),
            "score": "sigmoid",
            "choice_bias": True,
            "groups": groups,
            "chosen_groups": chosen,
            "scale": float(raw.get("routed_scaling_factor") or 1.0),
            "shared_size": int(raw.get("n_shared_experts") or 0) * int(raw["moe_intermediate_size"]),
            **changes,
        },
    )
    if (
        not 1 <= chosen <= groups
        or moe.num_experts % groups
        or moe.experts_per_token * groups > chosen * moe.num_experts
    ):
        raise ConfigError(
            f"config.json: n_group {groups}, topk_group {chosen}: n_group must divide {moe.num_experts} "
            f"experts, and topk_group groups must have {moe.experts_per_token} or more"
        )
    return moe


def _mtp(raw: Raw) -> tuple[str, ...]:
    """Return the tensor name prefixes of MTP layers, which follow the last layer and predict further tokens."""
    last, more = int(raw["num_hidden_layers"]), int(raw.get("num_nextn_predict_layers") or 0)
    return tuple(f"{prefix}.{layer}." for layer in range(last, last + more) for prefix in ("model.layers", "blk"))


def _mtp_fields(raw: Raw) -> dict[str, Any]:
    """Return the fields of MTP layers that are like the model's own, with a projection before and a norm after them."""
    return {"left_out": _mtp(raw), "num_mtp": int(raw.get("num_nextn_predict_layers") or 0)}


def _windows(raw: Raw, rule: Window, rotated: tuple[bool, ...] = (), *, every: int = 6) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None for full attention. `rotated`: if given, layers without RoPE have
    no window unless `layer_types` says so. `every`: default of the pattern's length."""
    num_layers = int(raw["num_hidden_layers"])
    window, types = raw.get("sliding_window", WINDOW), raw.get("layer_types")
    switched_on = bool(raw.get("use_sliding_window"))
    if rule == "refused":
        if switched_on:
            raise ConfigError("config.json: use_sliding_window: true is not supported with this architecture")
        return (None,) * num_layers
    if rule == "pattern":
        if window is None:
            raise ConfigError("config.json: sliding_window: missing")
        types = types or _pattern(raw, num_layers, every)
    if window is None or (rule not in ("always", "pattern") and not switched_on):
        window = None
    elif int(window) < 1:
        raise ConfigError(f"config.json: sliding_window: {window}: must be at least 1")
    if rule == "layers" and not rotated and types is None:
        first = int(raw.get("max_window_layers", 28))
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if types is None and rotated:
        types = ["full_attention" if has_rope else "sliding_attention" for has_rope in rotated]
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * num_layers
    if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ConfigError("config.json: layer_types: must be full_attention or sliding_attention for each layer")
    if rule not in ("layers", "pattern") and window is not None and "full_attention" in types:
        raise ConfigError("config.json: layer_types: must be sliding_attention for each layer")
    return tuple(None if window is None or kind == "full_attention" else int(window) for kind in types)


def _pattern(raw: Raw, num_layers: int, every: int) -> list[str]:
    every = int(raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or every)
    return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(num_layers)]


def _rotated(raw: Raw) -> tuple[bool, ...]:
    """Return which layers apply RoPE: those listed, or all but every n-th (SmolLM3; arXiv 2501.18795)."""
    num_layers = int(raw["num_hidden_layers"])
    given, step = raw.get("no_rope_layers"), int(raw.get("no_rope_layer_interval") or 4)
    if given is None:
        return tuple((i + 1) % step != 0 for i in range(num_layers))
    if len(given) < num_layers or any(flag not in (0, 1) for flag in given):
        raise ConfigError("config.json: no_rope_layers: must be 1 (rotated) or 0 for each layer")
    return tuple(bool(flag) for flag in given[:num_layers])


def _refuse_fields(raw: Raw, *fields: str) -> None:
    """Raise `ConfigError` if one of these config fields is set: they would change the computation."""
    for name in fields:
        if raw.get(name):
            problem = f"config.json: {name}: {raw[name]} is not supported"
            raise ConfigError(f"{problem} (by transformers' code: --model-impl transformers)")


_NO_BIAS = {"qkv_bias": False, "out_bias": False}
_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}


def _attention_bias(raw: Raw, otherwise: bool) -> dict[str, Any]:
    return dict.fromkeys(_NO_BIAS, bool(raw.get("attention_bias", otherwise)))


def _llama(raw: Raw) -> dict[str, Any]:
    return {"mlp_bias": bool(raw.get("mlp_bias", False))}


def _mistral(raw: Raw) -> dict[str, Any]:
    return {**_NO_BIAS, "windows": _windows(raw, "always")}


def _qwen2(raw: Raw) -> dict[str, Any]:
    return {"qkv_bias": True, "out_bias": False, "windows": _windows(raw, "layers")}


def _qwen3(raw: Raw) -> dict[str, Any]:
    return {"qk_norm": "head", "windows": _windows(raw, "layers")}


def _qwen3_classes(raw: Raw) -> dict[str, Any]:
    """Return the fields of a Qwen3 classifier. Its files have no LM head; `engine/heads.py` reads the classification
    head."""
    return {**_qwen3(raw), "tie_word_embeddings": True, "left_out": ("score.", "cls.")}


def _qwen3_moe(raw: Raw) -> dict[str, Any]:
    return {"qk_norm": "head", "windows": _windows(raw, "switched"), "moe": _moe(raw)}


def _qwen3_vl_moe(raw: Raw) -> dict[str, Any]:
    return {"qk_norm": "head", "moe": _moe({**raw, "norm_topk_prob": True})}


def _smollm3(raw: Raw) -> dict[str, Any]:
    rotated = _rotated(raw)
    return {**_llama(raw), "rotated": rotated, "windows": _windows(raw, "layers", rotated)}


def _gemma(raw: Raw) -> dict[str, Any]:
    """Return the fields of Gemma: norm weights are stored minus 1, embeddings are scaled by sqrt(hidden size) and tied,
    GELU."""
    _refuse_fields(raw, "use_bidirectional_attention")
    return {
        "activation": check_activation(raw, "gelu", "hidden_activation"),
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(int(raw["hidden_size"])),
        "head_dim": int(raw.get("head_dim") or 256),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _gemma2(raw: Raw) -> dict[str, Any]:
    """Return the fields of Gemma 2: norms before and after attention and MLP; scores scaled by `query_pre_attn_scalar`
    and soft-capped, logits soft-capped; every second layer has full attention."""
    return {
        **_gemma(raw),
        "norms": "both",
        "attention_scale": _query_scale(raw),
        "attention_cap": float(raw.get("attn_logit_softcapping", 50.0) or 0.0),
        "logits_cap": float(raw.get("final_logit_softcapping", 30.0) or 0.0),
        "windows": _windows(raw, "pattern", every=2),
    }


def _gemma3(raw: Raw) -> dict[str, Any]:
    """Return the fields of Gemma 3 (arXiv 2503.19786): q and k norms, not Gemma 2's caps; windowed layers have a RoPE
    of their own."""
    _refuse_fields(raw, "attn_logit_softcapping", "final_logit_softcapping")
    rope, local = parse_two_ropes(raw, 1e6, float(raw.get("rope_local_base_freq") or 10_000.0))
    for parsed in (rope, local):
        if parsed.rope_type not in ("default", "linear"):
            raise ConfigError(f"config.json: rope_type: {parsed.rope_type!r} is not supported with this architecture")
    return {
        **_gemma(raw),
        "norms": "both",
        "qk_norm": "head",
        "attention_scale": _query_scale(raw),
        "windows": _windows(raw, "pattern"),
        "rope": rope,
        "local_rope": local,
    }


def _gemma4(raw: Raw) -> dict[str, Any]:
    """Return the fields of Gemma 4: layers with full attention have their own head size, possibly fewer KV heads, and
    keys that serve as values; the last layers attend to the KV of the last earlier layer of their kind. Scores are not
    scaled; values are normalized. Layers may have per-layer embeddings, and experts in addition to the MLP."""
    raw = {"layer_types": _pattern(raw, int(raw["num_hidden_layers"]), 6), **raw, "query_pre_attn_scalar": 1}
    raw = {**raw, "layer_types": [*raw["layer_types"][:-1], "full_attention"]}
    windows = _windows({"sliding_window": 512, **raw}, "pattern")
    heads = _gemma4_heads(raw, windows)
    inner, wide = int(raw["intermediate_size"]), bool(raw.get("use_double_wide_mlp"))
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raw = {**raw, "rope_parameters": _GEMMA4_ROPE}
    size = int(raw.get("hidden_size_per_layer_input") or 0)
    return {
        **_shared_kv(raw, windows, heads),
        **_attention_bias(raw, False),
        "intermediate_sizes": tuple(
            2 * inner if wide and layer_heads.kv_of != layer else inner for layer, layer_heads in enumerate(heads)
        ),
        "layer_scales": True,
        "per_layer": PerLayer(size, int(raw.get("vocab_size_per_layer_input") or 262_144)) if size else None,
        "moe": _moe(raw, norm_topk_prob=True, expert_scale=True, beside=True, router_norm=True)
        if raw.get("enable_moe_block")
        else None,
    }


def _shared_kv(raw: Raw, windows: tuple[int | None, ...], heads: tuple[Heads, ...]) -> dict[str, Any]:
    """Return the fields that Gemma 3n and 4 share. k and v weights of layers that store no KV are left out."""
    rope, local = parse_two_ropes(raw, 1e6, float(raw.get("rope_local_base_freq") or 10_000.0))
    checkpoint, gguf = ("self_attn.k_", "self_attn.v_"), ("attn_k.", "attn_v.", "attn_k_norm.")
    layers = [layer for layer, layer_heads in enumerate(heads) if layer_heads.kv_of != layer]
    return {
        **_gemma(raw),
        "norm_offset": 0.0,
        "norms": "both",
        "qk_norm": "head",
        "attention_scale": 1.0,
        "logits_cap": float(raw.get("final_logit_softcapping") or 0.0),
        "windows": windows,
        "rope": rope,
        "local_rope": local,
        "heads": heads,
        "value_norm": True,
        "left_out": tuple(
            f"{prefix}.{layer}.{part}"
            for layer in layers
            for prefix, parts in (("model.layers", checkpoint), ("blk", gguf))
            for part in parts
        ),
    }


def _gemma3n(raw: Raw) -> dict[str, Any]:
    """Return the fields of Gemma 3n: AltUp streams, a low-rank residual, sparsified MLP gates in the first layers. As
    in Gemma 4, last layers reuse the KV of others, scores are unscaled, values normalized, and there are per-layer
    embeddings."""
    num_layers = int(raw["num_hidden_layers"])
    raw = {"layer_types": _pattern(raw, num_layers, 5), "num_kv_shared_layers": 15, "laurel_rank": 64, **raw}
    raw = {"vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256, "altup_num_inputs": 4, **raw}
    raw = {"final_logit_softcapping": 30.0, **raw}
    _refuse_fields(raw, "altup_active_idx", "attention_bias")
    if not raw.get("altup_correct_scale", True):
        raise ConfigError("config.json: altup_correct_scale: false is not supported")
    windows = _windows({"sliding_window": 512, **raw}, "pattern")
    heads = _gemma4_heads({**raw, "global_head_dim": raw.get("head_dim") or 256}, windows)
    inner = raw["intermediate_size"]
    inner_sizes = tuple(map(int, inner)) if isinstance(inner, list) else (int(inner),) * num_layers
    return {
        **_shared_kv(raw, windows, heads),
        "intermediate_sizes": inner_sizes,
        "per_layer": PerLayer(int(raw["hidden_size_per_layer_input"]), int(raw["vocab_size_per_layer_input"])),
        "streams": Streams(int(raw["altup_num_inputs"]), int(raw["laurel_rank"])),
        "gate_cuts": _gate_cuts(raw, num_layers),
    }


def _gate_cuts(raw: Raw, num_layers: int) -> tuple[float, ...]:
    """Return by layer the gate threshold in standard deviations, below which a share `activation_sparsity_pattern` of a
    normal distribution lies; 0 for none. GGUF files store the threshold itself."""
    if (scales := raw.get("activation_sparsity_scale")) is not None:
        return tuple(float(scale) for scale in scales)
    given = raw.get("activation_sparsity_pattern")
    shares = [0.95] * 10 + [0.0] * (num_layers - 10) if given is None and num_layers > 10 else given or 0.0
    shares = shares if isinstance(shares, list) else [shares] * num_layers
    if len(shares) != num_layers or not all(0 <= share < 1 for share in shares):
        raise ConfigError(
            f"config.json: activation_sparsity_pattern: {shares}: must be between 0 and 1, one for each layer"
        )
    return tuple(NormalDist().inv_cdf(share) if share else 0.0 for share in shares)


_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def _gemma4_heads(raw: Raw, windows: tuple[int | None, ...]) -> tuple[Heads, ...]:
    """Return the KV heads of Gemma 4's layers, from transformers' `per_layer_config` or from `global_head_dim` and
    `num_global_key_value_heads` of Google's files."""
    by_layer, k_is_v = raw.get("per_layer_config") or {}, bool(raw.get("attention_k_eq_v"))
    plain = {"head_dim": int(raw.get("head_dim") or 256), "num_key_value_heads": int(raw["num_key_value_heads"])}
    full = {**plain, "head_dim": int(raw.get("global_head_dim") or 512)}
    if k_is_v and raw.get("num_global_key_value_heads") is not None:
        full["num_key_value_heads"] = int(raw["num_global_key_value_heads"])
    first = len(windows) - int(raw.get("num_kv_shared_layers") or 0)
    heads: list[Heads] = []
    for layer, window in enumerate(windows):
        own = {**(full if window is None else plain), **(by_layer.get(str(layer)) or {})}
        alike = [other for other in range(min(layer, first)) if (windows[other] is None) == (window is None)]
        if layer >= first and not alike:
            raise ConfigError(
                f"config.json: num_kv_shared_layers: layer {layer} has no earlier layer of its kind to share with"
            )
        kv_of, sizes = (alike[-1] if layer >= first else layer), (own["num_key_value_heads"], own["head_dim"])
        heads.append(Heads(int(sizes[0]), int(sizes[1]), kv_of, k_is_v and window is None))
    return tuple(heads)


def _query_scale(raw: Raw) -> float:
    size = float(raw.get("query_pre_attn_scalar", 256))
    if size <= 0:
        raise ConfigError(f"config.json: query_pre_attn_scalar: {size:g}: must be more than 0")
    return float(size**-0.5)


def no_windows(raw: Raw) -> tuple[int | None, ...]:
    return _windows(raw, "refused")


_ACTIVATIONS = {
    "silu": ("silu",),
    "gelu": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "gelu_erf": ("gelu",),
    "relu2": ("relu2",),
}


def check_activation(raw: Raw, wanted: str = "silu", name: str = "hidden_act") -> str:
    names = _ACTIVATIONS[wanted]
    if (activation := raw.get(name) or names[0]) not in names:
        raise ConfigError(f"config.json: {name}: {activation!r} is not supported: only {names[0]}")
    return wanted


def _either_gelu(raw: Raw, default: str, name: str = "hidden_act") -> str:
    activation = raw.get(name) or default
    return check_activation({name: activation}, "gelu_erf" if activation == "gelu" else "gelu", name)


def _phi3(raw: Raw) -> dict[str, Any]:
    """Return the fields of Phi-3, 3.5, 4 and 4-mini: RoPE on a part of each head, longrope factors by dimension for
    long contexts. `su` and `yarn` are older names of longrope."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = dict(raw.get(key) or {})
    if (scaling.get("rope_type") or scaling.get("type")) in ("su", "yarn"):
        raw = {**raw, key: {**scaling, "rope_type": "longrope"}}
    return {**_NO_BIAS, **_partial(raw, 1.0), "windows": _windows({"sliding_window": None, **raw}, "always")}


def _partial(raw: Raw, share: float) -> dict[str, Any]:
    """Return the fields for RoPE on the first part of each head; `share` is the architecture's default."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rotated = float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or share)
    return {"rope": parse_rope(raw, partial=True), "rotary_share": rotated}


def _granite(raw: Raw) -> dict[str, Any]:
    return {
        **_llama(raw),
        "embedding_scale": float(raw.get("embedding_multiplier", 1.0)),
        "residual_scale": float(raw.get("residual_multiplier", 1.0)),
        "attention_scale": float(raw.get("attention_multiplier", 1.0)),
        "logits_scale": 1.0 / float(raw.get("logits_scaling", 1.0)),
    }


def _granite_moe(raw: Raw) -> dict[str, Any]:
    shared = int(raw.get("shared_intermediate_size") or 0)
    moe = _moe(raw, size="intermediate_size", norm_topk_prob=True, shared_size=shared)
    return {**_granite(raw), "mlp_bias": False, "moe": moe}


def _olmo2(raw: Raw) -> dict[str, Any]:
    """Return the fields of OLMo 2: norms only after attention and MLP; q and k are normalized over all heads at
    once."""
    return {"norms": "behind", "qk_norm": "whole"}


def _olmo3(raw: Raw) -> dict[str, Any]:
    """Return the fields of OLMo 3: layers with a window use RoPE without the scaling of the other layers."""
    rope, local = parse_two_ropes(raw, 500_000.0, None)
    return {**_olmo2(raw), "windows": _windows(raw, "pattern", every=4), "rope": rope, "local_rope": local}


def _olmoe(raw: Raw) -> dict[str, Any]:
    _refuse_fields(raw, "clip_qkv")
    return {"qk_norm": "whole", "moe": _moe(raw, size="intermediate_size")}


def _mixtral(raw: Raw) -> dict[str, Any]:
    windows = _windows({"sliding_window": None, **raw}, "always")
    return {**_NO_BIAS, "windows": windows, "moe": _moe(raw, size="intermediate_size", norm_topk_prob=True)}


def _minimax_m2(raw: Raw) -> dict[str, Any]:
    """MiniMax M2: Mixtral's experts, chosen by sigmoids with a bias, and norms of q and k over all heads at once."""
    share = float(raw.get("rotary_dim") or raw["head_dim"]) / float(raw["head_dim"])
    moe = _moe(raw, size="intermediate_size", norm_topk_prob=True, score="sigmoid", choice_bias=True)
    return {**_NO_BIAS, **_partial(raw, share), "qk_norm": "whole", "moe": moe}


def _qwen2_moe(raw: Raw) -> dict[str, Any]:
    shared = int(raw.get("shared_expert_intermediate_size", 5632))
    return {
        "qkv_bias": bool(raw.get("qkv_bias", True)),
        "out_bias": False,
        "windows": _windows(raw, "layers"),
        "moe": _moe(raw, shared_size=shared, shared_gated=True),
    }


_LAYER_NORM = {"layer_norm": True, "norm_bias": True}


def _stablelm(raw: Raw) -> dict[str, Any]:
    return {
        **_LAYER_NORM,
        **_partial(raw, 0.25),
        "norm_eps": float(raw.get("layer_norm_eps", 1e-5)),
        "qkv_bias": bool(raw.get("use_qkv_bias", False)),
        "out_bias": False,
        "qk_norm": "heads" if raw.get("qk_layernorm") else "none",
        "norms": "parallel" if raw.get("use_parallel_residual") else "before",
    }


def _starcoder2(raw: Raw) -> dict[str, Any]:
    return {
        **_LAYER_NORM,
        **dict.fromkeys(_BIASES, bool(raw.get("use_bias", True))),
        "norm_eps": float(raw.get("norm_epsilon", 1e-5)),
        "activation": check_activation(raw, "gelu"),
        "gated": False,
        "windows": _windows({"sliding_window": None, **raw}, "always"),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _cohere(raw: Raw) -> dict[str, Any]:
    """Return the fields of Cohere: attention and MLP read the output of one norm, and both are added to the
    residual."""
    return {
        "layer_norm": True,
        "norm_eps": float(raw.get("layer_norm_eps", 1e-5)),
        "norms": "parallel",
        "qk_norm": "heads" if raw.get("use_qk_norm") else "none",
        "logits_scale": float(raw.get("logit_scale", 0.0625)),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _cohere2(raw: Raw) -> dict[str, Any]:
    """Return the fields of Cohere 2: only layers with a window apply RoPE."""
    windows = _windows(raw, "pattern", every=4)
    return {**_cohere(raw), "windows": windows, "rotated": tuple(window is not None for window in windows)}


def _glm(raw: Raw) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias", True))
    return {**_partial(raw, 0.5), "qkv_bias": bias, "out_bias": False, "head_dim": int(raw.get("head_dim") or 128)}


def _glm4(raw: Raw) -> dict[str, Any]:
    return {**_glm(raw), "norms": "both"}


def _ernie(raw: Raw) -> dict[str, Any]:
    return {
        **dict.fromkeys(_BIASES, bool(raw.get("use_bias", False))),
        "rope": parse_rope(raw, theta=500_000.0),
        "head_dim": int(raw.get("head_dim") or 128),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _glm4_moe(raw: Raw) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias", False))
    return {
        **_partial(raw, 0.5),
        "qkv_bias": bias,
        "out_bias": False,
        "qk_norm": "head" if raw.get("use_qk_norm") else "none",
        "moe": _grouped_moe(raw),
        **_mtp_fields(raw),
    }


def _dots1(raw: Raw) -> dict[str, Any]:
    windows = _windows({**raw, "use_sliding_window": True}, "layers")
    return {"qk_norm": "head", "windows": windows, "moe": _grouped_moe(raw)}


def _ernie_moe(raw: Raw) -> dict[str, Any]:
    """Return the fields of ERNIE 4.5 MoE: some layers have experts. Biases are refused, because the head would have
    one, too."""
    _refuse_fields(raw, "use_bias")
    last = int(raw["num_hidden_layers"]) - 1
    step, first = int(raw.get("moe_layer_interval") or 1), int(raw.get("moe_layer_start_index", 1) or 0)
    end = int(raw.get("moe_layer_end_index", -1))
    size = _int_field(raw, ("moe_intermediate_size",))
    moe = _moe(
        raw,
        norm_topk_prob=True,
        layers=frozenset(i for i in range(first, (last if end == -1 else end) + 1) if (i + 1) % step == 0),
        choice_bias=True,
        least_sum=float(raw.get("moe_norm_min", 1e-12)),
        shared_size=int(raw.get("moe_num_shared_experts", 2) or 0) * size,
    )
    return {**_ernie(raw), "moe": moe, "left_out": ("model.mtp_", *_mtp(raw))}


def _exaone4(raw: Raw) -> dict[str, Any]:
    """Return the fields of EXAONE 4: if some layers have a window, only those apply RoPE."""
    num_layers = int(raw["num_hidden_layers"])
    if raw.get("sliding_window") is None:
        return {**_NO_BIAS, "norms": "behind", "qk_norm": "head"}
    pattern = raw.get("sliding_window_pattern")
    if isinstance(pattern, str):  # one period of the pattern, such as LLLG; the last layer is always G
        kinds = {"L": "sliding_attention", "G": "full_attention"}
        turns = [kinds[pattern[i % len(pattern)]] for i in range(num_layers - 1)]
        raw = {"layer_types": [*turns, "full_attention"], **raw, "sliding_window_pattern": None}
    windows = _windows(raw, "pattern", every=4)
    rotated = tuple(window is not None for window in windows)
    return {**_NO_BIAS, "norms": "behind", "qk_norm": "head", "windows": windows, "rotated": rotated}


def _seed_oss(raw: Raw) -> dict[str, Any]:
    return {
        **_llama(raw),
        "qkv_bias": bool(raw.get("attention_bias", True)),
        "out_bias": bool(raw.get("attention_out_bias", False)),
        "head_dim": int(raw.get("head_dim") or 128),
    }


def _arcee(raw: Raw) -> dict[str, Any]:
    return {**_llama(raw), "activation": check_activation(raw, "relu2"), "gated": False}


def _ministral3(raw: Raw) -> dict[str, Any]:
    """Return the fields of Ministral 3: queries are scaled by their position, as in Llama 4."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    original = int(scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"])
    return {
        **_NO_BIAS,
        "windows": _windows({"sliding_window": None, **raw}, "always"),
        "rope": parse_rope(raw, theta=1e6, query_growth=True),
        "query_growth": QueryGrowth(float(scaling.get("llama_4_scaling_beta") or 0.0), original),
        "head_dim": int(raw.get("head_dim") or 128),
    }


def _mistral_or_ministral(raw: Raw) -> dict[str, Any]:
    """Return the fields of the text model of Mistral 3, which is either a Ministral 3 or a Mistral."""
    return _ministral3(raw) if raw.get("model_type") == "ministral3" else _mistral(raw)


def _hunyuan(raw: Raw) -> dict[str, Any]:
    """Return the fields of Hunyuan: q and k norms after RoPE; `alpha` enlarges the RoPE base (NTK)."""
    size = int(raw.get("head_dim") or int(raw["hidden_size"]) // int(raw["num_attention_heads"]))
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = dict(raw.get(key) or {})
    if alpha := float(scaling.pop("alpha", 0) or 0):
        theta = float(scaling.pop("rope_theta", 0) or raw.get("rope_theta") or 10_000.0)
        raw = {**raw, key: {"rope_theta": theta * alpha ** (size / (size - 2))}}
    return {"qk_norm": "rotated", "rope": parse_rope(raw), **_attention_bias(raw, False)}


def _latent(raw: Raw) -> dict[str, Any]:
    """Return the fields of MLA: attention has one KV head, whose first `rank` values, the latent, serve as values."""
    _refuse_fields(raw, "attention_bias", "index_topk")
    if not raw.get("rope_interleave", True):
        raise ConfigError("config.json: rope_interleave: false is not supported")
    rank, plain, rotated = (int(raw[name]) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"))
    rope = parse_rope(raw)
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    scale = float((plain + rotated) ** -0.5)
    if rope.rope_type != "default" and (by := float(scaling.get("mscale_all_dim") or 0)):
        scale *= sharpness(rope.factor, by) ** 2
    return {
        "latent": LatentConfig(rank, int(raw.get("q_lora_rank") or 0), plain, int(raw["v_head_dim"])),
        "rope": rope,
        "attention_scale": scale,
        "num_kv_heads": 1,
        "head_dim": rank + rotated,
        **_mtp_fields(raw),
    }


def _deepseek2(raw: Raw) -> dict[str, Any]:
    """Return the fields of DeepSeek V2: experts are selected by softmax scores, groups by their best expert."""
    _refuse_fields(raw, "norm_topk_prob")
    method = raw.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"config.json: topk_method: {method!r} is not supported: only greedy, group_limited_greedy")
    grouped = method != "greedy"
    groups = {"groups": int(raw["n_group"]), "chosen_groups": int(raw["topk_group"])} if grouped else {}
    routing = {"score": "softmax", "choice_bias": False, "groups": 1, "chosen_groups": 1, "group_best": 1}
    moe = _grouped_moe(raw, **{**routing, **groups})
    return {**_latent(raw), "mlp_bias": bool(raw.get("mlp_bias", False)), "moe": moe}


def _deepseek3(raw: Raw) -> dict[str, Any]:
    return {**_latent(raw), "moe": _grouped_moe(raw)}


def _glm4_moe_lite(raw: Raw) -> dict[str, Any]:
    num_layers = int(raw["num_hidden_layers"])
    kinds = raw.get("mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers - 1)
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise ConfigError("config.json: mlp_layer_types: must be dense or sparse for each layer")
    layers = frozenset(i for i, kind in enumerate(kinds) if kind == "sparse")
    return {**_latent(raw), "moe": _grouped_moe(raw, layers=layers)}


def _minicpm3(raw: Raw) -> dict[str, Any]:
    """Return the fields of MiniCPM 3: MLA with scales of embeddings, of residuals (by the number of layers) and of
    logits."""
    num_layers, size = int(raw["num_hidden_layers"]), int(raw["hidden_size"])
    value_dim = int(raw.get("v_head_dim") or size // int(raw["num_attention_heads"]))
    depth = raw.get("scale_depth", 1.4)
    return {
        **_latent({**raw, "v_head_dim": value_dim}),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-5)),
        "embedding_scale": float(raw.get("scale_emb", 12)),
        "residual_scale": 1.0 if depth is None else float(depth) / math.sqrt(num_layers),
        "logits_scale": float(raw.get("dim_model_base", 256) or size) / size,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _hunyuan_moe(raw: Raw) -> dict[str, Any]:
    """Return the fields of Hunyuan MoE: every layer has experts and one shared expert of the same size."""
    _refuse_fields(raw, "use_cla", "moe_layer_num_skipped")
    for name, wanted in (("moe_intermediate_size", int(raw["intermediate_size"])), ("num_shared_expert", 1)):
        if raw.get(name) is not None and (value := _int_field(raw, (name,))) != wanted:
            raise ConfigError(f"config.json: {name}: {value} is not supported: only {wanted}")
    moe = _moe(raw, size="intermediate_size", norm_topk_prob=True, shared_size=int(raw["intermediate_size"]))
    return {**_hunyuan(raw), "moe": moe}


_OPENAI_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
    "rope_theta": 150_000.0,
}


def _gpt_oss(raw: Raw) -> dict[str, Any]:
    """Return the fields of gpt-oss: each head has an attention sink, every second layer has full attention, experts
    have biases."""
    check_activation(raw)
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raw = {**raw, "rope_parameters": _OPENAI_ROPE}
    return {
        **_attention_bias(raw, True),
        "sinks": True,
        "windows": _windows({"sliding_window": 128, **raw}, "pattern", every=2),
        "rope": parse_rope(raw, theta=150_000.0),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-5)),
        "head_dim": int(raw.get("head_dim") or 64),
        "activation": ClampedSwiglu(float(raw.get("swiglu_alpha", 1.702)), float(raw.get("swiglu_limit", 7.0))),
        "moe": _moe(raw, size="intermediate_size", norm_topk_prob=True, router_bias=True, bias=True),
    }


def _nemotron(raw: Raw) -> dict[str, Any]:
    return {
        **_LAYER_NORM,
        **_partial(raw, 0.5),
        **_llama(raw),
        "norm_eps": float(raw.get("norm_eps", 1e-5)),
        "norm_offset": 1.0,
        "activation": check_activation(raw, "relu2"),
        "gated": False,
    }


def _phi(raw: Raw) -> dict[str, Any]:
    _refuse_fields(raw, "qk_layernorm")
    return {
        **_LAYER_NORM,
        **_BIASES,
        **_partial(raw, 0.5),
        "norm_eps": float(raw.get("layer_norm_eps", 1e-5)),
        "norms": "parallel",
        "activation": _either_gelu(raw, "gelu_new"),
        "gated": False,
        "head_bias": True,
    }


def _falcon(raw: Raw) -> dict[str, Any]:
    """Return the fields of Falcon models of all generations; `new_decoder_architecture` is that of 40B."""
    _refuse_fields(raw, "alibi")
    new = bool(raw.get("new_decoder_architecture", False))
    one_kv_head = not new and bool(raw.get("multi_query", True))
    if new:
        norms = "parallel" if raw.get("num_ln_in_parallel_attn") == 1 else "apart"
    else:
        norms = "parallel" if raw.get("parallel_attn", True) else "before"
    return {
        **_LAYER_NORM,
        **dict.fromkeys(_BIASES, bool(raw.get("bias", False))),
        "norm_eps": float(raw.get("layer_norm_epsilon", 1e-5)),
        "norms": norms,
        "num_kv_heads": 1 if one_kv_head else int(raw.get("num_kv_heads") or raw["num_attention_heads"]),
        "intermediate_size": int(raw.get("ffn_hidden_size") or 4 * int(raw["hidden_size"])),
        "activation": _either_gelu(raw, "gelu", "activation"),
        "gated": False,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _gpt2(raw: Raw) -> dict[str, Any]:
    """Return the fields of GPT-2, and GPTBigCode, which may have a single KV head."""
    _refuse_fields(raw, "scale_attn_by_inverse_layer_idx", "add_cross_attention")
    head_dim = int(raw["hidden_size"]) // int(raw["num_attention_heads"])
    return {
        **_LAYER_NORM,
        **_BIASES,
        "norm_eps": float(raw.get("layer_norm_epsilon", 1e-5)),
        "num_kv_heads": 1 if raw.get("multi_query") else int(raw["num_attention_heads"]),
        "attention_scale": float(head_dim**-0.5) if raw.get("scale_attn_weights", True) else 1.0,
        "rotated": (False,) * int(raw["num_hidden_layers"]),
        "learned_positions": int(raw["max_position_embeddings"]),
        "intermediate_size": int(raw.get("n_inner") or 4 * int(raw["hidden_size"])),
        "activation": _either_gelu(raw, "gelu_new", "activation_function"),
        "gated": False,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _gpt_bigcode(raw: Raw) -> dict[str, Any]:
    return _gpt2({"multi_query": True, "activation_function": "gelu_pytorch_tanh", **raw})


def _gpt_neox(raw: Raw) -> dict[str, Any]:
    return {
        **_LAYER_NORM,
        **_attention_bias(raw, True),
        **_partial({"rope_theta": raw.get("rotary_emb_base"), **raw}, float(raw.get("rotary_pct") or 0.25)),
        "norm_eps": float(raw.get("layer_norm_eps", 1e-5)),
        "num_kv_heads": int(raw["num_attention_heads"]),
        "mlp_bias": True,
        "norms": "apart" if raw.get("use_parallel_residual", True) else "before",
        "activation": _either_gelu(raw, "gelu"),
        "gated": False,
    }


def _encoder(raw: Raw) -> dict[str, Any]:
    """Return the fields that encoders share since BERT (arXiv 1810.04805): norms after the residual additions,
    bidirectional attention, no LM head."""
    _refuse_fields(raw, "is_decoder", "add_cross_attention")
    num_layers = int(raw["num_hidden_layers"])
    return {
        **_LAYER_NORM,
        **_BIASES,
        "norm_eps": float(raw.get("layer_norm_eps", 1e-12)),
        "norms": "over",
        "embedding_norm": True,
        "last_norm": False,
        "both_ways": True,
        "gated": False,
        "rotated": (False,) * num_layers,
        "windows": (None,) * num_layers,
        "tie_word_embeddings": True,
        "left_out": _HEADS,
    }


def _bert(raw: Raw) -> dict[str, Any]:
    if (kind := raw.get("position_embedding_type") or "absolute") != "absolute":
        raise ConfigError(f"config.json: position_embedding_type: {kind!r} is not supported: only absolute")
    return {
        **_encoder(raw),
        "activation": _either_gelu(raw, "gelu"),
        "learned_positions": int(raw["max_position_embeddings"]),
        "token_types": (kinds := int(raw.get("type_vocab_size", 2))),
        # "pair_types" is our own field, set for other models with BERT's architecture
        "pair_types": kinds > 1 and bool(raw.get("pair_types", True)),
    }


def _roberta(raw: Raw) -> dict[str, Any]:
    """Return the fields of RoBERTa: the position table starts after the row of the padding id."""
    first, rows = int(raw.get("pad_token_id", 1)) + 1, int(raw["max_position_embeddings"])
    if not 0 <= first < rows:
        raise ConfigError(f"config.json: max_position_embeddings: {rows}: must be more than {first}")
    own = {"first_position": first, "max_position": rows - first, "pair_types": False}
    return {**_bert({"layer_norm_eps": 1e-5, **raw}), **own}


def _mpnet(raw: Raw) -> dict[str, Any]:
    """Return the fields of MPNet (arXiv 2004.09297): no token types; a relative position bias is added to scores."""
    fields = _roberta(
        {**raw, "pad_token_id": 1, "type_vocab_size": 0, "layer_norm_eps": raw.get("layer_norm_eps", 1e-12)}
    )
    if (count := int(raw.get("relative_attention_num_buckets", 32))) != 32:
        raise ConfigError(
            f"config.json: relative_attention_num_buckets: {count}: only 32 is supported, as in transformers"
        )
    return {**fields, "distances": Ranges(count, 128, fields["max_position"])}


def _jina_bert(raw: Raw) -> dict[str, Any]:
    """Return the fields of Jina BERT (arXiv 2310.19923): bidirectional ALiBi instead of positions, a gated MLP with
    down bias."""
    for name, wanted in (("position_embedding_type", "alibi"), ("feed_forward_type", "geglu")):
        if (kind := raw.get(name)) != wanted:
            raise ConfigError(f"config.json: {name}: {kind!r} is not supported: only {wanted}")
    positions = int(raw["max_position_embeddings"])
    return {
        **_encoder(raw),
        "mlp_bias": False,
        "down_bias": True,
        "activation": "gelu_erf",
        "gated": True,
        "token_types": int(raw.get("type_vocab_size", 2)),
        "max_position": positions,
        "distances": Slopes.of(int(raw["num_attention_heads"]), positions),
    }


def _nomic_bert(raw: Raw) -> dict[str, Any]:
    """Return the fields of Nomic BERT: RoPE and a gated MLP (arXiv 2402.01613), or an ungated MLP with experts in every
    n-th layer (arXiv 2502.07972). Published files use the names of its own code."""
    if (kind := raw.get("activation_function") or "swiglu") not in ("swiglu", "gelu"):
        raise ConfigError(f"config.json: activation_function: {kind!r} is not supported: only swiglu and gelu")
    if (share := float(raw.get("rotary_emb_fraction", 1.0))) != 1.0:
        raise ConfigError(f"config.json: rotary_emb_fraction: {share:g}: only 1.0 is supported")
    _refuse_fields(raw, "prenorm", "rotary_emb_interleaved", "rotary_scaling_factor", "causal")
    moe = _nomic_moe(raw) if raw.get("num_experts") and raw.get("moe_every_n_layers") else None
    positions = int(raw["max_position_embeddings"])
    return {
        **_encoder(raw),
        "norm_eps": float(raw.get("layer_norm_epsilon", raw.get("layer_norm_eps", 1e-12))),
        **dict.fromkeys(_NO_BIAS, bool(raw.get("qkv_proj_bias", False))),
        "mlp_bias": bool(raw.get("mlp_fc1_bias", False)),
        "activation": check_activation(raw) if kind == "swiglu" else "gelu_erf",
        "gated": kind == "swiglu",
        "moe": moe,
        "rope": parse_rope(raw, theta=float(raw.get("rotary_emb_base") or 1000.0)),
        "rotated": (True,) * int(raw["num_hidden_layers"]),
        "max_position": min(positions, int(raw.get("max_trained_positions") or positions)),
        "token_types": int(raw.get("type_vocab_size", 2)),
    }


def _nomic_moe(raw: Raw) -> MoeConfig:
    """Return the MoE settings of Nomic: experts from the second layer on, weighted by softmax over all of them."""
    _refuse_fields(raw, "moe_normalize_expert_weights", "num_shared_experts", "expert_choice_router")
    every = int(raw["moe_every_n_layers"])
    layers = frozenset(i for i in range(int(raw["num_hidden_layers"])) if i % every == 1)
    chosen = {"num_experts_per_tok": raw["moe_top_k"]}
    bias = bool(raw.get("moe_sum_bias", True))  # our own field, for files without the bias
    return _moe({**raw, **chosen}, size="intermediate_size", layers=layers, sum_bias=bias)


def _modern_bert(raw: Raw) -> dict[str, Any]:
    """Return the fields of ModernBERT (arXiv 2412.13663): norms before attention and MLP, two RoPE tables, and layers
    that attend to half of `local_attention` on either side."""
    _refuse_fields(raw, "mlp_bias")
    num_layers, every = int(raw["num_hidden_layers"]), int(raw.get("global_attn_every_n_layers", 3))
    types = raw.get("layer_types") or [
        "sliding_attention" if i % every else "full_attention" for i in range(num_layers)
    ]
    window = int(raw.get("local_attention", 128)) // 2 + 1
    thetas = (float(raw.get(f"{one}_rope_theta") or default) for one, default in (("global", 16e4), ("local", 1e4)))
    rope, local = parse_two_ropes(raw, *thetas)
    return {
        **_encoder(raw),
        **_attention_bias(raw, False),
        "norm_bias": bool(raw.get("norm_bias", False)),
        "norm_eps": float(raw.get("norm_eps", 1e-5)),
        "norms": "before",
        "bare_first": True,
        "last_norm": True,
        "mlp_bias": False,
        "activation": _either_gelu(raw, "gelu", "hidden_activation"),
        "gated": True,
        "rope": rope,
        "local_rope": local,
        "rotated": (True,) * num_layers,
        "windows": _windows({**raw, "layer_types": types, "sliding_window": window}, "pattern"),
    }


def _gemma3_text(raw: Raw) -> dict[str, Any]:
    """Return the fields of Gemma 3 without a head, or the encoder EmbeddingGemma (arXiv 2509.20354) with a two-sided
    window."""
    if not raw.get("use_bidirectional_attention"):
        return _gemma3(raw)
    window = int(raw.get("sliding_window", WINDOW)) // 2 + 1
    fields = _gemma3({**raw, "sliding_window": window, "use_bidirectional_attention": False})
    return {**fields, "both_ways": True, "left_out": ("dense_2.", "dense_3.")}


def _llama4(raw: Raw) -> dict[str, Any]:
    """Return the fields of Llama 4: layers with RoPE attend within chunks of the sequence, others to all of it with
    queries scaled by position. Experts' inputs are weighted by sigmoid scores."""
    num_layers, size = int(raw["num_hidden_layers"]), int(raw["intermediate_size"])
    rotated = _rotated({**raw, "no_rope_layers": raw.get("no_rope_layers") or None})
    chunk = raw.get("attention_chunk_size", 8192)
    kinds = raw.get("layer_types") or [
        "chunked_attention" if chunk and has_rope else "full_attention" for has_rope in rotated
    ]
    if len(kinds) != num_layers or not set(kinds) <= {"chunked_attention", "full_attention"}:
        raise ConfigError("config.json: layer_types: must be chunked_attention or full_attention for each layer")
    if "chunked_attention" in kinds and (chunk is None or int(chunk) < 1):
        raise ConfigError(f"config.json: attention_chunk_size: {chunk}: must be at least 1")
    step, given = int(raw.get("interleave_moe_layer_step") or 1), raw.get("moe_layers")
    layers = frozenset(range(step - 1, num_layers, step) if given is None else map(int, given))
    growth = QueryGrowth(float(raw.get("attn_scale", 0.1)), int(raw.get("floor_scale", 8192)), 1, True)
    routing = {"score": "sigmoid", "weighs_input": True, "norm_topk_prob": False, "shared_size": size}
    return {
        "head_dim": int(raw.get("head_dim") or 128),
        "intermediate_size": int(raw.get("intermediate_size_mlp", 16_384)),
        "rope": parse_rope(raw, theta=500_000.0),
        "rotated": rotated,
        "chunked": True,
        "windows": tuple(int(chunk) if kind == "chunked_attention" else None for kind in kinds),
        "qk_norm": "plain" if raw.get("use_qk_norm", True) else "none",
        "query_growth": growth if raw.get("attn_temperature_tuning", True) else None,
        "moe": _moe(raw, size="intermediate_size", layers=layers, **routing),
    }


def _lfm2(raw: Raw) -> dict[str, Any]:
    """Return the fields of LFM2: a layer is attention or a short convolution. The config gives the MLP size before
    adjustment."""
    num_layers = int(raw["num_hidden_layers"])
    full = raw.get("full_attn_idxs")
    attends = tuple(full is None or i in full for i in range(num_layers))
    if (types := raw.get("layer_types")) is not None:
        if len(types) != num_layers or not set(types) <= {"full_attention", "conv"}:
            raise ConfigError("config.json: layer_types: must be full_attention or conv for each layer")
        attends = tuple(kind == "full_attention" for kind in types)
    length = int(raw.get("conv_L_cache", 3))
    if length < 2:
        raise ConfigError(f"config.json: conv_L_cache: {length}: must be at least 2")
    return {
        "attends": attends,
        "state": ShortConv(length, bool(raw.get("conv_bias", False))),
        "state_layers": tuple(not attention for attention in attends),
        "windows": (None,) * num_layers,
        "intermediate_size": _lfm2_inner(raw),
        "norm_eps": float(raw.get("norm_eps", 1e-5)),
        "qk_norm": "head",
        "rope": parse_rope(raw, theta=1_000_000.0),
        "tie_word_embeddings": bool(raw.get("tie_embedding", raw.get("tie_word_embeddings", True))),
    }


def _lfm2_moe(raw: Raw) -> dict[str, Any]:
    """Return the fields of LFM2 MoE: sigmoid scores, possibly with a selection bias; the first layers are dense."""
    first, num_layers = int(raw.get("num_dense_layers", 2)), int(raw["num_hidden_layers"])
    return {
        **_lfm2({**raw, "block_ff_dim": raw["intermediate_size"], "block_auto_adjust_ff_dim": False}),
        "moe": _moe(
            raw,
            layers=frozenset(range(first, num_layers)),
            score="sigmoid",
            choice_bias=bool(raw.get("use_expert_bias", True)),
            norm_topk_prob=bool(raw.get("norm_topk_prob", True)),
            scale=float(raw.get("routed_scaling_factor", 1.0)),
            least_sum=1e-6,
        ),
    }


def _delta_net(raw: Raw) -> dict[str, Any]:
    """Return the fields of Qwen3-Next and 3.5: layers are gated delta nets or (every fourth) gated attention."""
    _refuse_fields(raw, "attention_bias")
    num_layers, every = int(raw["num_hidden_layers"]), int(raw.get("full_attention_interval") or 4)
    types = raw.get("layer_types")
    types = types or ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {"linear_attention", "full_attention"}:
        raise ConfigError("config.json: layer_types: must be linear_attention or full_attention for each layer")
    net = DeltaNet(
        key_heads=int(raw.get("linear_num_key_heads", 16)),
        value_heads=int(raw.get("linear_num_value_heads", 32)),
        key_dim=int(raw.get("linear_key_head_dim", 128)),
        value_dim=int(raw.get("linear_value_head_dim", 128)),
        length=int(raw.get("linear_conv_kernel_dim", 4)),
    )
    if net.length < 2:
        raise ConfigError(f"config.json: linear_conv_kernel_dim: {net.length}: must be at least 2")
    if min(net.key_heads, net.value_heads) < 1 or net.value_heads % net.key_heads:
        raise ConfigError(
            f"config.json: linear_num_value_heads: {net.value_heads}: must be a multiple of linear_num_key_heads "
            f"{net.key_heads}"
        )
    for name, size in (("linear_key_head_dim", net.key_dim), ("linear_value_head_dim", net.value_dim)):
        if not 1 <= size <= 128:
            raise ConfigError(f"config.json: {name}: {size}: must be between 1 and 128")
    attends = tuple(kind == "full_attention" for kind in types)
    return {
        **_partial(raw, 0.25),
        "norm_offset": 1.0,
        "qk_norm": "head",
        "head_dim": int(raw.get("head_dim") or 256),
        "attention_gates": True,
        "windows": (None,) * num_layers,
        "attends": attends,
        "state": net,
        "state_layers": tuple(not one for one in attends),
        "left_out": ("mtp.", *_mtp(raw)),
    }


def _qwen3_next(raw: Raw) -> dict[str, Any]:
    shared = int(raw.get("shared_expert_intermediate_size", 512))
    moe = _moe({"norm_topk_prob": True, **raw}, shared_size=shared, shared_gated=True)
    return {**_delta_net(raw), "moe": moe}


def _qwen3_5_moe(raw: Raw) -> dict[str, Any]:
    """Return the fields of Qwen3.5 MoE: each layer has experts, whose weights always sum to 1."""
    plain = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    size = int(raw.get("moe_intermediate_size", 512))
    return {**_qwen3_next({**raw, **plain}), "intermediate_size": size}


def _lfm2_inner(raw: Raw) -> int:
    size = int(raw.get("block_ff_dim", raw.get("intermediate_size", 12_288)))
    if not raw.get("block_auto_adjust_ff_dim", True):
        return size
    factor, unit = raw.get("block_ffn_dim_multiplier", 1.0), int(raw.get("block_multiple_of", 256))
    size = int((1.0 if factor is None else float(factor)) * int(2 * size / 3))
    return -(-size // unit) * unit


def _mamba2(raw: Raw, names: Mapping[str, str], **changes: Any) -> Mamba2:
    """Return a Mamba-2 layer with the sizes in the config fields `names`. Raises `ConfigError` if one is impossible."""
    sizes = {own: int(raw[names[own]]) for own in ("heads", "head_dim", "groups", "size", "length")}
    for own, value in sizes.items():
        if value < 1:
            raise ConfigError(f"config.json: {names[own]}: {value}: must be at least 1")
    if sizes["heads"] % sizes["groups"]:
        raise ConfigError(f"config.json: {names['groups']}: {sizes['groups']}: must divide {sizes['heads']} heads")
    least, most = (_real(one) for one in raw.get("time_step_limit") or (0.0, math.inf))
    fields = {"conv_bias": bool(raw.get(names["conv_bias"], True)), "least_step": least}
    return Mamba2(**{**sizes, **fields, "most_step": None if math.isinf(most) else most, **changes})


def _real(value: Any) -> float:
    """Return a float; transformers writes infinities, which JSON cannot hold, as {"__float__": name}."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _with_head_size(raw: Raw, inner: int) -> Raw:
    """Return the config with `mamba_d_head` as an integer; "auto" is `inner` divided by the number of heads. Raises
    `ConfigError` if they do not match."""
    given, heads = raw.get("mamba_d_head", "auto"), int(raw["mamba_n_heads"])
    size = inner // max(heads, 1) if given == "auto" else int(given)
    if size * heads != inner:
        raise ConfigError(f"config.json: mamba_d_head: {given}: must be {inner} divided by {heads} heads")
    return {**raw, "mamba_d_head": size}


_MAMBA, _ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")


def _kinds(raw: Raw, types: Any, allowed: tuple[str, ...]) -> list[str]:
    if not isinstance(types, list) or len(types) != int(raw["num_hidden_layers"]) or not set(types) <= set(allowed):
        raise ConfigError(f"config.json: layer_types: must be one of {', '.join(allowed)} for each layer")
    return types


def _granite_hybrid(raw: Raw) -> dict[str, Any]:
    """Return the fields of Granite 4.0 H: a few layers are attention, mostly without RoPE, the others Mamba-2; an MLP
    for every token, possibly in addition to experts."""
    _refuse_fields(raw, "mamba_proj_bias")
    hidden, num_layers = int(raw["hidden_size"]), int(raw["num_hidden_layers"])
    given = raw.get("layer_types") or raw.get("layers_block_type") or ["mamba"] * num_layers
    kinds = _kinds(raw, given, _MAMBA + _ATTENTION)
    raw = _with_head_size(raw, int(raw.get("mamba_expand", 2) * hidden))
    return {
        **(_granite_moe(raw) if raw.get("num_local_experts") else {**_granite(raw), "mlp_bias": False}),
        "attends": tuple(kind in _ATTENTION for kind in kinds),
        "state": _mamba2(raw, MAMBA_FIELDS),
        "state_layers": tuple(kind in _MAMBA for kind in kinds),
        "windows": (None,) * num_layers,
        "rotated": (raw.get("position_embedding_type") == "rope",) * num_layers,
        "intermediate_size": int(raw["shared_intermediate_size"]),
    }


def _falcon_h1(raw: Raw) -> dict[str, Any]:
    """Return the fields of Falcon H1: attention and Mamba-2 in parallel in each layer. Of its many scale factors, those
    of queries and keys are merged into the attention scale, those of values into the value scale."""
    _refuse_fields(raw, "mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias")
    num_layers, heads = int(raw["num_hidden_layers"]), int(raw["num_attention_heads"])
    size = int(raw.get("head_dim") or int(raw["hidden_size"]) // heads)
    given = raw.get("mamba_d_ssm")
    inner = int(raw.get("mamba_expand", 2)) * int(raw["hidden_size"]) if given is None else int(given)
    of_in, of_out = (float(raw.get(f"attention_{one}_multiplier", 1.0)) for one in ("in", "out"))
    of_ssm = float(raw.get("ssm_in_multiplier", 1.0))
    gate, down = (float(one) for one in raw.get("mlp_multipliers") or (1.0, 1.0))
    gating: Gating = "alone"
    if raw.get("mamba_rms_norm"):
        gating = "behind_norm" if raw.get("mamba_norm_before_gate", True) else "before_norm"
    state = _mamba2(
        _with_head_size(raw, inner),
        MAMBA_FIELDS,
        gating=gating,
        factors=tuple(of_ssm * float(one) for one in raw.get("ssm_multipliers") or (1.0,) * 5),
        out_scale=float(raw.get("ssm_out_multiplier", 1.0)),
    )
    return {
        **_NO_BIAS,
        "attends": (True,) * num_layers,
        "state": state,
        "state_layers": (True,) * num_layers,
        "windows": (None,) * num_layers,
        "norm_eps": float(raw.get("rms_norm_eps", 1e-5)),
        "attention_scale": size**-0.5 * float(raw.get("key_multiplier", 1.0)) * of_in * of_in,
        "value_scale": of_in * of_out,
        "activation": "silu" if (gate, down) == (1.0, 1.0) else ScaledSilu(gate, down),
        "embedding_scale": float(raw.get("embedding_multiplier", 1.0)),
        "logits_scale": float(raw.get("lm_head_multiplier", 1.0)),
    }


_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron_h(raw: Raw) -> dict[str, Any]:
    """Return the fields of Nemotron-H and Nemotron 3: a layer is attention without RoPE, Mamba-2, an MLP or experts. dt
    is limited by `time_step_limit`, as published; transformers 5 uses `time_step_min` as the lower limit, in prompts
    only."""
    _refuse_fields(
        raw, "use_bias", "attention_bias", "mlp_bias", "mamba_proj_bias", "moe_latent_size", "sliding_window"
    )
    pattern = raw.get("hybrid_override_pattern")
    given = raw.get("layers_block_type") or raw.get("layer_types") or [_PATTERN.get(one, one) for one in pattern or ""]
    num_layers = len(given)
    kinds = _kinds({"num_hidden_layers": num_layers}, given, (*_MAMBA, *_ATTENTION, "mlp", "moe"))
    raw = {"n_groups": raw.get("mamba_n_groups", 8), "conv_kernel": raw.get("mamba_d_conv", 4), **raw}
    raw = {**raw, "num_hidden_layers": num_layers}
    check_activation(raw, "silu", "mamba_hidden_act")
    layers = frozenset(i for i, kind in enumerate(kinds) if kind == "moe")
    moe = None
    if layers:
        shared = int(raw.get("n_shared_experts") or 0) and int(raw["moe_shared_expert_intermediate_size"])
        norm = bool(raw.get("norm_topk_prob", True))
        moe = _grouped_moe(raw, layers=layers, shared_size=shared, norm_topk_prob=norm)
    return {
        "num_layers": num_layers,
        "attends": tuple(kind in _ATTENTION for kind in kinds),
        "state": _mamba2(raw, NEMOTRON_FIELDS),
        "state_layers": tuple(kind in _MAMBA for kind in kinds),
        "windows": (None,) * num_layers,
        "rotated": (False,) * num_layers,
        "intermediate_sizes": tuple(int(raw["intermediate_size"]) if kind == "mlp" else 0 for kind in kinds),
        "norm_eps": float(raw.get("layer_norm_epsilon", 1e-5)),
        "activation": check_activation(raw, "relu2", "mlp_hidden_act"),
        "gated": False,
        "moe": moe,
        "left_out": ("mtp.",),
    }


_ENDLESS = 2**20  # context of a model without positions, as in llama.cpp's files


def _mamba2_alone(raw: Raw) -> dict[str, Any]:
    """Return the fields of Mamba-2 models: no attention, no MLP, no positions."""
    _refuse_fields(raw, "use_bias")
    num_layers = int(raw["num_hidden_layers"])
    return {
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 16,  # placeholder: no layer has heads
        "max_position": _ENDLESS,
        "attends": (False,) * num_layers,
        "state": _mamba2(raw, MAMBA2_FIELDS),
        "state_layers": (True,) * num_layers,
        "windows": (None,) * num_layers,
        "rotated": (False,) * num_layers,
        "intermediate_size": 0,
        "norm_eps": float(raw.get("layer_norm_epsilon", 1e-5)),
    }


_GEMMA_NAMES: Names = {"mlp_norm": "pre_feedforward_layernorm"}
_GEMMA4_NAMES: Names = {
    **_GEMMA_NAMES,
    "router": "router.proj",
    "router_norm": "router.scale",
    "expert_scale": "router.per_expert_scale",
    "experts_gate_up": "experts.gate_up_proj",
    "experts_down": "experts.down_proj",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_norm_behind": "post_feedforward_layernorm_2",
    "beside_norm_behind": "post_feedforward_layernorm_1",
}
_GEMMA4_GGUF: Names = {"experts_gate_up": "ffn_gate_up_exps.weight"}
_BLOCK = "block_sparse_moe"
_MIXTRAL_NAMES: Names = {
    "router": (f"{_BLOCK}.gate", "mlp.gate"),
    "expert_gate": f"{_BLOCK}.experts.{{expert}}.w1",
    "expert_up": f"{_BLOCK}.experts.{{expert}}.w3",
    "expert_down": f"{_BLOCK}.experts.{{expert}}.w2",
}
_MINIMAX_M2_NAMES: Names = {
    **_MIXTRAL_NAMES,
    "choice_bias": (f"{_BLOCK}.e_score_correction_bias", "mlp.e_score_correction_bias"),
}
_GRANITE_MOE_NAMES: Names = {
    "router": (f"{_BLOCK}.router.layer", f"{_BLOCK}.router"),
    "experts_gate_up": (f"{_BLOCK}.input_linear.weight", f"{_BLOCK}.experts.gate_up_proj"),
    "experts_down": (f"{_BLOCK}.output_linear.weight", f"{_BLOCK}.experts.down_proj"),
}
_GRANITE_SHARED_NAMES: Names = {
    **_GRANITE_MOE_NAMES,
    "shared_gate_up": "shared_mlp.input_linear",
    "shared_down": "shared_mlp.output_linear",
}
_GLM_NAMES: Names = {"gate_up": "mlp.gate_up_proj"}
_GLM_GGUF: Names = {"gate_up": "ffn_up", "qkv": "attn_qkv", **{part: f"attn_{part}" for part in "qkv"}}
_GLM4_NAMES: Names = {
    **_GLM_NAMES,
    "attention_norm_behind": "post_self_attn_layernorm",
    "mlp_norm_behind": "post_mlp_layernorm",
}
_PHI3_NAMES: Names = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
_SHARED_NAMES: Names = {f"shared_{one}": f"mlp.shared_experts.{one}_proj" for one in ("gate", "up", "down")}
_HUNYUAN_NAMES: Names = {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}
_HUNYUAN_MOE_NAMES: Names = {
    **_HUNYUAN_NAMES,
    "router": ("mlp.gate.wg", "mlp.gate"),
    **{f"shared_{one}": f"mlp.shared_mlp.{one}_proj" for one in ("gate", "up", "down")},
}
_ERNIE_MOE_NAMES: Names = {
    **_SHARED_NAMES,
    "choice_bias": (
        "mlp.moe_statics.e_score_correction_bias",
        "mlp.gate.moe_statics.e_score_correction_bias",
    ),
}
_GPT_OSS_NAMES: Names = {
    "sinks": "self_attn.sinks",
    "router": "mlp.router",
    "experts_gate_up": "mlp.experts.gate_up_proj_blocks",  # as published, in MXFP4
    "experts_down": "mlp.experts.down_proj_blocks",
    "experts_gate_up_transposed": "mlp.experts.gate_up_proj",
    "experts_down_transposed": "mlp.experts.down_proj",
    "experts_gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "experts_down_bias": "mlp.experts.down_proj_bias",
}
_QWEN3_VL_MOE_NAMES: Names = {
    "experts_gate_up_transposed": "mlp.experts.gate_up_proj",
    "experts_down_transposed": "mlp.experts.down_proj",
}
_PHI_NAMES: Names = {"norm": "model.final_layernorm", "out": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"}
_FALCON_NAMES: Names = {
    "embedding": "transformer.word_embeddings",
    "norm": "transformer.ln_f",
    "attention_norm": ("input_layernorm", "ln_attn"),
    "mlp_norm": ("post_attention_layernorm", "ln_mlp"),
    "qkv": "self_attention.query_key_value",
    "out": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
_FALCON_GGUF: Names = {"qkv": "attn_qkv", "attention_norm": ("attn_norm_2", "attn_norm"), "mlp_norm": "attn_norm"}
_GPT2_NAMES: Names = {
    "embedding": ("transformer.wte", "wte"),
    "positions": ("transformer.wpe", "wpe"),
    "norm": ("transformer.ln_f", "ln_f"),
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_GPT2_FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
_GPT2_LAYERS = ("transformer.h.{layer}", "h.{layer}")
_GPT_NEOX_NAMES: Names = {
    "embedding": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "head": ("lm_head", "embed_out"),
    "qkv": "attention.query_key_value",
    "out": "attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
_MASKS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")
_HEADS = (  # of encoders: tensors of heads for words, pairs or classes
    *(
        f"{prefix}{head}."
        for prefix in ("", "bert.", "roberta.", "mpnet.")
        for head in ("pooler", "cls", "lm_head", "classifier")
    ),
    *("head.", "decoder."),
)
_IDS = ("embeddings.position_ids", "embeddings.token_type_ids")


def _with_prefix(prefix: str, names: Mapping[str, str]) -> Names:
    """Return tensor names outside of layers, each with and without the prefix that models with a head add."""
    return {part: (name, f"{prefix}.{name}") for part, name in names.items()}


_BERT_TABLES = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
}
_BERT_NAMES: Names = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "out": "attention.output.dense",
    "attention_norm_behind": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm_behind": "output.LayerNorm",
}
_BERT_GGUF: Names = {
    "qkv": "attn_qkv",
    **{part: f"attn_{part}" for part in "qkv"},
    "attention_norm_behind": "attn_output_norm",
    "mlp_norm_behind": "layer_output_norm",
}


_JINA_NAMES: Names = {
    **_with_prefix("bert", {part: name for part, name in _BERT_TABLES.items() if part != "positions"}),
    **{part: name for part, name in _BERT_NAMES.items() if part != "up"},
    "gate_up": "mlp.gated_layers",
    "down": "mlp.wo",
    "mlp_norm_behind": "mlp.layernorm",
}
_JINA_BERT = Architecture(
    _jina_bert,
    _JINA_NAMES,
    # the first files have gate and up separately
    {**_BERT_GGUF, "gate_up": "ffn_up", "gate": "ffn_gate", "up": "ffn_up"},
    layers=("encoder.layer.{layer}", "bert.encoder.layer.{layer}"),
    buffers=_IDS,
)
_NOMIC_NAMES: Names = {
    "embedding": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": ("embeddings.LayerNorm", "emb_ln"),
    "qkv": "attn.Wqkv",
    **{part: f"self_attn.{part}_proj" for part in "qkv"},
    "out": ("self_attn.o_proj", "attn.out_proj"),
    "attention_norm_behind": ("post_attention_layernorm", "norm1"),
    "gate": ("mlp.gate_proj", "mlp.fc12"),
    "up": ("mlp.up_proj", "mlp.fc11", "mlp.fc1"),
    "down": ("mlp.down_proj", "mlp.fc2"),
    "mlp_norm_behind": ("post_mlp_layernorm", "norm2"),
    "router": "mlp.router.layer",
    "experts_up": "mlp.experts.mlp.w1",
    "experts_down_transposed": "mlp.experts.mlp.w2",
    "experts_sum_bias": "mlp.experts.bias",
}
_MODERN_TABLES = {
    "embedding": "embeddings.tok_embeddings",
    "embedding_norm": "embeddings.norm",
    "norm": "final_norm",
}
_MODERN_NAMES: Names = {
    "attention_norm": "attn_norm",
    "qkv": "attn.Wqkv",
    "out": "attn.Wo",
    "mlp_norm": "mlp_norm",
    "gate_up": "mlp.Wi",
    "down": "mlp.Wo",
}
_MODERN_BERT = Architecture(
    _modern_bert,
    {**_with_prefix("model", _MODERN_TABLES), **_MODERN_NAMES},
    {"qkv": "attn_qkv", "gate_up": "ffn_up"},
    layers=("layers.{layer}", "model.layers.{layer}"),
)


_MPNET_TABLES = {part: name for part, name in _BERT_TABLES.items() if part != "token_types"}
_MPNET = Architecture(
    _mpnet,
    {
        **_with_prefix("mpnet", {**_MPNET_TABLES, "distances": "encoder.relative_attention_bias"}),
        **_BERT_NAMES,
        **{part: f"attention.attn.{part}" for part in "qkv"},
        "out": "attention.attn.o",
        "attention_norm_behind": "attention.LayerNorm",
    },
    layers=("encoder.layer.{layer}", "mpnet.encoder.layer.{layer}"),
    buffers=_IDS,
)


def _with_heads(name: str) -> tuple[str, ...]:
    """Return the names of an architecture's variants, which differ only in their heads."""
    return tuple(f"{name}{head}" for head in ("Model", "ForMaskedLM", "ForSequenceClassification"))


def _like_bert(describe: Callable[[Raw], dict[str, Any]], prefix: str) -> Architecture:
    return Architecture(
        describe,
        {**_with_prefix(prefix, _BERT_TABLES), **_BERT_NAMES},
        _BERT_GGUF,
        layers=("encoder.layer.{layer}", f"{prefix}.encoder.layer.{{layer}}"),
        buffers=_IDS,
    )


_FEED = "feed_forward"
_LLAMA4_NAMES: Names = {
    "router": f"{_FEED}.router",
    **{one: f"{_FEED}.{one}_proj" for one in ("gate", "up", "down")},
    **{f"shared_{one}": f"{_FEED}.shared_expert.{one}_proj" for one in ("gate", "up", "down")},
    "experts_gate_up_transposed": f"{_FEED}.experts.gate_up_proj",
    "experts_down_transposed": f"{_FEED}.experts.down_proj",
}
_LFM2_NAMES: Names = {
    "norm": "model.embedding_norm",
    "attention_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "out": "self_attn.out_proj",
    "mix_in": "conv.in_proj",
    "convolution": "conv.conv",
    "mix_out": "conv.out_proj",
    "gate": f"{_FEED}.w1",
    "up": f"{_FEED}.w3",
    "down": f"{_FEED}.w2",
}
_LFM2_GGUF: Names = {
    "norm": ("token_embd_norm", "output_norm"),
    "mix_in": "shortconv.in_proj",
    "convolution": "shortconv.conv",
    "mix_out": "shortconv.out_proj",
}
_LFM2_MOE_NAMES: Names = {
    **_LFM2_NAMES,
    "router": f"{_FEED}.gate",
    "choice_bias": f"{_FEED}.expert_bias",
    "expert_gate": f"{_FEED}.experts.{{expert}}.w1",
    "expert_up": f"{_FEED}.experts.{{expert}}.w3",
    "expert_down": f"{_FEED}.experts.{{expert}}.w2",
    "experts_gate_up": f"{_FEED}.experts.gate_up_proj",
    "experts_down": f"{_FEED}.experts.down_proj",
}
_DELTA = "linear_attn"
_DELTA_NAMES: Names = {
    "convolution": f"{_DELTA}.conv1d",
    "fading": f"{_DELTA}.A_log",
    "step_bias": f"{_DELTA}.dt_bias",
    "mix_norm": f"{_DELTA}.norm",
    "mix_out": f"{_DELTA}.out_proj",
}
_QWEN3_NEXT_NAMES: Names = {
    **_DELTA_NAMES,
    "mix_all": f"{_DELTA}.in_proj_qkvz",
    "mix_rates": f"{_DELTA}.in_proj_ba",
}
_QWEN3_5_NAMES: Names = {
    **_DELTA_NAMES,
    "mix_in": f"{_DELTA}.in_proj_qkv",
    "mix_gate": f"{_DELTA}.in_proj_z",
    "mix_rate": f"{_DELTA}.in_proj_b",
    "mix_step": f"{_DELTA}.in_proj_a",
}
_SSM_GGUF: Names = {
    "convolution": "ssm_conv1d",
    "fading": "ssm_a",
    "step_bias": "ssm_dt.bias",
    "mix_norm": "ssm_norm",
    "mix_out": "ssm_out",
}
_DELTA_GGUF: Names = {
    **_SSM_GGUF,
    "mlp_norm": ("post_attention_norm", "ffn_norm"),
    "mix_in": "attn_qkv",
    "mix_gate": "attn_gate",
}
_QWEN3_NEXT_GGUF: Names = {**_DELTA_GGUF, "mix_rates": "ssm_ba"}
_QWEN3_5_GGUF: Names = {**_DELTA_GGUF, "mix_rate": "ssm_beta", "mix_step": "ssm_alpha"}


def _mamba_names(layer: str) -> Names:
    """Return the tensor names of a Mamba-2 layer that a checkpoint calls `layer`."""
    own = {"mix_in": "in_proj", "convolution": "conv1d", "mix_norm": "norm", "mix_out": "out_proj"}
    whole = {"fading": "A_log", "past": "D", "step_bias": "dt_bias"}
    return {part: f"{layer}.{name}" for part, name in (own | whole).items()}


_MAMBA_GGUF: Names = {**_SSM_GGUF, "mix_in": "ssm_in", "past": "ssm_d"}
_GRANITE_HYBRID_NAMES: Names = {
    **_mamba_names("mamba"),
    **_GRANITE_SHARED_NAMES,
    "gate_up": "shared_mlp.input_linear",
    "down": "shared_mlp.output_linear",
}
_FALCON_H1_GGUF: Names = {**_MAMBA_GGUF, "mlp_norm": "ffn_norm."}
_FALCON_H1_NAMES: Names = {
    **_mamba_names("mamba"),
    "norm": "model.final_layernorm",
    "mlp_norm": "pre_ff_layernorm",
    **{one: f"{_FEED}.{one}_proj" for one in ("gate", "up", "down")},
}
_MIXER = "mixer"
_MAMBA2_NAMES: Names = {
    **_mamba_names(_MIXER),
    "embedding": ("backbone.embeddings", "backbone.embedding"),
    "norm": "backbone.norm_f",
    "attention_norm": "norm",
}
_NEMOTRON_H_NAMES: Names = {
    **_mamba_names(_MIXER),
    "embedding": ("model.embeddings", "backbone.embeddings"),
    "norm": ("model.norm_f", "backbone.norm_f"),
    "attention_norm": "norm",
    "mlp_norm": "norm",
    **{part: f"{_MIXER}.{part}_proj" for part in ("q", "k", "v", "up", "down")},
    "out": f"{_MIXER}.o_proj",
    "router": f"{_MIXER}.gate",
    "choice_bias": f"{_MIXER}.gate.e_score_correction_bias",
    "expert_up": f"{_MIXER}.experts.{{expert}}.up_proj",
    "expert_down": f"{_MIXER}.experts.{{expert}}.down_proj",
    "experts_up": f"{_MIXER}.experts.up_proj",
    "experts_down": f"{_MIXER}.experts.down_proj",
    "shared_up": f"{_MIXER}.shared_experts.up_proj",
    "shared_down": f"{_MIXER}.shared_experts.down_proj",
}
_NEMOTRON_H_LAYERS = ("model.layers.{layer}", "backbone.layers.{layer}")
_IDEFICS3 = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
_PER_HEAD = "self_attn.{}_layernorm.norms.{{head}}"

ENCODERS: dict[str, Architecture] = {
    **dict.fromkeys(_with_heads("Bert"), _like_bert(_bert, "bert")),
    **dict.fromkeys(
        (*_with_heads("Roberta"), *_with_heads("XLMRoberta")),
        _like_bert(_roberta, "roberta"),
    ),
    "NomicBertModel": Architecture(
        _nomic_bert,
        _NOMIC_NAMES,
        _BERT_GGUF,
        fields={**_GPT2_FIELDS, "n_inner": "intermediate_size"},
        layers=("layers.{layer}", "encoder.layers.{layer}"),
        buffers=_IDS,
    ),
    **dict.fromkeys(_with_heads("ModernBert"), _MODERN_BERT),
    **dict.fromkeys(_with_heads("MPNet"), _MPNET),
    **dict.fromkeys(_with_heads("JinaBert")[:2], _JINA_BERT),
    "Gemma3TextModel": Architecture(_gemma3_text, _GEMMA_NAMES),
}
ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(_llama, gguf_interleaved=True, on_torch=True),
    "MistralForCausalLM": Architecture(_mistral, gguf_interleaved=True, on_torch=True),
    # its text half
    "Mistral3ForConditionalGeneration": Architecture(_mistral_or_ministral, gguf_interleaved=True, on_torch=True),
    "Qwen2ForCausalLM": Architecture(_qwen2, on_torch=True),
    "Qwen3ForCausalLM": Architecture(_qwen3, on_torch=True),
    "SmolLM3ForCausalLM": Architecture(_smollm3, gguf_interleaved=True, on_torch=True),
    "Qwen3MoeForCausalLM": Architecture(_qwen3_moe, on_torch=True),
    "Gemma3ForCausalLM": Architecture(_gemma3, _GEMMA_NAMES, on_torch=True),
    "Gemma3ForConditionalGeneration": Architecture(_gemma3, _GEMMA_NAMES, on_torch=True),  # its text half
    **dict.fromkeys(_IDEFICS3, Architecture(_llama, gguf_interleaved=True, on_torch=True)),  # their text halves
    "Qwen2VLForConditionalGeneration": Architecture(_qwen2),
    "Qwen2_5_VLForConditionalGeneration": Architecture(_qwen2),
    "Qwen3VLForConditionalGeneration": Architecture(_qwen3, on_torch=True),
    "Qwen3VLMoeForConditionalGeneration": Architecture(_qwen3_vl_moe, _QWEN3_VL_MOE_NAMES),
    "Phi3ForCausalLM": Architecture(_phi3, _PHI3_NAMES, {"qkv": "attn_qkv", "gate_up": "ffn_up"}),
    "GraniteForCausalLM": Architecture(_granite, gguf_interleaved=True),
    "Olmo2ForCausalLM": Architecture(_olmo2),
    "Olmo3ForCausalLM": Architecture(_olmo3),
    "GemmaForCausalLM": Architecture(_gemma),
    "Gemma2ForCausalLM": Architecture(_gemma2, _GEMMA_NAMES),
    "MixtralForCausalLM": Architecture(_mixtral, _MIXTRAL_NAMES, gguf_interleaved=True),
    "MiniMaxM2ForCausalLM": Architecture(_minimax_m2, _MINIMAX_M2_NAMES),
    "OlmoeForCausalLM": Architecture(_olmoe),
    "Qwen2MoeForCausalLM": Architecture(_qwen2_moe),
    "GraniteMoeForCausalLM": Architecture(_granite_moe, _GRANITE_MOE_NAMES, gguf_interleaved=True),
    "GraniteMoeSharedForCausalLM": Architecture(_granite_moe, _GRANITE_SHARED_NAMES, gguf_interleaved=True),
    "StableLmForCausalLM": Architecture(_stablelm, {"q_norm": _PER_HEAD.format("q"), "k_norm": _PER_HEAD.format("k")}),
    "Starcoder2ForCausalLM": Architecture(_starcoder2, {"up": "mlp.c_fc", "down": "mlp.c_proj"}),
    "CohereForCausalLM": Architecture(_cohere, interleaved=True, gguf_interleaved=True),
    "Cohere2ForCausalLM": Architecture(_cohere2, interleaved=True, gguf_interleaved=True),
    "GlmForCausalLM": Architecture(_glm, _GLM_NAMES, _GLM_GGUF, interleaved=True, gguf_interleaved=True),
    "Glm4ForCausalLM": Architecture(_glm4, _GLM4_NAMES, _GLM_GGUF, interleaved=True, gguf_interleaved=True),
    "Ernie4_5ForCausalLM": Architecture(_ernie, interleaved=True, gguf_interleaved=True),
    "Exaone4ForCausalLM": Architecture(_exaone4),
    "SeedOssForCausalLM": Architecture(_seed_oss, gguf_names={"mlp_norm": ("post_attention_norm", "ffn_norm")}),
    "ArceeForCausalLM": Architecture(_arcee, gguf_interleaved=True),
    "Ministral3ForCausalLM": Architecture(_ministral3, gguf_interleaved=True),
    "HunYuanDenseV1ForCausalLM": Architecture(_hunyuan, _HUNYUAN_NAMES),
    "HunYuanMoEV1ForCausalLM": Architecture(_hunyuan_moe, _HUNYUAN_MOE_NAMES),
    "Glm4MoeForCausalLM": Architecture(_glm4_moe, _SHARED_NAMES, {"mlp_norm": ("post_attention_norm", "ffn_norm")}),
    "DeepseekV2ForCausalLM": Architecture(_deepseek2, _SHARED_NAMES, interleaved=True, gguf_interleaved=True),
    "DeepseekV3ForCausalLM": Architecture(_deepseek3, _SHARED_NAMES, interleaved=True, gguf_interleaved=True),
    "Glm4MoeLiteForCausalLM": Architecture(_glm4_moe_lite, _SHARED_NAMES, interleaved=True, gguf_interleaved=True),
    "MiniCPM3ForCausalLM": Architecture(_minicpm3),
    "Llama4ForCausalLM": Architecture(_llama4, _LLAMA4_NAMES, interleaved=True, gguf_interleaved=True),
    "Llama4ForConditionalGeneration": Architecture(_llama4, _LLAMA4_NAMES, interleaved=True, gguf_interleaved=True),
    "Dots1ForCausalLM": Architecture(_dots1, _SHARED_NAMES),
    "Ernie4_5_MoeForCausalLM": Architecture(_ernie_moe, _ERNIE_MOE_NAMES, interleaved=True, gguf_interleaved=True),
    "GptOssForCausalLM": Architecture(
        _gpt_oss, _GPT_OSS_NAMES, {"mlp_norm": ("post_attention_norm", "ffn_norm")}, gate_up_in_turns=True
    ),
    "Gemma4ForCausalLM": Architecture(_gemma4, _GEMMA4_NAMES, _GEMMA4_GGUF),
    "Gemma4ForConditionalGeneration": Architecture(_gemma4, _GEMMA4_NAMES, _GEMMA4_GGUF),  # its text half
    "Gemma3nForCausalLM": Architecture(_gemma3n, _GEMMA_NAMES),
    "Gemma3nForConditionalGeneration": Architecture(_gemma3n, _GEMMA_NAMES),  # its text half
    "NemotronForCausalLM": Architecture(_nemotron),
    "Lfm2ForCausalLM": Architecture(_lfm2, _LFM2_NAMES, _LFM2_GGUF),
    "Lfm2MoeForCausalLM": Architecture(_lfm2_moe, _LFM2_MOE_NAMES, _LFM2_GGUF),
    "Qwen3NextForCausalLM": Architecture(_qwen3_next, _QWEN3_NEXT_NAMES, _QWEN3_NEXT_GGUF),
    "Qwen3_5ForCausalLM": Architecture(_delta_net, _QWEN3_5_NAMES, _QWEN3_5_GGUF, gguf_tiled=True),
    "Qwen3_5MoeForCausalLM": Architecture(_qwen3_5_moe, _QWEN3_5_NAMES, _QWEN3_5_GGUF, gguf_tiled=True),
    # their text halves
    "Qwen3_5ForConditionalGeneration": Architecture(_delta_net, _QWEN3_5_NAMES, _QWEN3_5_GGUF, gguf_tiled=True),
    "Qwen3_5MoeForConditionalGeneration": Architecture(_qwen3_5_moe, _QWEN3_5_NAMES, _QWEN3_5_GGUF, gguf_tiled=True),
    "GraniteMoeHybridForCausalLM": Architecture(
        _granite_hybrid, _GRANITE_HYBRID_NAMES, _MAMBA_GGUF, gguf_interleaved=True
    ),
    "FalconH1ForCausalLM": Architecture(_falcon_h1, _FALCON_H1_NAMES, _FALCON_H1_GGUF),
    "NemotronHForCausalLM": Architecture(
        _nemotron_h, _NEMOTRON_H_NAMES, {**_MAMBA_GGUF, "mlp_norm": "attn_norm"}, layers=_NEMOTRON_H_LAYERS
    ),
    "Mamba2ForCausalLM": Architecture(_mamba2_alone, _MAMBA2_NAMES, _MAMBA_GGUF, layers=("backbone.layers.{layer}",)),
    "PhiForCausalLM": Architecture(_phi, _PHI_NAMES),
    "FalconForCausalLM": Architecture(
        _falcon,
        _FALCON_NAMES,
        _FALCON_GGUF,
        fields={"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_head_kv": "num_kv_heads"},
        layers=("transformer.h.{layer}",),
        grouped=True,
    ),
    "GPT2LMHeadModel": Architecture(
        _gpt2,
        _GPT2_NAMES,
        {"qkv": "attn_qkv"},
        fields=_GPT2_FIELDS,
        layers=_GPT2_LAYERS,
        transposed=True,
        buffers=_MASKS,
    ),
    "GPTBigCodeForCausalLM": Architecture(
        _gpt_bigcode, _GPT2_NAMES, {"qkv": "attn_qkv"}, fields=_GPT2_FIELDS, layers=_GPT2_LAYERS, grouped=True
    ),
    "GPTNeoXForCausalLM": Architecture(
        _gpt_neox,
        _GPT_NEOX_NAMES,
        {"qkv": "attn_qkv"},
        layers=("gpt_neox.layers.{layer}",),
        grouped=True,
        buffers=_MASKS,
    ),
    **ENCODERS,
}
CLASSIFIERS: dict[str, Architecture] = {"Qwen3ForSequenceClassification": Architecture(_qwen3_classes)}
"""Decoders with a classification head instead of an LM head."""


def find_architecture(architecture: str) -> Architecture:
    """Return the architecture by `architectures[0]` of config.json. Raises `Unsupported` that lists the known ones."""
    match = ARCHITECTURES.get(architecture) or CLASSIFIERS.get(architecture)
    if match is None:
        supported = ", ".join(ARCHITECTURES)
        raise Unsupported(
            f"config.json: architectures: {architecture} is not supported: only {supported} "
            "(others, by transformers' code: --model-impl transformers)"
        )
    return match


_TEXT_TYPES = {
    "Mistral3ForConditionalGeneration": ("mistral", "ministral3"),
    "Gemma3ForConditionalGeneration": ("gemma3_text",),
    **dict.fromkeys(_IDEFICS3, ("llama",)),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text",),
    "Gemma4ForConditionalGeneration": ("gemma4_text",),
    "Gemma3nForConditionalGeneration": ("gemma3n_text",),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_text",),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text",),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe_text",),
    "Llama4ForConditionalGeneration": ("llama4_text",),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5_text",),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe_text",),
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {  # transformers' defaults, which Google's files omit
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    "llama": {  # which SmolVLM's files omit
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
    },
}
_OF_THE_WHOLE = ("architectures", "dtype", "torch_dtype", "quantization_config", "eos_token_id")
_FLAT = ("layers.", "embed_tokens.", "norm.")  # prefixes in a model that was saved without its head
_VISION_TENSOR = re.compile(
    r"(model\.)?(vision_tower|vision_model|multi_modal_projector|visual|audio_tower|embed_vision|embed_audio|connector)\."
)


def is_multimodal(architecture: str) -> bool:
    return architecture in _TEXT_TYPES


def text_config(raw: Raw, architecture: str) -> Raw:
    """Return the text model's config as if it were a model of its own. Raises `ConfigError` if it is not supported."""
    text, wanted = raw.get("text_config"), _TEXT_TYPES[architecture]
    if text is None and "vision_config" in raw and "hidden_size" in raw:
        return raw  # the first files of Qwen2.5-VL
    if not isinstance(text, Mapping):
        raise ConfigError("config.json: text_config: missing: it must describe the text model")
    if (kind := text.get("model_type", wanted[0])) not in wanted:
        raise ConfigError(f"config.json: text_config: model_type: {kind!r} is not supported: only {', '.join(wanted)}")
    whole = {name: raw[name] for name in _OF_THE_WHOLE if raw.get(name) is not None}
    text = {**_DEFAULTS.get(kind, {}), **text}
    # the whole model's setting counts: its text model has no head of its own
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {**text, **whole, "tie_word_embeddings": tied}


def own_name(architecture: str, name: str) -> str | None:
    """Return the decoder's name for a tensor of a checkpoint; None if the decoder does not use the tensor."""
    if is_multimodal(architecture):
        return text_name(name)
    return PREFIX + name if name.startswith(_FLAT) else name


def is_vision_tensor(name: str) -> bool:
    """Return whether a tensor belongs to the vision or audio part of a model, by its name."""
    return _VISION_TENSOR.match(name) is not None


def text_name(name: str) -> str | None:
    """Return the name of a tensor in the text model; None for a tensor of the vision part. transformers 4 has written
    `language_model.model.` and `language_model.lm_head`, transformers 5 `model.language_model.` and `lm_head`, both
    `model.text_model.` and `lm_head` for Idefics 3."""
    if is_vision_tensor(name):
        return None
    for prefix, own in (
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.", ""),
        ("model.text_model.", "model."),
    ):
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
