"""Conversion of a GGUF file's metadata to a config.json.

Invariants: every field that changes the computation is read or refused by its key, never ignored; a value of the wrong
type is a `ConfigError` that names its key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.config import ConfigError

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes by tensor name, outermost dimension first."""

TABLE, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
_POOLINGS = ("none", "mean_tokens", "cls_token", "lasttoken", "rank")  # index: llama.cpp's pooling type
VISION = ("v.", "mm.")  # name prefixes of vision tensors in a file that has them, too
_LAYERS_OF_GEMMA3_27B = 62
_LAYERS_OF_GEMMA2_27B = 46
_NO_ROTATION = 1e30  # divisor of the frequencies of dimensions that do not rotate
_REQUIRED: Any = object()
_COMPUTATION_KEYS = {
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.temperature_scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "expert_count": 0,
    "expert_group_count": 1,
    "expert_shared_count": 0,
    "expert_weights_scale": 1.0,
    "nextn_predict_layers": 0,
}
"""Keys that change the computation of any model, and their neutral value (0 is neutral, too). A key that no reader has
read must have it."""


Config = Mapping[str, Any]


class Fields:
    """Typed access to a GGUF file's metadata by key, which records the keys that were read. `own` keys have the
    architecture's prefix, which is one of `known` (None: of `READERS`). Methods raise `ConfigError` for a missing key
    without default, or a value of the wrong type."""

    def __init__(self, metadata: Mapping[str, Any], known: Collection[str] | None = None) -> None:
        self._metadata = metadata
        self._read = set[str]()
        self.architecture = self.text("general.architecture")
        if self.architecture not in (known := READERS if known is None else known):
            supported = ", ".join(known)
            raise ConfigError(f"architecture {self.architecture!r} is not imported: only {supported}")

    def own(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        return key in self._metadata

    def suffixes(self, key: str) -> set[str]:
        """Return the suffixes of all keys that begin with `key` and a dot."""
        return {name.removeprefix(f"{key}.") for name in self._metadata if name.startswith(f"{key}.")}

    def text(self, key: str, default: str = _REQUIRED) -> str:
        return str(self._get(key, default, lambda value: isinstance(value, str), "a text"))

    def whole(self, key: str, default: int = _REQUIRED) -> int:
        value = self._get(key, default, lambda value: type(value) is int and value >= -1, "a number for all layers")
        return int(value)

    def positive(self, key: str, default: int = _REQUIRED) -> int:
        value = self.whole(key, default)
        if value < 1:
            raise ConfigError(f"{key}: {value}: must be at least 1")
        return value

    def by_layer(self, key: str, layers: int, default: int = _REQUIRED) -> list[int]:
        """Return an integer >= 1 for each layer; the file may have one value for all."""
        if not isinstance(self._metadata.get(key), list):
            return [self.positive(key, default)] * layers
        values = self.wholes(key)
        if len(values) != layers or min(values) < 1:
            raise ConfigError(f"{key}: {values!s:.40}: must be at least 1 for each of {layers} layers")
        return values

    def heads_or_none(self, key: str, layers: int) -> list[int]:
        """Return the number of heads of each layer: 0, or a positive number that is equal for all other layers."""
        values = self.wholes(key)
        if len(values) != layers or min(values) < 0 or len({*values} - {0}) != 1:
            raise ConfigError(f"{key}: {values!s:.40}: must be 0 or the same number for each of {layers} layers")
        return values

    def max_over_layers(self, key: str, default: int = _REQUIRED) -> int:
        """Return the maximum over the layers of an integer; the file may have one value for all."""
        return max(self.wholes(key)) if isinstance(self._metadata.get(key), list) else self.whole(key, default)

    def real(self, key: str, default: float = _REQUIRED) -> float:
        value = self._get(key, default, lambda value: type(value) in (int, float) and math.isfinite(value), "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, default, lambda value: type(value) is bool, "true or false"))

    def texts(self, key: str) -> list[str]:
        return self._list(key, str, "a list of texts")

    def wholes(self, key: str) -> list[int]:
        return self._list(key, int, "a list of whole numbers")

    def flags(self, key: str) -> list[bool]:
        return self._list(key, bool, "a list of true and false")

    def reals(self, key: str) -> list[float]:
        return self._list(key, float, "a list of numbers")

    def _list(self, key: str, kind: type, what: str) -> list[Any]:
        """Return a non-empty list of elements of type `kind` (GGUF lists have one type, so one element is checked)."""
        values = self._get(key, _REQUIRED, lambda value: isinstance(value, list) and type(value[0]) is kind, what)
        return list(values)

    def refuse_unread(self) -> None:
        """Raise `ConfigError` for a key of `_COMPUTATION_KEYS` that was not read and does not have its neutral
        value."""
        for name, neutral in _COMPUTATION_KEYS.items():
            value = self._metadata.get(key := self.own(name))
            if key not in self._read and value not in (None, 0, neutral):
                raise ConfigError(f"{key}: {value!r:.40} is not imported: only {neutral:g}")

    def _get(self, key: str, default: Any, fits: Callable[[Any], bool], what: str) -> Any:
        self._read.add(key)
        value = self._metadata.get(key, default)
        if value is _REQUIRED or value == []:
            raise ConfigError(f"the GGUF metadata lacks {key}")
        if not fits(value):
            shown = repr(value)
            raise ConfigError(f"{key}: {shown if len(shown) < 40 else type(value).__name__} is not {what}")
        return value


Own = Callable[[Fields, Shapes, Config], dict[str, Any]]
"""Function that returns the config fields of one architecture, which may replace the common ones."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Rules to read the metadata of an architecture. `named`: the config's `architectures`, unless `own` replaces it.
    `layer_norm`: the epsilon is LayerNorm's. `partial`: RoPE on a part of each head. `latent`: MLA, with head sizes of
    latents. `mixed`: layers may differ in sizes, `own` checks them. `states`: some layers have recurrent states,
    possibly instead of attention. `exact_yarn`: YaRN's border dimensions are not rounded (no key says so). `on_torch`:
    torch imports such files. `interleaved`: for torch, rows of q and k alternate between the two RoPE halves
    (llama.cpp: NORM). `encoder`: bidirectional attention, no EOS."""

    named: str
    own: Own = lambda fields, shapes, config: {}
    model_type: str = ""
    layer_norm: bool = False
    partial: bool = False
    latent: bool = False
    states: bool = False
    on_torch: bool = False
    interleaved: bool = False
    exact_yarn: bool = False
    mixed: bool = False
    encoder: bool = False


def config_of(fields: Fields, shapes: Shapes, factors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the config.json of a GGUF file. `factors`: the values of those of `ROPE_FACTORS`, `LONG_FACTORS` and
    `SHORT_FACTORS` that the file has. Raises `ConfigError`."""
    own, reader = fields.own, READERS[fields.architecture]
    hidden = fields.positive(own("embedding_length"))
    count = fields.max_over_layers if reader.states else fields.positive
    heads = max(1, count(own("attention.head_count")))  # 0: no layer has attention
    head_dim = fields.positive(own("attention.key_length"), hidden // heads)
    rotated = fields.positive(own("rope.dimension_count"), head_dim)
    fixed = {"attention.value_length": fields.whole(own("attention.value_length"), head_dim)}
    if reader.latent:
        fixed = {}
    elif not reader.partial or rotated > head_dim:
        fixed["rope.dimension_count"] = rotated
    for key, value in fixed.items():
        if value != head_dim:
            raise ConfigError(f"{own(key)}: {value} is not imported: only {head_dim}, the size of a head")
    further = fields.whole(own("nextn_predict_layers"), 0)  # the last blocks, which predict further tokens (MTP)
    layers = fields.positive(own("block_count"))
    last = f"blk.{layers - further - 1}"
    if reader.mixed:
        check_shapes(shapes, {f"blk.{layers - 1}.attn_norm.weight": (hidden,)})
    if reader.states:
        heads_kv = fields.max_over_layers(own("attention.head_count_kv"), heads)
        of_experts = fields.whole(own("expert_feed_forward_length"), 0)  # used if no layer has a dense MLP
        inner = fields.max_over_layers(own("feed_forward_length"), of_experts or _REQUIRED)
        attending = [i for i in range(min(layers, len(shapes))) if f"blk.{i}.attn_q.weight" in shapes]
        last = f"blk.{attending[-1]}" if attending else ""
    else:
        heads_kv, inner = (
            fields.by_layer(own(key), layers, default)[0] if reader.mixed else fields.positive(own(key), default)
            for key, default in (("attention.head_count_kv", heads), ("feed_forward_length", _REQUIRED))
        )
    layers -= further
    vocab = shapes.get(TABLE, (0,))[0]
    sizes = {"q": heads * head_dim, "k": heads_kv * head_dim}
    expected = {f"{last}.attn_{part}.weight": (size, hidden) for part, size in sizes.items() if last}
    if f"{last}.attn_qkv.weight" in shapes:
        expected = {f"{last}.attn_qkv.weight": ((heads + 2 * heads_kv) * head_dim, hidden)}
    if reader.latent:
        expected = {f"{last}.attn_kv_a_mqa.weight": (head_dim, hidden)}
    check_shapes(shapes, {TABLE: (vocab, hidden), **({} if reader.mixed else expected)})
    epsilon = "attention.layer_norm_epsilon" if reader.layer_norm else "attention.layer_norm_rms_epsilon"
    config: dict[str, Any] = {
        "architectures": [reader.named],
        "model_type": reader.model_type or fields.architecture,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": max(further, 0),
        "num_attention_heads": heads,
        "num_key_value_heads": heads_kv,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": fields.positive(own("context_length")),
        "layer_norm_eps" if reader.layer_norm else "rms_norm_eps": fields.real(own(epsilon)),
        "rope_theta": fields.real(own("rope.freq_base"), 10_000.0),
        "tie_word_embeddings": HEAD not in shapes,
        "eos_token_id": 0 if reader.encoder else fields.whole("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }
    if reader.partial:
        config["partial_rotary_factor"] = rotated / head_dim
    if reader.encoder:
        del config["eos_token_id"]
    config |= {"hidden_act": "silu"} | reader.own(fields, shapes, config)
    if fields.flag(own("attention.causal"), not reader.encoder) == reader.encoder:
        raise ConfigError(f"{own('attention.causal')}: {not reader.encoder} is not imported with this architecture")
    if (window := _window(fields, config)) and "sliding_window" not in config:
        raise ConfigError(f"{own('attention.sliding_window')}: {window}: no key says which layers have it")
    fields.refuse_unread()
    if any(name.startswith(VISION) for name in shapes):
        config["other_half"] = list(VISION)
    if scaling := _rope_scaling(fields, factors, config):
        config["rope_scaling"] = scaling
    if (bos := fields.whole("tokenizer.ggml.bos_token_id", -1)) >= 0:
        config["bos_token_id"] = bos
    return config


def pooling_of(fields: Fields) -> dict[str, bool]:
    """Return the 1_Pooling/config.json of an embedding model; empty if the file has no pooling type."""
    key = fields.own("pooling_type")
    if (number := fields.whole(key, -1)) < 0:
        return {}
    if number >= len(_POOLINGS):
        raise ConfigError(f"{key}: {number}: must be at most {len(_POOLINGS) - 1}")
    return {f"pooling_mode_{_POOLINGS[number]}": True}


def check_shapes(shapes: Shapes, expected: Shapes) -> None:
    """Raise `ConfigError` unless tensors have the `expected` shapes. Tensors cannot exceed their file, so this bounds
    sizes from the metadata, which would cost memory everywhere."""
    for name, shape in expected.items():
        if shapes.get(name) != shape:
            problem = (
                f"is {list(shapes[name])}, not {list(shape)} as the metadata says" if name in shapes else "is missing"
            )
            raise ConfigError(f"tensor {name} {problem}")


def _window(fields: Fields, config: Config) -> int | None:
    """Return the sliding window; None if it is not shorter than the context."""
    window = fields.whole(fields.own("attention.sliding_window"), 0)
    return window if 0 < window < config["max_position_embeddings"] else None


def _llama(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of a llama file, which may also be a Mistral or a Mixtral."""
    window = _window(fields, config)
    if fields.whole(fields.own("expert_count"), 0):
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            **_experts(fields),
            "sliding_window": window,
        }
    if window:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_gate.bias" in shapes}


def _qwen3(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    return {"attention_bias": False}


def _qwen3_moe(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of Qwen3 MoE. llama.cpp normalizes the expert weights of all models of this
    architecture."""
    own = fields.own
    routers = [f"blk.{i}.ffn_gate_inp.weight" for i in range(config["num_hidden_layers"])]
    experts, size = fields.positive(own("expert_count")), fields.positive(own("expert_feed_forward_length"))
    for name in routers:
        if name in shapes:
            gate = name.replace("_inp", "_exps")
            check_shapes(shapes, {gate: (experts, size, config["hidden_size"])})
    return {
        "attention_bias": False,
        "num_experts": experts,
        "num_experts_per_tok": fields.positive(own("expert_used_count")),
        "moe_intermediate_size": size,
        "norm_topk_prob": True,
        "mlp_only_layers": [i for i, name in enumerate(routers) if name not in shapes],
    }


def _smollm3(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of SmolLM3. No key says which layers apply RoPE; it is llama.cpp's choice."""
    return {"no_rope_layer_interval": 4, "attention_bias": "blk.0.attn_q.bias" in shapes}


def _gemma3(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of Gemma 3, with llama.cpp's values where there is no key: every sixth layer has full
    attention, layers with a window have RoPE base 10,000, and only the 27B model scales scores by another size."""
    own, layers = fields.own, config["num_hidden_layers"]
    window = fields.whole(own("attention.sliding_window"), 0)
    every = fields.whole(own("attention.sliding_window_pattern"), 6) if window > 0 else 1
    full = [every > 0 and (i + 1) % every == 0 for i in range(layers)]
    is_27b = layers == _LAYERS_OF_GEMMA3_27B
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": max(window, 1),
        "layer_types": ["full_attention" if is_full else "sliding_attention" for is_full in full],
        "rope_local_base_freq": fields.real(own("rope.freq_base_swa"), 10_000.0),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_27b
        else config["head_dim"],
    }


def _gemma4(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of Gemma 4: full-attention layers have another head size, possibly fewer KV heads, and
    no v projection; the last layers have no k projection either, and possibly MLPs of twice the size."""
    own, layers, hidden = fields.own, config["num_hidden_layers"], config["hidden_size"]
    config_fields, size = _layer_types(fields), fields.positive(own("attention.key_length_swa"))
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (other := fields.whole(own(key), size)) != size:
            raise ConfigError(f"{own(key)}: {other} is not imported: only {size}, the size of a head")
    full = [kind == "full_attention" for kind in config_fields["layer_types"]]
    heads_kv = fields.by_layer(own("attention.head_count_kv"), layers, config["num_attention_heads"])
    heads = [(count, config["head_dim"] if one else size) for count, one in zip(heads_kv, full, strict=True)]
    shared = max(fields.whole(own("attention.shared_kv_layers"), 0), 0)
    inner, plain = fields.by_layer(own("feed_forward_length"), layers), config["intermediate_size"]
    if inner != [plain] * (layers - shared) + [inner[-1]] * shared or inner[-1] not in (plain, 2 * plain):
        raise ConfigError(
            f"{own('feed_forward_length')}: {inner}: only the last {shared}, which share KV, may have twice the size"
        )
    for layer, (count, dim) in enumerate(heads):
        expected = {f"blk.{layer}.attn_q.weight": (config["num_attention_heads"] * dim, hidden)}
        if layer < layers - shared:
            expected[f"blk.{layer}.attn_k.weight"] = (count * dim, hidden)
        check_shapes(shapes, expected)
    embedding = "per_layer_token_embd.weight"
    if "blk.0.ffn_gate_inp.weight" in shapes:
        size_of_experts = fields.positive(own("expert_feed_forward_length"))
        config_fields |= {**_experts(fields), "enable_moe_block": True, "moe_intermediate_size": size_of_experts}
    return {
        **config_fields,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": size,
        "per_layer_config": {
            str(layer): {"num_key_value_heads": count, "head_dim": dim} for layer, (count, dim) in enumerate(heads)
        },
        "attention_k_eq_v": any(
            one and f"blk.{i}.attn_v.weight" not in shapes for i, one in enumerate(full[: layers - shared])
        ),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": inner[-1] != plain,
        "hidden_size_per_layer_input": fields.whole(own("embedding_length_per_layer_input"), 0),
        "vocab_size_per_layer_input": shapes[embedding][0] if embedding in shapes else 0,
        "final_logit_softcapping": fields.real(own("final_logit_softcapping"), 30.0),
        "rope_local_base_freq": fields.real(own("rope.freq_base_swa"), 10_000.0),
    }


def _gemma3n(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of Gemma 3n. The k and v projections of its last layers are unused. Gate thresholds are
    by layer, infinite for layers without one."""
    own, layers = fields.own, config["num_hidden_layers"]
    if active := fields.whole(own("altup.active_idx"), 0):
        raise ConfigError(f"{own('altup.active_idx')}: {active} is not imported: only 0")
    embedding, low_rank = "per_layer_token_embd.weight", "blk.0.laurel_l.weight"
    for name in (embedding, low_rank):
        if len(shapes.get(name, ())) != 2:
            raise ConfigError(f"the GGUF file lacks the matrix {name}")
    return {
        **_layer_types(fields),
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": fields.by_layer(own("feed_forward_length"), layers),
        "num_kv_shared_layers": max(fields.whole(own("attention.shared_kv_layers"), 0), 0),
        "hidden_size_per_layer_input": fields.positive(own("embedding_length_per_layer_input")),
        "vocab_size_per_layer_input": shapes[embedding][0],
        "altup_num_inputs": fields.positive(own("altup.num_inputs"), 4),
        "laurel_rank": shapes[low_rank][0],
        "activation_sparsity_scale": [
            scale if math.isfinite(scale) else 0.0 for scale in fields.reals(own("activation_sparsity_scale"))
        ],
        "final_logit_softcapping": fields.real(own("final_logit_softcapping"), 30.0),
        "rope_local_base_freq": fields.real(own("rope.freq_base_swa"), 10_000.0),
    }


def _experts(fields: Fields) -> dict[str, Any]:
    own = fields.own
    return {
        "num_local_experts": fields.positive(own("expert_count")),
        "num_experts_per_tok": fields.positive(own("expert_used_count")),
    }


def _layer_types(fields: Fields, every: int | None = None) -> dict[str, Any]:
    """Return the window, and the layers that have it: from a list by layer, or all but every `every`-th."""
    own, layers = fields.own, fields.positive(fields.own("block_count"))
    window, pattern = fields.positive(own("attention.sliding_window")), own("attention.sliding_window_pattern")
    windows = fields.flags(pattern) if every is None else [(i + 1) % every != 0 for i in range(layers)]
    if len(windows) != layers:
        raise ConfigError(f"{pattern}: must have {layers} values, one for each layer, not {len(windows)}")
    kinds = ["sliding_attention" if windowed else "full_attention" for windowed in windows]
    return {"sliding_window": window, "layer_types": kinds}


def _phi3(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    own = fields.own
    original = fields.positive(own("rope.scaling.original_context_length"), config["max_position_embeddings"])
    window = fields.whole(own("attention.sliding_window"), 0)
    return {"original_max_position_embeddings": original, "sliding_window": window if window > 0 else None}


def _granite(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    keys = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    plain = {"attention_multiplier": config["head_dim"] ** -0.5}
    scales: dict[str, Any] = {name: fields.real(fields.own(key), plain.get(name, 1.0)) for name, key in keys.items()}
    if not all(scales.values()):
        raise ConfigError(f"scales of granite: {scales}: none may be 0")
    biases = {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_gate.bias" in shapes}
    return {**scales, **biases}


def _granite_moe(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    config_fields = {**_granite(fields, shapes, config), **_experts(fields)}
    if size := max(fields.whole(fields.own("expert_shared_feed_forward_length"), 0), 0):
        own = {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}
        return {**config_fields, **own, "shared_intermediate_size": size}
    return config_fields


def _olmo2(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    if not fields.whole(fields.own("attention.sliding_window"), 0):
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **_layer_types(fields)}


def _gemma2(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of Gemma 2. Only the 27B model scales scores by another size than the head's."""
    own, is_27b = fields.own, config["num_hidden_layers"] == _LAYERS_OF_GEMMA2_27B
    sizes = (config["hidden_size"] // config["num_attention_heads"], config["head_dim"])
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": sizes[0] if is_27b else sizes[1],
        "attn_logit_softcapping": fields.real(own("attn_logit_softcapping"), 50.0),
        "final_logit_softcapping": fields.real(own("final_logit_softcapping"), 30.0),
        **_layer_types(fields, every=2),
    }


def _qwen2_moe(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    own, shared = fields.own, shapes.get("blk.0.ffn_gate_shexp.weight", (0,))[0]  # older files have no key for it
    return {
        **_experts(fields),
        "moe_intermediate_size": fields.positive(own("expert_feed_forward_length")),
        "shared_expert_intermediate_size": fields.positive(own("expert_shared_feed_forward_length"), shared),
        "norm_topk_prob": False,
    }


def _stablelm(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    return {
        "use_parallel_residual": fields.flag(fields.own("use_parallel_residual"), True),
        "use_qkv_bias": "blk.0.attn_q.bias" in shapes,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in shapes,
    }


def _starcoder2(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    window = fields.whole(fields.own("attention.sliding_window"), 0)
    bias = "blk.0.attn_q.bias" in shapes
    config_fields = {"hidden_act": "gelu_pytorch_tanh", "use_bias": bias, "norm_epsilon": config["layer_norm_eps"]}
    return {**config_fields, "sliding_window": window if window > 0 else None}


def _cohere(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    return {
        "logit_scale": fields.real(fields.own("logit_scale")),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
    }


def _cohere2(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    return {**_cohere(fields, shapes, config), **_layer_types(fields, every=4)}


def _biases(name: str) -> Own:
    return lambda fields, shapes, config: {name: any(f"blk.0.attn_{part}.bias" in shapes for part in ("q", "qkv"))}


def _exaone4(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    if not fields.whole(fields.own("attention.sliding_window"), 0):
        return {"sliding_window": None}
    return _layer_types(fields)


def _seed_oss(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in shapes, "attention_out_bias": "blk.0.attn_output.bias" in shapes}


def _arcee(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    biases = {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    return {"hidden_act": "relu2", **biases}


def _ministral3(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of Ministral 3, or of an older Mistral if queries are not scaled by position."""
    if not fields.real(fields.own("attention.temperature_scale"), 0.0):
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    return {"model_type": "ministral3", "sliding_window": None}


def _gpt_oss(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    size = fields.positive(fields.own("expert_feed_forward_length"))
    return {
        **_experts(fields),
        **_layer_types(fields, every=2),
        "intermediate_size": size,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "rope_scaling": {"rope_type": "default"},  # unless the file has another
    }


def _nemotron(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    biases = {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    return {"hidden_act": "relu2", "norm_eps": config["layer_norm_eps"], **biases}


def _falcon(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of a Falcon in the newer spelling, with the file's number of KV heads."""
    return {
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in shapes else 1,
        "num_kv_heads": config["num_key_value_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "layer_norm_epsilon": config["layer_norm_eps"],
        "bias": "blk.0.attn_qkv.bias" in shapes,
    }


def _gpt2(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    check_shapes(shapes, {"position_embd.weight": (config["max_position_embeddings"], config["hidden_size"])})
    sizes = {"n_inner": config["intermediate_size"], "layer_norm_epsilon": config["layer_norm_eps"]}
    return {**sizes, "multi_query": config["num_key_value_heads"] == 1}


def _bert(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of BERT, RoBERTa or XLM-R. Their converter drops the unused rows of the position
    table."""
    check_shapes(shapes, {"position_embd.weight": (config["max_position_embeddings"], config["hidden_size"])})
    own = fields.text("tokenizer.ggml.model", "") == "bert"
    return {"hidden_act": "gelu", "pair_types": own, **_token_types(fields, shapes)}


def _token_types(fields: Fields, shapes: Shapes) -> dict[str, Any]:
    fields.whole("tokenizer.ggml.token_type_count", 0)
    return {"type_vocab_size": shapes.get("token_types.weight", (0,))[0]}


def _nomic_bert(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    bias = "blk.0.attn_qkv.bias" in shapes
    return {**_token_types(fields, shapes), "qkv_proj_bias": bias, "mlp_fc1_bias": "blk.0.ffn_up.bias" in shapes}


def _nomic_bert_moe(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of Nomic's MoE. The converter omits the bias of the experts' sum."""
    own = fields.own
    experts, inner, hidden = fields.positive(own("expert_count")), config["intermediate_size"], config["hidden_size"]
    every = fields.positive(own("moe_every_n_layers"))
    if config["num_hidden_layers"] > 1:
        check_shapes(shapes, {"blk.1.ffn_up_exps.weight": (experts, inner, hidden)})
    return {
        **_nomic_bert(fields, shapes, config),
        "activation_function": "gelu",
        "num_experts": experts,
        "moe_top_k": fields.positive(own("expert_used_count")),
        "moe_every_n_layers": every,
        "moe_sum_bias": False,
    }


def _jina_bert(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of Jina BERT. First files have separate gate and up. Slopes are for a maximum bias
    of 8."""
    if (most := fields.real(key := fields.own("attention.max_alibi_bias"), 8.0)) != 8.0:
        raise ConfigError(f"{key}: {most:g} is not imported: only 8")
    inner, hidden = config["intermediate_size"], config["hidden_size"]
    apart = "blk.0.ffn_gate.weight" in shapes
    check_shapes(shapes, {"blk.0.ffn_up.weight": (inner if apart else 2 * inner, hidden)})
    return {"position_embedding_type": "alibi", "feed_forward_type": "geglu", **_token_types(fields, shapes)}


def _modern_bert(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of ModernBERT, with llama.cpp's values where there is no key: every third layer has full
    attention, the others have RoPE base 10,000."""
    own = fields.own
    return {
        "hidden_activation": fields.text(own("hidden_activation"), "gelu"),
        "local_attention": (window := fields.positive(own("attention.sliding_window"), 128)),
        "sliding_window": window,
        "global_attn_every_n_layers": fields.positive(own("attention.sliding_window_pattern"), 3),
        "global_rope_theta": config["rope_theta"],
        "local_rope_theta": fields.real(own("rope.freq_base_swa"), 10_000.0),
        "rope_theta": None,
        "norm_eps": config["rms_norm_eps"],
        "norm_bias": "blk.0.ffn_norm.bias" in shapes,
        "attention_bias": "blk.0.attn_qkv.bias" in shapes,
    }


def _gemma_embedding(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    return {**_gemma3(fields, shapes, config), "use_bidirectional_attention": True}


def _gptneox(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    return {"hidden_act": "gelu", "use_parallel_residual": fields.flag(fields.own("use_parallel_residual"), True)}


def _grouped(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the MoE fields of DeepSeek V3's routing."""
    own = fields.own
    experts, size = fields.positive(own("expert_count")), fields.positive(own("expert_feed_forward_length"))
    check_shapes(shapes, _experts_of_last(config, experts, size))
    return {
        **_routing(fields),
        "n_shared_experts": max(fields.whole(own("expert_shared_count"), 0), 0),
        "first_k_dense_replace": max(fields.whole(own("leading_dense_block_count"), 0), 0),
    }


def _routing(fields: Fields) -> dict[str, Any]:
    own = fields.own
    return {
        "n_routed_experts": fields.positive(own("expert_count")),
        "num_experts_per_tok": fields.positive(own("expert_used_count")),
        "moe_intermediate_size": fields.positive(own("expert_feed_forward_length")),
        "n_group": fields.positive(own("expert_group_count"), 1),
        "topk_group": fields.positive(own("expert_group_used_count"), 1),
        "routed_scaling_factor": fields.real(own("expert_weights_scale"), 1.0) or 1.0,
        "norm_topk_prob": fields.flag(own("expert_weights_norm"), False),
    }


def _experts_of_last(config: Config, experts: int, size: int) -> Shapes:
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    return {f"blk.{last}.ffn_gate_exps.weight": (experts, size, hidden)}


_SOFTMAX, _SIGMOID = 1, 2


def _is_sigmoid(fields: Fields, otherwise: int) -> bool:
    key = fields.own("expert_gating_func")
    if (function := fields.whole(key, otherwise)) not in (_SOFTMAX, _SIGMOID):
        raise ConfigError(f"{key}: {function} is not imported: only {_SOFTMAX} (softmax) and {_SIGMOID} (sigmoid)")
    return function == _SIGMOID


def _only_sigmoid(fields: Fields) -> None:
    if not _is_sigmoid(fields, _SIGMOID):
        raise ConfigError(f"{fields.own('expert_gating_func')}: softmax is not imported with this architecture")


def _glm4_moe(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    _only_sigmoid(fields)
    biases = {"attention_bias": "blk.0.attn_q.bias" in shapes, "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes}
    return {**_grouped(fields, shapes, config), **biases}


def _dots1(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    _only_sigmoid(fields)
    return {**_grouped(fields, shapes, config), "sliding_window": None}


def _minimax_m2(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    _only_sigmoid(fields)
    return {**_experts(fields), "intermediate_size": fields.positive(fields.own("expert_feed_forward_length"))}


def _deepseek2(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of DeepSeek V2 (softmax expert scores), or of V3 and GLM-4.7-Flash (sigmoids with a
    bias)."""
    own, rotated = fields.own, fields.positive(fields.own("rope.dimension_count"))
    plain = fields.positive(own("attention.key_length_mla")) - rotated
    config_fields = {
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": plain,
        "kv_lora_rank": config["head_dim"] - rotated,
        "q_lora_rank": max(fields.whole(own("attention.q_lora_rank"), 0), 0),
        "v_head_dim": fields.positive(own("attention.value_length_mla")),
        **_grouped(fields, shapes, config),
    }
    if _is_sigmoid(fields, _SOFTMAX):
        return config_fields
    method = "group_limited_greedy" if config_fields["n_group"] > 1 else "greedy"
    return {
        **config_fields,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": method,
    }


def _ernie_moe(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    own, size = fields.own, fields.positive(fields.own("expert_feed_forward_length"))
    experts, shared = fields.positive(own("expert_count")), fields.whole(own("expert_shared_count"), 0)
    return {
        "moe_num_experts": experts,
        "moe_k": fields.positive(own("expert_used_count")),
        "moe_intermediate_size": size,
        "moe_num_shared_experts": max(shared, 0),
        "moe_layer_interval": fields.positive(own("interleave_moe_layer_step"), 1),
        "moe_layer_start_index": max(fields.whole(own("leading_dense_block_count"), 0), 0),
    }


def _hunyuan_moe(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    own = fields.own
    size = fields.positive(own("expert_feed_forward_length"))
    shared = fields.whole(own("expert_shared_feed_forward_length"), size) * fields.whole(own("expert_shared_count"), 1)
    if not size == shared == config["intermediate_size"]:
        raise ConfigError(
            f"{own('expert_feed_forward_length')}: {size}, {shared} of shared experts: both must be "
            f"{config['intermediate_size']}, the feed_forward_length"
        )
    experts = fields.positive(own("expert_count"))
    check_shapes(shapes, _experts_of_last(config, experts, size))
    biases = {"attention_bias": "blk.0.attn_q.bias" in shapes}
    return {"num_experts": experts, "moe_topk": fields.positive(own("expert_used_count")), **biases}


def _minicpm3(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of MiniCPM 3, with llama.cpp's values where there is no key: the scales of the only such
    model, and values of hidden size / heads."""
    own, last = fields.own, config["num_hidden_layers"] - 1
    rank, rotated = fields.positive(own("attention.kv_lora_rank")), fields.positive(own("rope.dimension_count"))
    plain, value = config["head_dim"] - rotated, config["hidden_size"] // config["num_attention_heads"]
    rows = config["num_attention_heads"] * (plain + value)
    latents = {f"blk.{last}.attn_kv_a_mqa.weight": (rank + rotated, config["hidden_size"])}
    check_shapes(shapes, {**latents, f"blk.{last}.attn_kv_b.weight": (rows, rank)})
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": max(fields.whole(own("attention.q_lora_rank"), 0), 0),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": plain,
        "v_head_dim": value,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


_LAYERS_OF_LLAMA4, _EXPERTS_OF_MAVERICK = 48, 128


def _llama4(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of Llama 4, with llama.cpp's values where there is no key: chunks of 8,192 tokens, every
    fourth layer without RoPE, q and k norms in all models but the one with 128 experts."""
    own, experts = fields.own, fields.positive(fields.own("expert_count"))
    is_maverick = experts == _EXPERTS_OF_MAVERICK and config["num_hidden_layers"] == _LAYERS_OF_LLAMA4
    return {
        **_experts(fields),
        "intermediate_size": fields.positive(own("expert_feed_forward_length")),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": fields.positive(own("interleave_moe_layer_step")),
        "attention_chunk_size": None if fields.whole(own("attention.sliding_window"), -1) == 0 else 8192,
        "no_rope_layer_interval": 4,
        "use_qk_norm": not is_maverick,
    }


def _lfm2(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    own, layers = fields.own, config["num_hidden_layers"]
    kv_heads = fields.heads_or_none(own("attention.head_count_kv"), layers)
    length, hidden = fields.positive(own("shortconv.l_cache")), config["hidden_size"]
    for layer in (layer for layer, count in enumerate(kv_heads) if not count):
        check_shapes(shapes, {f"blk.{layer}.shortconv.conv.weight": (hidden, length)})
    return {
        "layer_types": ["full_attention" if count else "conv" for count in kv_heads],
        "conv_L_cache": length,
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in shapes),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
    }


def _lfm2_moe(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of LFM2 MoE. llama.cpp normalizes the expert weights."""
    _only_sigmoid(fields)
    own, size = fields.own, fields.positive(fields.own("expert_feed_forward_length"))
    experts = fields.positive(own("expert_count"))
    check_shapes(shapes, _experts_of_last(config, experts, size))
    return {
        **_lfm2(fields, shapes, config),
        "num_experts": experts,
        "num_experts_per_tok": fields.positive(own("expert_used_count")),
        "moe_intermediate_size": size,
        "num_dense_layers": max(fields.whole(own("leading_dense_block_count"), 0), 0),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in shapes),
        "norm_topk_prob": True,
        "routed_scaling_factor": fields.real(own("expert_weights_scale"), 1.0) or 1.0,
    }


def _delta_net(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of a gated delta net. Tensors show which layers are attention; q includes the output
    gates."""
    own, kinds = fields.own, _kinds(shapes, config, ("ssm_out", "attn_q"))
    keys, size, values = (fields.positive(own(f"ssm.{key}")) for key in ("group_count", "state_size", "time_step_rank"))
    inner, hidden = fields.positive(own("ssm.inner_size")), config["hidden_size"]
    if inner % values:
        raise ConfigError(f"{own('ssm.inner_size')}: {inner}: must be a multiple of {values} heads")
    of_q, of_k = (config[f"num_{one}_heads"] * config["head_dim"] for one in ("attention", "key_value"))
    by_kind = {
        "mamba": {"attn_qkv": 2 * keys * size + inner, "attn_gate": inner},
        "attention": {"attn_q": 2 * of_q, "attn_k": of_k},
    }
    for layer, kind in enumerate(kinds):
        check_shapes(shapes, {f"blk.{layer}.{part}.weight": (rows, hidden) for part, rows in by_kind[kind].items()})
    return {
        "layer_types": ["full_attention" if kind == "attention" else "linear_attention" for kind in kinds],
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": size,
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": fields.positive(own("ssm.conv_kernel")),
    }


def _delta_net_moe(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    return {
        **_qwen2_moe(fields, shapes, config),
        **_qwen3_moe(fields, shapes, config),
        **_delta_net(fields, shapes, config),
    }


# config fields of a Mamba-2 layer's sizes: most models, Mamba2 itself, Nemotron-H
MAMBA_FIELDS = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "size": "mamba_d_state",
    "length": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
}
MAMBA2_FIELDS = {
    "heads": "num_heads",
    "head_dim": "head_dim",
    "groups": "n_groups",
    "size": "state_size",
    "length": "conv_kernel",
    "conv_bias": "use_conv_bias",
}
NEMOTRON_FIELDS = MAMBA2_FIELDS | {"heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "size": "ssm_state_size"}
_KINDS = {"ssm_in": "mamba", "ssm_out": "mamba", "attn_q": "attention", "ffn_up": "mlp", "ffn_up_exps": "moe"}


def _kinds(shapes: Shapes, config: Config, parts: Sequence[str]) -> list[str]:
    """Return the kind of each layer, by the first of `parts` for which it has a tensor."""
    kinds = list[str]()
    for layer in range(config["num_hidden_layers"]):
        own = [part for part in parts if f"blk.{layer}.{part}.weight" in shapes]
        if not own:
            raise ConfigError(f"layer {layer}: must have a tensor of {', '.join(parts)}")
        kinds.append(_KINDS[own[0]])
    return kinds


def _ssm(fields: Fields, shapes: Shapes, config: Config, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the sizes of Mamba-2 layers under the config's `names`."""
    heads, inner = (fields.positive(fields.own(f"ssm.{key}")) for key in ("time_step_rank", "inner_size"))
    if inner % heads:
        raise ConfigError(f"{fields.own('ssm.inner_size')}: {inner}: must be a multiple of {heads} heads")
    rest = ("group_count", "state_size", "conv_kernel")
    groups, size, length = (fields.positive(fields.own(f"ssm.{key}")) for key in rest)
    numbers = {"heads": heads, "head_dim": inner // heads, "groups": groups, "size": size, "length": length}
    first = next((name for name in shapes if name.endswith(".ssm_in.weight")), "blk.0.ssm_in.weight")
    check_shapes(shapes, {first: (2 * inner + 2 * groups * size + heads, config["hidden_size"])})
    bias = any(name.endswith(".ssm_conv1d.bias") for name in shapes)
    return {**{names[own]: value for own, value in numbers.items()}, names["conv_bias"]: bias}


def _granite_hybrid(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    own, kinds = fields.own, _kinds(shapes, config, ("ssm_in", "attn_q"))
    experts = max(fields.whole(own("expert_count"), 0), 0)
    gate = "blk.0.ffn_gate_shexp.weight" if experts else "blk.0.ffn_gate.weight"
    rotates = fields.flag(own("rope.scaling.finetuned"), False)
    return {
        **_granite(fields, shapes, config),
        **_ssm(fields, shapes, config, MAMBA_FIELDS),
        **(_experts(fields) if experts else {"num_local_experts": 0}),
        "layer_types": kinds,
        "mamba_expand": fields.positive(own("ssm.inner_size")) / config["hidden_size"],
        "shared_intermediate_size": shapes.get(gate, (0,))[0],
        "position_embedding_type": "rope" if rotates else None,
    }


def _falcon_h1(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    """Return the config fields of Falcon H1. The converter has multiplied the model's scale factors into the
    weights."""
    sizes = _ssm(fields, shapes, config, MAMBA_FIELDS)
    return {
        **sizes,
        "mamba_d_ssm": sizes["mamba_n_heads"] * sizes["mamba_d_head"],
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in shapes,
        "mamba_norm_before_gate": False,
    }


def _nemotron_h(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    own = fields.own
    if latent := fields.whole(key := own("moe_latent_size"), 0):
        raise ConfigError(f"{key}: {latent} is not imported: only 0")
    config_fields: dict[str, Any] = {
        **_ssm(fields, shapes, config, NEMOTRON_FIELDS),
        "layers_block_type": _kinds(shapes, config, ("ssm_in", "attn_q", "ffn_up", "ffn_up_exps")),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mlp_hidden_act": "relu2",
    }
    if fields.whole(own("expert_count"), 0) < 1:
        return config_fields
    return {
        **config_fields,
        **_routing(fields),
        "moe_shared_expert_intermediate_size": fields.positive(own("expert_shared_feed_forward_length")),
        "n_shared_experts": fields.positive(own("expert_shared_count")),
    }


def _mamba2(fields: Fields, shapes: Shapes, config: Config) -> dict[str, Any]:
    return {**_ssm(fields, shapes, config, MAMBA2_FIELDS), "layer_norm_epsilon": config["rms_norm_eps"]}


def _rope_scaling(fields: Fields, tensors: Mapping[str, Sequence[float]], config: Config) -> dict[str, Any]:
    """Return the RoPE scaling as in config.json; empty for plain RoPE. `tensors`: the frequency factors in the file."""
    name = fields.own("rope.scaling.type")
    kind, factors = fields.text(name, "none"), tensors.get(ROPE_FACTORS)
    if LONG_FACTORS in tensors and SHORT_FACTORS in tensors:
        return {
            "rope_type": "longrope",
            "short_factor": list(tensors[SHORT_FACTORS]),
            "long_factor": list(tensors[LONG_FACTORS]),
            "attention_factor": fields.real(fields.own("rope.scaling.attn_factor"), 1.0),
        }
    if factors is not None and max(factors, default=0.0) >= _NO_ROTATION:
        turning = [factor for factor in factors if factor < _NO_ROTATION]
        if turning != list(factors[: len(turning)]) or set(turning) != {1.0} or kind not in ("none", ""):
            raise ConfigError(f"{ROPE_FACTORS}: only the first dimensions may rotate, with unscaled frequencies")
        return {"rope_type": "proportional", "partial_rotary_factor": len(turning) / len(factors)}
    if factors is not None:
        if kind not in ("none", "", "llama3"):
            raise ConfigError(f"{name}: {kind!r} together with {ROPE_FACTORS} is not imported")
        return _llama3(factors, config, fields.whole(fields.own("rope.scaling.original_context_length"), 0))
    if kind in ("none", ""):
        return {}
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{name}: {kind!r} is not imported: use the model's safetensors")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.real(fields.own("rope.scaling.factor"))}
    if kind == "linear":
        return scaling
    for key, plain in (
        ("attn_factor", 1.0),
        ("yarn_attn_factor", 1.0),
        ("yarn_ext_factor", 1.0),
    ):
        if (value := fields.real(own := fields.own(f"rope.scaling.{key}"), plain)) != plain:
            raise ConfigError(f"{own}: {value:g} is not imported: use the model's safetensors")
    original = fields.own("rope.scaling.original_context_length")
    scaling["original_max_position_embeddings"] = fields.positive(original)
    if READERS[fields.architecture].exact_yarn:
        scaling["truncate"] = False
    if growth := fields.real(fields.own("attention.temperature_scale"), 0.0):
        scaling["llama_4_scaling_beta"] = growth
    if mscale := fields.real(fields.own("rope.scaling.yarn_log_multiplier"), 0.0):
        # for MLA the converter writes a tenth of it, and mscale = mscale_all_dim
        if READERS[fields.architecture].latent:
            scaling |= {"mscale": 10 * mscale, "mscale_all_dim": 10 * mscale}
        else:
            scaling |= {"mscale": 1.0, "mscale_all_dim": mscale}  # llama.cpp assumes 1 for the first
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        scaling[name] = fields.real(fields.own(f"rope.scaling.{key}"), 0.0) or None
    return scaling


def _llama3(factors: Sequence[float], config: Mapping[str, Any], original: int) -> dict[str, Any]:
    """Recover Llama 3.1's RoPE scaling from the frequency divisors that converters write: the factor is that of the
    longest waves, the original context is found by trial. Raises `ConfigError` if none fits."""
    theta, size, factor = config["rope_theta"], config["head_dim"], max(factors, default=0.0)
    usual = [2**power for power in range(13, 4, -1)] + [2**power for power in range(14, 21)]
    if len(factors) == size // 2 and factor >= 1.0 and theta > 0.0:
        waves = [2 * math.pi * theta ** (2 * i / size) for i in range(size // 2)]
        for context in [original, *usual] if original > 0 else usual:
            made = [_llama3_factor(wave, factor, context) for wave in waves]
            if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(made, factors, strict=True)):
                return {
                    "rope_type": "llama3",
                    "factor": round(factor, 4),
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": context,
                }
    raise ConfigError(f"{ROPE_FACTORS}: these factors are not those of Llama 3.1: use the model's safetensors")


def _llama3_factor(wave: float, factor: float, context: int) -> float:
    low, high = 1.0, 4.0
    if wave < context / high:
        return 1.0
    if wave > context / low:
        return factor
    blend = (context / wave - low) / (high - low)
    return 1.0 / ((1.0 - blend) / factor + blend)


READERS: dict[str, Reader] = {
    "llama": Reader("LlamaForCausalLM", _llama, on_torch=True, interleaved=True),
    "qwen2": Reader("Qwen2ForCausalLM", on_torch=True),
    "qwen3": Reader("Qwen3ForCausalLM", _qwen3, on_torch=True),
    "qwen3moe": Reader("Qwen3MoeForCausalLM", _qwen3_moe, "qwen3_moe", on_torch=True),
    "qwen2vl": Reader("Qwen2ForCausalLM", model_type="qwen2", on_torch=True),  # text halves of models that see:
    "qwen3vl": Reader("Qwen3ForCausalLM", _qwen3, "qwen3", on_torch=True),  # a text's positions are plain ones
    "qwen3vlmoe": Reader("Qwen3MoeForCausalLM", _qwen3_moe, "qwen3_moe", on_torch=True),
    "smollm3": Reader("SmolLM3ForCausalLM", _smollm3, on_torch=True, interleaved=True),
    "gemma3": Reader("Gemma3ForCausalLM", _gemma3, "gemma3_text", on_torch=True),
    "gemma3n": Reader("Gemma3nForCausalLM", _gemma3n, "gemma3n_text", mixed=True),
    "gemma4": Reader("Gemma4ForCausalLM", _gemma4, "gemma4_text", mixed=True),
    "phi3": Reader("Phi3ForCausalLM", _phi3, partial=True),
    "granite": Reader("GraniteForCausalLM", _granite),
    "granitemoe": Reader("GraniteMoeForCausalLM", _granite_moe),
    "olmo2": Reader("Olmo2ForCausalLM", _olmo2),  # OLMo 3, too
    "olmoe": Reader("OlmoeForCausalLM", lambda fields, *_: {**_experts(fields), "norm_topk_prob": False}),
    "gemma": Reader("GemmaForCausalLM", lambda *_: {"hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": Reader("Gemma2ForCausalLM", _gemma2),
    "qwen2moe": Reader("Qwen2MoeForCausalLM", _qwen2_moe),
    "stablelm": Reader("StableLmForCausalLM", _stablelm, layer_norm=True, partial=True),
    "starcoder2": Reader("Starcoder2ForCausalLM", _starcoder2, layer_norm=True),
    "command-r": Reader("CohereForCausalLM", _cohere, layer_norm=True),
    "cohere2": Reader("Cohere2ForCausalLM", _cohere2, layer_norm=True),
    "chatglm": Reader("GlmForCausalLM", _biases("attention_bias"), partial=True),
    "glm4": Reader("Glm4ForCausalLM", _biases("attention_bias"), partial=True),
    "ernie4_5": Reader("Ernie4_5ForCausalLM", _biases("use_bias")),
    "exaone4": Reader("Exaone4ForCausalLM", _exaone4),
    "seed_oss": Reader("SeedOssForCausalLM", _seed_oss),
    "arcee": Reader("ArceeForCausalLM", _arcee),
    "mistral3": Reader("Ministral3ForCausalLM", _ministral3),
    "gpt-oss": Reader("GptOssForCausalLM", _gpt_oss, "gpt_oss", exact_yarn=True),
    "nemotron": Reader("NemotronForCausalLM", _nemotron, layer_norm=True, partial=True),
    "phi2": Reader("PhiForCausalLM", lambda *_: {"hidden_act": "gelu_new"}, "phi", layer_norm=True, partial=True),
    "falcon": Reader("FalconForCausalLM", _falcon, layer_norm=True),
    "gpt2": Reader("GPT2LMHeadModel", _gpt2, layer_norm=True),
    "starcoder": Reader("GPTBigCodeForCausalLM", _gpt2, "gpt_bigcode", layer_norm=True),
    "gptneox": Reader("GPTNeoXForCausalLM", _gptneox, "gpt_neox", layer_norm=True, partial=True),
    "glm4moe": Reader("Glm4MoeForCausalLM", _glm4_moe, "glm4_moe", partial=True),
    "minimax-m2": Reader("MiniMaxM2ForCausalLM", _minimax_m2, "minimax_m2", partial=True),
    "dots1": Reader("Dots1ForCausalLM", _dots1),
    "deepseek2": Reader("DeepseekV3ForCausalLM", _deepseek2, "deepseek_v3", latent=True),  # V2 and GLM-4.7-Flash, too
    "ernie4_5-moe": Reader("Ernie4_5_MoeForCausalLM", _ernie_moe, "ernie4_5_moe"),
    "llama4": Reader("Llama4ForCausalLM", _llama4, "llama4_text"),
    "minicpm3": Reader("MiniCPM3ForCausalLM", _minicpm3, latent=True, mixed=True),
    "hunyuan-moe": Reader("HunYuanMoEV1ForCausalLM", _hunyuan_moe, "hunyuan_v1_moe"),
    "lfm2": Reader("Lfm2ForCausalLM", _lfm2, states=True),
    "lfm2moe": Reader("Lfm2MoeForCausalLM", _lfm2_moe, "lfm2_moe", states=True),
    "granitehybrid": Reader("GraniteMoeHybridForCausalLM", _granite_hybrid, "granitemoehybrid", states=True),
    "nemotron_h": Reader("NemotronHForCausalLM", _nemotron_h, "nemotron_h", states=True),
    "nemotron_h_moe": Reader("NemotronHForCausalLM", _nemotron_h, "nemotron_h", states=True),
    "qwen35": Reader("Qwen3_5ForCausalLM", _delta_net, "qwen3_5_text", partial=True, states=True, mixed=True),
    "qwen35moe": Reader(
        "Qwen3_5MoeForCausalLM", _delta_net_moe, "qwen3_5_moe_text", partial=True, states=True, mixed=True
    ),
    "qwen3next": Reader("Qwen3NextForCausalLM", _delta_net_moe, "qwen3_next", partial=True, states=True, mixed=True),
    "falcon-h1": Reader("FalconH1ForCausalLM", _falcon_h1, "falcon_h1", states=True),
    "mamba2": Reader("Mamba2ForCausalLM", _mamba2, "mamba2", states=True),
    "bert": Reader("BertModel", _bert, layer_norm=True, encoder=True),
    "nomic-bert": Reader("NomicBertModel", _nomic_bert, "nomic_bert", layer_norm=True, encoder=True),
    "nomic-bert-moe": Reader("NomicBertModel", _nomic_bert_moe, "nomic_bert", layer_norm=True, encoder=True),
    "jina-bert-v2": Reader("JinaBertModel", _jina_bert, layer_norm=True, encoder=True),
    "modern-bert": Reader("ModernBertModel", _modern_bert, "modernbert", encoder=True),
    "gemma-embedding": Reader("Gemma3TextModel", _gemma_embedding, "gemma3_text", encoder=True),
    "hunyuan-dense": Reader("HunYuanDenseV1ForCausalLM", _biases("attention_bias")),
}
"""Readers by `general.architecture`."""
