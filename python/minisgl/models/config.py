"""A model's config.json, as the layers read it.

Which linear layers of a model an adapter may change, and their sizes.

Invariants: every field that changes the computation is read or refused, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from minisgl.config import ConfigError, ModelImpl
from minisgl.models.architectures import ARCHITECTURES, Variant, find_variant, has_text_half, text_config
from minisgl.models.rope import RopeConfig, context_length, parse_gemma_rope, parse_rope
from minisgl.weights.quantization import Packing, parse_packing

Activation = Literal["silu", "gelu"]
WINDOW = 4096  # if a config has a window without a length


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts, in the layers whose indices `layers` holds."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool  # the weights of a token's experts are scaled to sum up to 1
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`windows`, by layer: a token attends to as many tokens, itself included; None: to all before it. `rotated`, by
    layer: whether q and k are; if not, attention knows no positions there. `packing`: how the checkpoint's weights are
    packed. `gemma`: see `Variant`, which says what comes with it."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None  # of layers with a window, if it is another one
    max_position: int
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    rotated: tuple[bool, ...]
    attention_scale: float  # of the products of q and k
    gemma: bool
    moe: MoeConfig | None
    packing: Packing | None
    dtype: str
    eos_ids: tuple[int, ...]

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
    def activation(self) -> Activation:
        """What the gate of an MLP goes through; GELU by its tanh approximation."""
        return "gelu" if self.gemma else "silu"

    @property
    def norm_offset(self) -> float:
        """What a checkpoint's weights of norms lack."""
        return 1.0 if self.gemma else 0.0

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.hidden_size) if self.gemma else 1.0

    def context_len(self, max_seq_len: int | None) -> int:
        """With --max-seq-len, which may stretch the context of a model whose rotary scaling is dynamic. Raises
        `ConfigError`."""
        if max_seq_len is None:
            return self.max_position
        is_dynamic = self.rope.rope_type == "dynamic"
        longest = int(self.max_position * self.rope.factor) if is_dynamic else self.max_position
        if max_seq_len > longest:
            stretched = f", {longest} at most with its dynamic scaling" if is_dynamic else ""
            raise ConfigError(f"--max-seq-len {max_seq_len}: the model's context is {self.max_position}{stretched}")
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
    return _architecture(read_config(model_dir)[0]) in ARCHITECTURES


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """`raw` as transformers writes it: 4 (rope_theta, rope_scaling, torch_dtype) or 5 (rope_parameters, dtype)."""
    architecture = _architecture(raw)
    variant = find_variant(architecture)
    if has_text_half(architecture):
        raw = text_config(raw, architecture)
    _check_activation(raw, variant)
    num_heads = int(raw["num_attention_heads"])
    head_dim = int(raw.get("head_dim") or (256 if variant.gemma else int(raw["hidden_size"]) // num_heads))
    rope, local_rope = parse_gemma_rope(raw) if variant.gemma else (parse_rope(raw), None)
    return ModelConfig(
        architecture=architecture,
        hidden_size=int(raw["hidden_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        intermediate_size=int(raw["intermediate_size"]),
        vocab_size=int(raw["vocab_size"]),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        local_rope=local_rope,
        max_position=context_length(raw, rope),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", variant.gemma)),
        qkv_bias=variant.bias == "qkv" or (variant.bias == "config" and bool(raw.get("attention_bias", False))),
        out_bias=variant.bias == "config" and bool(raw.get("attention_bias", False)),
        mlp_bias=variant.mlp_bias and bool(raw.get("mlp_bias", False)),
        windows=_windows(raw, variant),
        rotated=_rotated(raw, variant),
        attention_scale=_attention_scale(raw, variant, head_dim),
        gemma=variant.gemma,
        moe=_moe(raw) if variant.experts else None,
        packing=parse_packing(raw),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_ids=eos_ids(raw, generation or {}),
    )


def _check_activation(raw: Mapping[str, Any], variant: Variant) -> None:
    """And what else of Gemma's fields would change the computation."""
    name, wanted = ("hidden_activation", "gelu_pytorch_tanh") if variant.gemma else ("hidden_act", "silu")
    if (found := raw.get(name) or wanted) != wanted:
        raise ConfigError(f"config.json: {name}: {found!r} is not supported: only {wanted}")
    if not variant.gemma:
        return
    for field in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(field):
            found = f"config.json: {field}: {raw[field]} is not supported"
            raise ConfigError(f"{found} (by transformers' code: --model-impl transformers)")


def _attention_scale(raw: Mapping[str, Any], variant: Variant, head_dim: int) -> float:
    size = float(raw.get("query_pre_attn_scalar", 256)) if variant.gemma else float(head_dim)
    if size <= 0:
        name = "query_pre_attn_scalar" if variant.gemma else "head_dim"
        raise ConfigError(f"config.json: {name}: {size:g}: must be more than 0")
    return float(size**-0.5)


def _architecture(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures") or []
    if not architectures:
        raise ConfigError("config.json: architectures: missing: it says which model this is")
    return str(architectures[0])


def eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Those of both files, in order."""
    return tuple(sorted({*_ids(raw.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}))


def _rotated(raw: Mapping[str, Any], variant: Variant) -> tuple[bool, ...]:
    """SmolLM3 (and "RoPE to NoPE and back", arXiv 2501.18795): every n-th layer is not, or what the list says."""
    num_layers = int(raw["num_hidden_layers"])
    if not variant.unrotated:
        return (True,) * num_layers
    given, step = raw.get("no_rope_layers"), int(raw.get("no_rope_layer_interval") or 4)
    if given is None:
        return tuple((i + 1) % step != 0 for i in range(num_layers))
    if len(given) < num_layers or any(one not in (0, 1) for one in given):
        raise ConfigError("config.json: no_rope_layers: must be 1 (rotated) or 0 for each layer")
    return tuple(bool(one) for one in given[:num_layers])


def _windows(raw: Mapping[str, Any], variant: Variant) -> tuple[int | None, ...]:
    num_layers = int(raw["num_hidden_layers"])
    window, types = raw.get("sliding_window", WINDOW), raw.get("layer_types")
    switched_on = bool(raw.get("use_sliding_window"))
    if variant.window == "refused":
        if switched_on:
            raise ConfigError("config.json: use_sliding_window: this architecture has no sliding window")
        return (None,) * num_layers
    if variant.window == "pattern":
        if window is None:
            raise ConfigError("config.json: sliding_window: missing")
        types = types or _pattern(raw, num_layers)
    if window is None or (variant.window not in ("always", "pattern") and not switched_on):
        window = None
    elif int(window) < 1:
        raise ConfigError(f"config.json: sliding_window: {window}: must be at least 1")
    if variant.window == "layers" and not variant.unrotated and types is None:
        first = int(raw.get("max_window_layers", 28))
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if types is None and variant.unrotated:
        types = ["full_attention" if one else "sliding_attention" for one in _rotated(raw, variant)]
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * num_layers
    if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ConfigError("config.json: layer_types: must be full_attention or sliding_attention for each layer")
    if variant.window not in ("layers", "pattern") and window is not None and "full_attention" in types:
        raise ConfigError("config.json: layer_types: this architecture has its sliding window in all layers")
    return tuple(None if window is None or kind == "full_attention" else int(window) for kind in types)


def _pattern(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    every = int(raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6)
    return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(num_layers)]


def _moe(raw: Mapping[str, Any]) -> MoeConfig:
    """`num_local_experts` is how transformers 5 writes `num_experts`."""
    num_layers, step = int(raw["num_hidden_layers"]), int(raw.get("decoder_sparse_step", 1))
    plain = set(raw.get("mlp_only_layers") or ())
    num_experts = int(raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"])
    per_token = int(raw["num_experts_per_tok"])
    if not 1 <= per_token <= num_experts:
        raise ConfigError(f"config.json: num_experts_per_tok: {per_token}: must be between 1 and {num_experts}")
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=int(raw["moe_intermediate_size"]),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        layers=frozenset(i for i in range(num_layers) if i not in plain and (i + 1) % step == 0),
    )


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


def adaptable(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) by name, such as "model.layers.0.self_attn.q_proj": all of attention, and MLPs that are not
    routed experts."""
    size, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found: dict[str, tuple[int, int]] = {}
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        for part, sizes in {"q": (size, q), "k": (size, kv), "v": (size, kv), "o": (q, size)}.items():
            found[f"{name}.self_attn.{part}_proj"] = sizes
        if config.moe is None or layer not in config.moe.layers:
            for part, sizes in {"gate": (size, inner), "up": (size, inner), "down": (inner, size)}.items():
                found[f"{name}.mlp.{part}_proj"] = sizes
    return found


def why_not(config: ModelConfig, name: str) -> str:
    """Says why a layer is not in `adaptable`."""
    if config.moe is not None and ".mlp." in name:
        return "adapters of routed experts and of their router are not computed"
    if name.endswith(("embed_tokens", "lm_head")):
        return "adapters of embeddings and of the head are not computed"
    return "the model has no such linear layer"
