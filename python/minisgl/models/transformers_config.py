"""The transformers class that a checkpoint needs, and whether it can run on this package's attention.

Invariants: an unsupported model is an error before weights are read; a checkpoint's own code is never run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minisgl.config import ConfigError
from minisgl.models.architectures import ARCHITECTURES
from minisgl.models.config import eos_ids, read_config

_TEXT_MODELS = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
ADAPTED = {"FalconForCausalLM"}  # classes without the registry, whose attention `adapt` replaces
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_ALIBI = {"BloomForCausalLM", "MptForCausalLM"}
_GROWING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, eq=False)
class TransformersSource:
    """A model that transformers' code can run. `kind` (class) and `config` are transformers' own; `vocab_size` counts
    tokens; `context_len` is the served maximum, for the reason `limited_by` if that is less than the config says."""

    architecture: str
    kind: Any
    config: Any
    vocab_size: int
    context_len: int
    limited_by: str
    eos_ids: tuple[int, ...]
    dtype: str
    text_half: bool


def find_transformers_source(model_dir: Path) -> TransformersSource:
    """Find the transformers class of the model in `model_dir`. Raises `ConfigError` if it cannot be served."""
    raw, generation = read_config(model_dir)
    architecture = str((raw.get("architectures") or [""])[0])
    name = _TEXT_MODELS.get(architecture, architecture)
    kind = getattr(transformers, name, None)
    if kind is None or not hasattr(kind, "config_class"):
        why = "its files bring modelling code of their own (auto_map), which is not run" if "auto_map" in raw else ""
        raise refused(architecture, why or "no such class in this version")
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise refused(architecture, "it is not a decoder that generates text, but an encoder or another kind of model")
    if method := (raw.get("quantization_config") or {}).get("quant_method"):
        raise refused(architecture, f"quantization_config: {method!r}: use the unquantised model")
    try:
        loaded = transformers.AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, OSError, StrictDataclassError) as error:
        raise refused(architecture, " ".join(str(error).split())) from error
    config = loaded.get_text_config() if name != architecture else loaded
    if reason := _obstacle(name, kind, config):
        raise refused(architecture, reason)
    context_len, limited_by = _context(config, architecture)
    text = raw.get("text_config") or {}
    return TransformersSource(
        architecture=architecture,
        kind=kind,
        config=config,
        vocab_size=int(config.vocab_size),
        context_len=context_len,
        limited_by=limited_by,
        eos_ids=eos_ids({**text, **raw}, generation),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or text.get("dtype") or "float32"),
        text_half=name != architecture,
    )


def refused(architecture: str, reason: str) -> ConfigError:
    """Return a `ConfigError` with the reason and the engines that support the architecture."""
    entry = ARCHITECTURES.get(architecture)
    if entry is None:
        elsewhere = f"no engine supports it natively (supported: {', '.join(ARCHITECTURES)})"
    else:
        elsewhere = "native layers compute it" if entry.on_torch else "the CPU engine computes it (--engine cpu)"
    return ConfigError(
        f"config.json: architectures: {architecture}: {elsewhere}; by the code of transformers "
        f"{transformers.__version__} it does not work: {reason}"
    )


def _obstacle(name: str, kind: Any, config: Any) -> str:
    """Return the reason why this class cannot be served; empty if none is known."""
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    types = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    if getattr(kind, "_is_stateful", False):
        return "its layers keep a state of their own (state-space or linear attention), which KV pages do not hold"
    if "chunked_attention" in types:
        return "layer_types: chunked_attention: attention within chunks of the text"
    if others := types - _LAYER_TYPES - {"attention"}:
        return f"layer_types: {', '.join(sorted(others))}: layers that keep more than K and V, or none"
    if getattr(config, "alibi", False) or name in _ALIBI:
        return "ALiBi: biases by distance, which no attention backend supports"
    if not hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS") and name not in ADAPTED:
        return "its layers do not use the registry of attention functions"
    return ""


def _context(config: Any, architecture: str) -> tuple[int, str]:
    """Return the number of positions to serve, and why it is limited (else empty). With a RoPE whose frequencies change
    beyond the original context, cached keys would become wrong: sequences end before that."""
    whole = getattr(config, "max_position_embeddings", None)
    if not isinstance(whole, int):
        raise refused(architecture, "config.json has no max_position_embeddings: the length of its context is unknown")
    for rope in _ropes(config):
        kind = rope.get("rope_type") or rope.get("type")
        if kind in _GROWING_ROPE:
            named = rope.get("original_max_position_embeddings")
            original = int(named or getattr(config, "original_max_position_embeddings", None) or whole)
            if original < whole:
                return original, f"rope_type {kind} has other frequencies for longer texts"
    return whole, ""


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Iterate over the RoPE parameters of all layer types, in the spelling of both transformers versions."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    yield parameters
    yield from (each for each in parameters.values() if isinstance(each, Mapping))
