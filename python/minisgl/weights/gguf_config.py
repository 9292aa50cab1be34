"""What the metadata of a GGUF file says about the model, as a config.json.

Invariants: every field that changes the computation is read or refused by its key, never ignored; a value of the wrong
type is a `ConfigError` that names its key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minisgl.config import ConfigError

Shapes = Mapping[str, tuple[int, ...]]
"""By tensor, outermost dimension first."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral, too, which differs by its window
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
INTERLEAVED = ("llama", "smollm3")
"""Architectures whose files have the two halves of each head of q and k interleaved (llama.cpp's rope type NORM)."""
TABLE, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "smollm3": "smollm3",
    "gemma3": "gemma3_text",
}
_POOLINGS = ("none", "mean_tokens", "cls_token", "lasttoken", "rank")  # by llama.cpp's numbers, as their tokens' names
_LAYERS_OF_GEMMA3_27B = 62
_REQUIRED: Any = object()


class Fields:
    """Metadata by key; `own` keys are those of the file's architecture."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.architecture = self.text("general.architecture")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ConfigError(f"architecture {self.architecture!r} is not imported: only {known}")

    def own(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        return key in self._metadata

    def text(self, key: str, default: str = _REQUIRED) -> str:
        return str(self._get(key, default, lambda value: isinstance(value, str), "a text"))

    def whole(self, key: str, default: int = _REQUIRED) -> int:
        found = self._get(key, default, lambda value: type(value) is int and value >= -1, "a number for all layers")
        return int(found)

    def positive(self, key: str, default: int = _REQUIRED) -> int:
        found = self.whole(key, default)
        if found < 1:
            raise ConfigError(f"{key}: {found}: must be at least 1")
        return found

    def real(self, key: str, default: float = _REQUIRED) -> float:
        found = self._get(key, default, lambda value: type(value) in (int, float) and math.isfinite(value), "a number")
        return float(found)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, default, lambda value: type(value) is bool, "true or false"))

    def texts(self, key: str) -> list[str]:
        return self._list(key, str, "a list of texts")

    def wholes(self, key: str) -> list[int]:
        return self._list(key, int, "a list of whole numbers")

    def reals(self, key: str) -> list[float]:
        return self._list(key, float, "a list of numbers")

    def _list(self, key: str, kind: type, what: str) -> list[Any]:
        """Lists are of one type."""
        found = self._get(key, _REQUIRED, lambda value: isinstance(value, list) and type(value[0]) is kind, what)
        return list(found)

    def _get(self, key: str, default: Any, fits: Callable[[Any], bool], what: str) -> Any:
        value = self._metadata.get(key, default)
        if value is _REQUIRED or value == []:
            raise ConfigError(f"the GGUF metadata lacks {key}")
        if not fits(value):
            shown = repr(value)
            raise ConfigError(f"{key}: {shown if len(shown) < 40 else type(value).__name__} is not {what}")
        return value


def config_of(fields: Fields, shapes: Shapes, factors: Sequence[float] | None) -> dict[str, Any]:
    """config.json. `factors`: the values of `ROPE_FACTORS`, if the file has it."""
    own = fields.own
    hidden, heads = fields.positive(own("embedding_length")), fields.positive(own("attention.head_count"))
    head_dim = fields.positive(own("attention.key_length"), hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := fields.whole(own(key), head_dim)) != head_dim:
            raise ConfigError(f"{own(key)}: {found} is not imported: only the {head_dim} of a head")
    heads_kv, layers = fields.positive(own("attention.head_count_kv"), heads), fields.positive(own("block_count"))
    vocab = shapes.get(TABLE, (0,))[0]
    _check_shapes(
        shapes,
        {
            TABLE: (vocab, hidden),
            f"blk.{layers - 1}.attn_q.weight": (heads * head_dim, hidden),
            f"blk.{layers - 1}.attn_k.weight": (heads_kv * head_dim, hidden),
        },
    )
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[fields.architecture]],
        "model_type": _TYPES[fields.architecture],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads_kv,
        "head_dim": head_dim,
        "intermediate_size": fields.positive(own("feed_forward_length")),
        "vocab_size": vocab,
        "max_position_embeddings": fields.positive(own("context_length")),
        "rms_norm_eps": fields.real(own("attention.layer_norm_rms_epsilon")),
        "rope_theta": fields.real(own("rope.freq_base"), 10_000.0),
        "tie_word_embeddings": HEAD not in shapes,
        "eos_token_id": fields.whole("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }
    config |= {"hidden_act": "silu"} | _of_architecture(fields, shapes, config)
    if scaling := _rope_scaling(fields, factors, config):
        config["rope_scaling"] = scaling
    if (bos := fields.whole("tokenizer.ggml.bos_token_id", -1)) >= 0:
        config["bos_token_id"] = bos
    return config


def pooling_of(fields: Fields) -> dict[str, bool]:
    """1_Pooling/config.json of an embedding model; nothing where the file does not say that it is one."""
    key = fields.own("pooling_type")
    if (number := fields.whole(key, -1)) < 0:
        return {}
    if number >= len(_POOLINGS):
        raise ConfigError(f"{key}: {number}: must be at most {len(_POOLINGS) - 1}")
    return {f"pooling_mode_{_POOLINGS[number]}": True}


def _check_shapes(shapes: Shapes, expected: Shapes) -> None:
    """Against the tensors, which are no larger than their file: numbers that are too large cost memory everywhere."""
    for name, shape in expected.items():
        if shapes.get(name) != shape:
            found = (
                f"is {list(shapes[name])}, not {list(shape)} as the metadata says" if name in shapes else "is missing"
            )
            raise ConfigError(f"tensor {name} {found}")


def _of_architecture(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """What only some architectures have."""
    own = fields.own
    window = fields.whole(own("attention.sliding_window"), 0)
    windowed = 0 < window < config["max_position_embeddings"]
    if fields.architecture == "gemma3":
        return _gemma3(fields, window, config)
    if fields.architecture == "llama":
        if fields.whole(own("expert_count"), 0):
            raise ConfigError(f"{own('expert_count')}: experts of this architecture are not imported")
        if windowed:
            return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        return {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_gate.bias" in shapes}
    if windowed:
        raise ConfigError(f"{own('attention.sliding_window')}: {window}: which layers have it is not said")
    if fields.architecture == "qwen2":
        return {}
    if fields.architecture == "qwen3":
        return {"attention_bias": False}
    if fields.architecture == "smollm3":  # the fourth layers are llama.cpp's, no key says them
        return {"no_rope_layer_interval": 4, "attention_bias": "blk.0.attn_q.bias" in shapes}
    routers = [f"blk.{i}.ffn_gate_inp.weight" for i in range(config["num_hidden_layers"])]
    experts, size = fields.positive(own("expert_count")), fields.positive(own("expert_feed_forward_length"))
    for name in routers:
        if name in shapes:
            gate = name.replace("_inp", "_exps")
            _check_shapes(shapes, {gate: (experts, size, config["hidden_size"])})
    return {
        "attention_bias": False,
        "num_experts": experts,
        "num_experts_per_tok": fields.positive(own("expert_used_count")),
        "moe_intermediate_size": size,
        "norm_topk_prob": True,  # llama.cpp does so for all models of this architecture
        "mlp_only_layers": [i for i, name in enumerate(routers) if name not in shapes],
    }


def _gemma3(fields: Fields, window: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """What no key says is what llama.cpp takes: each sixth layer attends to all tokens, layers with a window rotate by
    a base of 10,000, and the largest model alone scales its scores by another size than that of a head."""
    own, layers = fields.own, config["num_hidden_layers"]
    if cap := fields.real(own("final_logit_softcapping"), 0.0):
        raise ConfigError(f"{own('final_logit_softcapping')}: {cap:g} is not imported: only logits as they are")
    every = fields.whole(own("attention.sliding_window_pattern"), 6) if window > 0 else 1
    full = [every > 0 and (i + 1) % every == 0 for i in range(layers)]
    is_27b = layers == _LAYERS_OF_GEMMA3_27B
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": max(window, 1),
        "layer_types": ["full_attention" if one else "sliding_attention" for one in full],
        "rope_local_base_freq": fields.real(own("rope.freq_base_swa"), 10_000.0),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_27b
        else config["head_dim"],
    }


def _rope_scaling(fields: Fields, factors: Sequence[float] | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """As config.json says it; nothing for plain rotary embeddings."""
    name = fields.own("rope.scaling.type")
    kind = fields.text(name, "none")
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
        ("yarn_log_multiplier", 0.0),
    ):
        if (value := fields.real(own := fields.own(f"rope.scaling.{key}"), plain)) != plain:
            raise ConfigError(f"{own}: {value:g} is not imported: use the model's safetensors")
    original = fields.own("rope.scaling.original_context_length")
    scaling["original_max_position_embeddings"] = fields.positive(original)
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        scaling[name] = fields.real(fields.own(f"rope.scaling.{key}"), 0.0) or None
    return scaling


def _llama3(factors: Sequence[float], config: Mapping[str, Any], original: int) -> dict[str, Any]:
    """Converters write what Llama 3.1's scaling divides each frequency by. The numbers it was made from are found
    again: models differ in the factor, which the longest waves have whole, and perhaps in the original context."""
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
