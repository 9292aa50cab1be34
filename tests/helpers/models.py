"""Tiny checkpoints made by transformers, and a dense attention to run our models without an engine.

Nothing of minisgl's attention or scheduling takes part; one sequence at a time.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl.models import load_config
from minisgl.models.decoder import Decoder, build_model
from minisgl.tokenizer.echo import echo_json
from minisgl.weights.checkpoint import load_weights

CPU = torch.device("cpu")
LOGITS_WITHIN = 1e-4
TIE_WITHIN = 1e-3  # a differing greedy token is allowed only if the reference's top logits lie this close

_TINY = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
CONFIG: dict[str, Any] = {  # the least that a config.json of a Llama has
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}
_NO_PAD = {"pad_token_id": None}
_SLIDING_FULL = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 16}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama-bias-untied": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-mha": (
        "LlamaForCausalLM",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        },
    ),
    "qwen3-tied": ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "head_dim": 24}),
    "qwen3-untied": ("Qwen3ForCausalLM", {"head_dim": 16, "rms_norm_eps": 1e-3}),
    "qwen2-tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-window-in-the-last-layers": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("Qwen2ForCausalLM", {"rope_parameters": YARN_ROPE}),
    "llama-yarn-untruncated": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                **YARN_ROPE,
                "beta_fast": 9.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.6,
                "truncate": False,
            }
        },
    ),
    "llama-dynamic": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 10}),
    "smollm3-tied": ("SmolLM3ForCausalLM", {"tie_word_embeddings": True, "no_rope_layers": [1, 0, 1], **_NO_PAD}),
    "smollm3-window": (
        "SmolLM3ForCausalLM",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 11,
            "attention_bias": True,
            **_NO_PAD,
        },
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**_MOE, "norm_topk_prob": True}),
    "qwen3-moe-not-everywhere": (
        "Qwen3MoeForCausalLM",
        {**_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "tie_word_embeddings": True},
    ),
    "gemma3-tied": (
        "Gemma3ForCausalLM",
        {"head_dim": 16, "sliding_window": 9, "layer_types": _SLIDING_FULL, "query_pre_attn_scalar": 16, **_NO_PAD},
    ),
    "gemma3-scaled-untied": (
        "Gemma3ForCausalLM",
        {
            "head_dim": 24,
            "sliding_window": 14,
            "layer_types": _SLIDING_FULL,
            "query_pre_attn_scalar": 40,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            **_NO_PAD,
        },
    ),
    "qwen3-moe-window": ("Qwen3MoeForCausalLM", {**_MOE, "use_sliding_window": True, "sliding_window": 13}),
}

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "original_max_position_embeddings": 48,
}
_EXPERTS = {"num_experts": 7, "num_local_experts": 7, "num_experts_per_tok": 3, **_NO_PAD}
_FOUR = {"num_hidden_layers": 4, "sliding_window": 9, **_NO_PAD}
_SCALES = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    **_NO_PAD,
}
_YARN_OF_FULL = {
    "full_attention": YARN_ROPE,
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
_GROWING = {**YARN_ROPE, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 9,
    "vocab_size_per_layer_input": 131,
    "use_double_wide_mlp": True,
    **_NO_PAD,
}
_GEMMA3N = {
    "head_dim": 16,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": 120,
    "num_kv_shared_layers": 2,
    "laurel_rank": 12,
    "activation_sparsity_pattern": [0.9, 0.8, 0.0, 0.0, 0.0, 0.0],
    **_NO_PAD,
}
_LFM2 = {
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 16,
    "tie_word_embeddings": True,
    **_NO_PAD,
}
_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
    "rms_norm_eps": 1e-2,  # what is read of a state may all but cancel, and its norm makes that large
    "initializer_range": 0.1,
    **_NO_PAD,
}
_HALF_MROPE = {
    "rope_type": "default",
    "rope_theta": 500.0,
    "mrope_section": [2, 1, 1],
    "partial_rotary_factor": 0.5,
}
_DELTA_EXPERTS = {**_MOE, **_DELTA, "shared_expert_intermediate_size": 48}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 20, "mamba_d_conv": 4}
_GRANITE_HYBRID = {
    **_SCALES,
    **_MAMBA,
    "mamba_d_head": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "shared_intermediate_size": 144,
}
_NEMOTRON_H = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 24,
    "n_groups": 4,
    "ssm_state_size": 20,
    "head_dim": 16,
    "time_step_min": 1e-30,  # what transformers takes for the least step of prompts
    **_NO_PAD,
}
_FALCON = {"ffn_hidden_size": 112, "num_kv_heads": 4, **_NO_PAD}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 20.0, "factor": 1.0}
_GROUPED = {
    "head_dim": 16,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    **_NO_PAD,
}
_LATE = {"max_window_layers": 1, "norm_topk_prob": True}
_SINKS = {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 9}
_SHARPER = {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.8}
_LESS = {"routed_scaling_factor": 0.6}
_LATENT = {
    **{name: value for name, value in _GROUPED.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 20,
    "v_head_dim": 16,
}
_FACTORS = {  # of the 8 numbers of a head that are rotated
    **{name: value for name, value in _LONGROPE.items() if name != "partial_rotary_factor"},
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.5, 3.0, 3.5],
}
_LLAMA4 = {
    **_NO_PAD,
    "head_dim": 16,
    "num_hidden_layers": 5,
    "intermediate_size": 40,
    "intermediate_size_mlp": 112,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 24,
    "floor_scale": 12,
    "attn_scale": 0.3,
}
# Those that the CPU engine alone has native layers for.
ON_CPU: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-window": ("Phi3ForCausalLM", {"sliding_window": 11, **_NO_PAD}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 48, "tie_word_embeddings": True, **_NO_PAD},
    ),
    "granite": ("GraniteForCausalLM", {**_SCALES, "attention_bias": True, "mlp_bias": True}),
    "granite-moe-shared": (
        "GraniteMoeSharedForCausalLM",
        {**_SCALES, **_EXPERTS, "num_experts_per_tok": 6, "shared_intermediate_size": 144},
    ),
    "granite-moe": ("GraniteMoeForCausalLM", {**_SCALES, **_EXPERTS, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2ForCausalLM", _NO_PAD),
    "olmo3-yarn": ("Olmo3ForCausalLM", {**_FOUR, "rope_parameters": _YARN_OF_FULL}),
    "olmoe": ("OlmoeForCausalLM", _EXPERTS),
    "gemma": ("GemmaForCausalLM", {"head_dim": 24, **_NO_PAD}),
    "gemma2-caps": (
        "Gemma2ForCausalLM",
        {
            **_FOUR,
            "head_dim": 16,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "mixtral-window": ("MixtralForCausalLM", {**_EXPERTS, "sliding_window": 10}),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {
            **_EXPERTS,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 144,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
        },
    ),
    "stablelm": (
        "StableLmForCausalLM",
        {"use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.25, **_NO_PAD},
    ),
    "stablelm-parallel": ("StableLmForCausalLM", {"use_parallel_residual": True, **_NO_PAD}),
    "starcoder2-window": ("Starcoder2ForCausalLM", {"sliding_window": 10, **_NO_PAD}),
    "cohere": ("CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 0.3, "attention_bias": True, **_NO_PAD}),
    "cohere2": ("Cohere2ForCausalLM", {**_FOUR, "logit_scale": 0.3}),
    "glm": ("GlmForCausalLM", {"head_dim": 16, "attention_bias": True, **_NO_PAD}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 24, "attention_bias": False, **_NO_PAD}),
    "ernie4.5": ("Ernie4_5ForCausalLM", {"head_dim": 24, "use_bias": True, **_NO_PAD}),
    "exaone4": ("Exaone4ForCausalLM", {**_FOUR, "sliding_window_pattern": 4}),
    "exaone4-everywhere": (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, **_NO_PAD},
    ),
    "seed-oss": ("SeedOssForCausalLM", {"head_dim": 16, "attention_out_bias": True, **_NO_PAD}),
    "arcee": ("ArceeForCausalLM", {"mlp_bias": True, "attention_bias": True, **_NO_PAD}),
    "ministral3": ("Ministral3ForCausalLM", {"head_dim": 16, "rope_parameters": _GROWING, **_NO_PAD}),
    "glm4-moe": ("Glm4MoeForCausalLM", {**_GROUPED, "use_qk_norm": True, "attention_bias": True}),
    "deepseek2": ("DeepseekV2ForCausalLM", {**_LATENT, "q_lora_rank": None}),
    "deepseek2-groups": ("DeepseekV2ForCausalLM", {**_LATENT, "topk_method": "group_limited_greedy", **_LESS}),
    "deepseek3-yarn": ("DeepseekV3ForCausalLM", {**_LATENT, "rope_parameters": _SHARPER}),
    "glm4-moe-lite": ("Glm4MoeLiteForCausalLM", {**_LATENT, "rms_norm_eps": 1e-5}),
    "minicpm3": (
        "MiniCPM3ForCausalLM",
        {**_LATENT, "scale_emb": 3, "scale_depth": 0.9, "dim_model_base": 40, "rope_parameters": _FACTORS},
    ),
    "llama4": ("Llama4ForCausalLM", _LLAMA4),
    "llama4-no-norms": (
        "Llama4ForCausalLM",
        {**_LLAMA4, "use_qk_norm": False, "attn_temperature_tuning": False, "num_experts_per_tok": 1},
    ),
    "dots1-window": ("Dots1ForCausalLM", {**_GROUPED, "n_group": 1, "topk_group": 1, "sliding_window": 9, **_LATE}),
    "ernie4.5-moe": (
        "Ernie4_5_MoeForCausalLM",
        {
            **_NO_PAD,
            "head_dim": 24,
            "moe_num_experts": 7,
            "moe_k": 3,
            "moe_intermediate_size": 40,
            "num_hidden_layers": 5,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 3,
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1ForCausalLM",
        {"head_dim": 16, "num_experts": 6, "moe_topk": 3, "rope_parameters": _ALPHA, **_NO_PAD},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            **_EXPERTS,
            **_SINKS,
            "rope_parameters": {**YARN_ROPE, "truncate": False},
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.8,
        },
    ),
    "gemma3n": ("Gemma3nForCausalLM", _GEMMA3N),
    "gemma4": ("Gemma4ForCausalLM", {**_GEMMA4, "hidden_size_per_layer_input": 24, "num_kv_shared_layers": 3}),
    "gemma4-large": (
        "Gemma4ForCausalLM",
        {**_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4-moe": (
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
            "attention_k_eq_v": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", _LFM2),
    "lfm2-bias": (
        "Lfm2ForCausalLM",
        {
            **_LFM2,
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "conv", "conv", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-moe": (
        "Lfm2MoeForCausalLM",
        {
            **_LFM2,
            **_MOE,
            "num_dense_layers": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen3-next": ("Qwen3NextForCausalLM", {**_DELTA_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3-next-at-first": (
        "Qwen3NextForCausalLM",
        {
            **_DELTA_EXPERTS,
            "layer_types": ["full_attention", *["linear_attention"] * 3],
            "linear_conv_kernel_dim": 2,
            "num_experts_per_tok": 6,
            "norm_topk_prob": False,
        },
    ),
    "qwen3.5": ("Qwen3_5ForCausalLM", {**_DELTA, "linear_value_head_dim": 40, "tie_word_embeddings": True}),
    "qwen3.5-moe": (
        "Qwen3_5MoeForCausalLM",
        {**_DELTA_EXPERTS, "linear_num_value_heads": 6, "rope_parameters": {**YARN_ROPE, "partial_rotary_factor": 0.5}},
    ),
    "granite-hybrid": ("GraniteMoeHybridForCausalLM", {**_GRANITE_HYBRID, "num_local_experts": 0}),
    "granite-hybrid-moe": (
        "GraniteMoeHybridForCausalLM",
        {
            **_GRANITE_HYBRID,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "position_embedding_type": "rope",
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        {
            **_MAMBA,
            "mamba_d_ssm": 192,
            "head_dim": 16,
            "lm_head_multiplier": 0.7,
            "embedding_multiplier": 3.0,
            "mlp_multipliers": [0.8, 0.6],
            "key_multiplier": 0.4,
            "attention_out_multiplier": 0.9,
            "attention_in_multiplier": 1.3,
            "ssm_multipliers": [0.35, 0.5, 1.2, 0.7, 1.5],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.6,
            **_NO_PAD,
        },
    ),
    "falcon-h1-norm": (
        "FalconH1ForCausalLM",
        {**_MAMBA, "mamba_d_ssm": 192, "mamba_rms_norm": True, "mamba_norm_before_gate": False, **_NO_PAD},
    ),
    "falcon-h1-norm-first": (
        "FalconH1ForCausalLM",
        {**_MAMBA, "mamba_d_ssm": 192, "mamba_rms_norm": True, "time_step_limit": [0.3, 1.7], **_NO_PAD},
    ),
    "nemotron-h": (
        "NemotronHForCausalLM",
        {**_NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
    ),
    "nemotron-h-moe": (
        "NemotronHForCausalLM",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            **{name: value for name, value in _GROUPED.items() if name not in ("head_dim", "first_k_dense_replace")},
            "moe_shared_expert_intermediate_size": 80,
            **_LESS,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 20, "conv_kernel": 3, **_NO_PAD},
    ),
    "nemotron": ("NemotronForCausalLM", {"attention_bias": True, "partial_rotary_factor": 0.5, **_NO_PAD}),
    "phi": ("PhiForCausalLM", {"partial_rotary_factor": 0.5, **_NO_PAD}),
    "falcon-7b": ("FalconForCausalLM", {**_FALCON, "hidden_size": 72, "num_attention_heads": 18}),
    "falcon-40b": ("FalconForCausalLM", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-heads": ("FalconForCausalLM", {**_FALCON, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon-11b": (
        "FalconForCausalLM",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "gpt2": ("GPT2LMHeadModel", _NO_PAD),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", {"multi_query": True, **_NO_PAD}),
    "gpt-bigcode-heads": ("GPTBigCodeForCausalLM", {"multi_query": False, **_NO_PAD}),
    "gpt-neox": ("GPTNeoXForCausalLM", {"rotary_pct": 0.5, **_NO_PAD}),
    "gpt-neox-in-turn": ("GPTNeoXForCausalLM", {"use_parallel_residual": False, "hidden_act": "gelu_fast", **_NO_PAD}),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", {"head_dim": 16, "rope_parameters": _ALPHA, **_NO_PAD}),
}


def tiny_model(variant: str, **changes: Any) -> Any:
    """A transformers model in float32, eval mode. Every parameter is random, norms and biases too. `changes` are of its
    config."""
    import transformers

    architecture, extra = {**VARIANTS, **ON_CPU}[variant]
    model_class = getattr(transformers, architecture)
    torch.manual_seed(7)
    settings = {**_TINY, **extra, **changes}
    if transformers.__version__.startswith("4.") and "rope_parameters" in settings:  # as it was called before 5.0
        rope = dict(settings.pop("rope_parameters"))
        if local := rope.get("sliding_attention"):
            settings["rope_local_base_freq"], rope = local["rope_theta"], dict(rope["full_attention"])
        settings |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    return randomised(model_class(model_class.config_class(**settings)))


def _that_sees(
    name: str,
    base: dict[str, Any],
    vision: dict[str, Any],
    tied: bool,
    of_both: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """As `tiny_model`, with a vision tower beside its text half, whose config `changes` are of."""
    import transformers

    torch.manual_seed(7)
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    text = {**_TINY, **base, "tie_word_embeddings": tied, **changes}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = kind.config_class(
        text_config=text, vision_config={**sizes, **vision}, tie_word_embeddings=tied, **(of_both or {})
    )
    return randomised(kind(config))


_PATCHES = {"image_size": 32, "patch_size": 16}
_PIXTRAL = {"model_type": "pixtral", "head_dim": 16, **_PATCHES}


def tiny_mistral3(tied: bool, **changes: Any) -> Any:
    text = {"model_type": "mistral", "head_dim": 16, "sliding_window": None}
    return _that_sees("Mistral3", text, _PIXTRAL, tied, **changes)


def _tiny_gemma3_that_sees(tied: bool, **changes: Any) -> Any:
    text = {**VARIANTS["gemma3-tied"][1], "model_type": "gemma3_text"}
    vision = {"model_type": "siglip_vision_model", **_PATCHES}
    return _that_sees("Gemma3", text, vision, tied, {"mm_tokens_per_image": 4}, **changes)


def _tiny_ministral3_that_sees(tied: bool, **changes: Any) -> Any:
    text = {**ON_CPU["ministral3"][1], "model_type": "ministral3"}
    return _that_sees("Mistral3", text, _PIXTRAL, tied, **changes)


def _tiny_gemma4_that_sees(tied: bool, **changes: Any) -> Any:
    text = {**ON_CPU["gemma4"][1], "model_type": "gemma4_text", "pad_token_id": 0}
    vision = {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 16}
    return _that_sees("Gemma4", text, vision, tied, **changes)


def _tiny_gemma3n_that_sees(tied: bool, **changes: Any) -> Any:
    """As `_that_sees`. It hears, too; its own tower that sees is of a package that is not needed here."""
    import transformers

    torch.manual_seed(7)
    _, extra = ON_CPU["gemma3n"]
    text = {**_TINY, **extra, "model_type": "gemma3n_text", "pad_token_id": 0, "tie_word_embeddings": tied} | changes
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision: Any = transformers.SiglipVisionConfig(image_size=32, patch_size=16, **sizes)
    vision.vocab_offset, vision.vocab_size, vision.rms_norm_eps = 1000, 8, 1e-6
    hears = {"hidden_size": 32, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2, "vocab_size": 8}
    hears |= {"vocab_offset": 1008, "input_feat_size": 16, "sscp_conv_channel_size": [4, 4]}
    config = transformers.Gemma3nConfig(text_config=text, audio_config=hears, tie_word_embeddings=tied)
    config.__dict__["vision_config"] = vision  # past the check of its type
    return randomised(transformers.Gemma3nForConditionalGeneration(config))


def _tiny_qwen_that_sees(name: str, tied: bool, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(7)
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}
    text = {**_TINY, "head_dim": 16, "rope_parameters": rope, "tie_word_embeddings": tied, **_NO_PAD}
    text |= changes
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    vision |= {"hidden_size": text["hidden_size"], "embed_dim": 32} if name == "Qwen2VL" else {}
    vision |= {"out_hidden_size": text["hidden_size"]}
    vision |= {"deepstack_visual_indexes": []} if name == "Qwen3VL" else {}
    config = kind.config_class(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    return randomised(kind(config))


def _tiny_llama4_that_sees(tied: bool, **changes: Any) -> Any:
    vision = {"model_type": "llama4_vision_model", "intermediate_size": 128, **_PATCHES}
    vision |= {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    model = _that_sees("Llama4", {**_LLAMA4, "model_type": "llama4_text"}, vision, tied, **changes)
    model.forward = model.language_model.forward  # its own fails without a picture
    return model


THAT_SEE: dict[str, Callable[..., Any]] = {"mistral3": tiny_mistral3, "gemma3": _tiny_gemma3_that_sees}
THAT_SEE_ON_CPU: dict[str, Callable[..., Any]] = {
    "ministral3-that-sees": _tiny_ministral3_that_sees,
    "gemma3n-that-sees": _tiny_gemma3n_that_sees,
    "gemma4-that-sees": _tiny_gemma4_that_sees,
    "qwen2-vl": partial(_tiny_qwen_that_sees, "Qwen2VL"),
    "qwen2.5-vl": partial(_tiny_qwen_that_sees, "Qwen2_5_VL"),
    "qwen3-vl": partial(_tiny_qwen_that_sees, "Qwen3VL"),
    "qwen3.5-that-sees": partial(_tiny_qwen_that_sees, "Qwen3_5", **_DELTA, rope_parameters=_HALF_MROPE),
    "qwen3.5-moe-that-sees": partial(_tiny_qwen_that_sees, "Qwen3_5Moe", **_DELTA_EXPERTS, rope_parameters=_HALF_MROPE),
    "llama4-that-sees": _tiny_llama4_that_sees,
}


_NORM = re.compile(
    r"(?i:norm)(_\d)?\.weight$|\.norms\.|\bln_\w+\.weight$|router\.scale$|per_expert_scale$|layer_scalar$|output_scale$"
)


def tiny(name: str, **changes: Any) -> Any:
    """As `tiny_model`, also of one that sees; `changes` are of its text half's config."""
    if (makes := {**THAT_SEE, **THAT_SEE_ON_CPU}.get(name)) is not None:
        return makes(False, **changes)
    return tiny_model(name, **changes)


def randomised(model: Any) -> Any:
    """In float32, eval mode, norms and biases random, too."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            unscaled = model.config.model_type.startswith(("gemma4", "gemma3n"))
            if unscaled and name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.uniform_(0.3, 0.7)  # nothing else keeps its scores small
            elif _NORM.search(name):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.3)
            elif name.endswith((".D", "mamba.A_log", "mixer.A_log")):
                parameter.uniform_(-0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():  # others are masks
                buffer.normal_(0.0, 0.3)
            elif _NORM.search(name):
                buffer.uniform_(0.5, 1.5)
    return model.float().eval()


def save(
    model: Any, folder: Path, *, shards: bool = False, original_names: bool = True, tokenizer: bool = False
) -> Path:
    """`original_names` False: as transformers 5 names the tensors inside (experts in one tensor). `tokenizer`: with
    the echo engine's, of 258 tokens."""
    size = "40KB" if shards else "1GB"
    model.save_pretrained(folder, max_shard_size=size, save_original_format=original_names)
    assert (folder / "model.safetensors.index.json").exists() == shards
    if tokenizer:
        (folder / "tokenizer.json").write_text(echo_json(), encoding="utf-8")
    return folder


def flatten(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's names without `model.`, as embedding models have them, and its tensors in turns of three types;
    returns their numbers by the usual names."""
    kinds, found = itertools.cycle((torch.bfloat16, torch.float16, torch.float32)), dict[str, torch.Tensor]()
    renamed: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored = {name: tensor.to(next(kinds)) for name, tensor in sorted(load_file(file).items())}
        found |= {name: tensor.float() for name, tensor in stored.items()}
        renamed |= {name.removeprefix("model."): file.name for name in stored}
        save_file({name.removeprefix("model."): tensor for name, tensor in stored.items()}, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": renamed}))
    return found


def published(reference: Any, folder: Path) -> int:
    """The folder as OpenAI publishes gpt-oss: experts in MXFP4, here of random numbers, which `reference` gets as
    transformers reads them. Returns their bytes."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors as convert

    generator = torch.Generator().manual_seed(5)
    packed = {}
    for name, parameter in reference.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = parameter.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(119, 125, shape, generator=generator, dtype=torch.uint8)
            with torch.no_grad():
                parameter.copy_(convert(blocks, scales, dtype=torch.float32))
            packed[name] = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save(reference, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, parts in packed.items():
        del tensors[name]
        tensors |= parts
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(tensor.numel() for parts in packed.values() for tensor in parts.values())


def load(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Decoder:
    """Our model of a checkpoint."""
    with torch.inference_mode():
        config = load_config(folder)
        model = build_model(config, dtype=dtype, device=device)
        load_weights(
            model.checkpoint(), folder, stacked=model.stacked(), own_name=model.own_name, packing=config.packing
        )
    return model


class DenseSequence:
    """One sequence with all its K and V, grown chunk by chunk; attention is a plain masked softmax in float32."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.length = 0

    @torch.inference_mode()
    def extend(self, ids: Sequence[int]) -> Tensor:
        """[n] ids -> [n, vocab_size] logits after each."""
        positions = torch.arange(self.length, self.length + len(ids))
        hidden = self._model.forward(torch.tensor(ids), positions, self._attend)
        self.length += len(ids)
        return self._model.logits(hidden)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self._keys:
            k, v = torch.cat((self._keys[layer], k)), torch.cat((self._values[layer], v))
        self._keys[layer], self._values[layer] = k, v
        group = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
        scale = self._model.attention[layer].scale or q.shape[-1] ** -0.5
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
        behind = torch.arange(len(k) - len(q), len(k)).unsqueeze(1) - torch.arange(len(k))
        hidden = (behind < 0) | (behind >= (self._model.config.windows[layer] or len(k)))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def greedy(model: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """`count` most likely tokens, one after the other."""
    sequence, found = DenseSequence(model), list[int]()
    logits = sequence.extend(prompt)[-1]
    while len(found) < count:
        found.append(int(logits.argmax()))
        logits = sequence.extend(found[-1:])[-1]
    return found


@torch.inference_mode()
def reference_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Of a transformers model: [n, vocab_size]."""
    logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def assert_greedy(reference: Any, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Each token is the reference's own choice after the tokens before it, ties within `TIE_WITHIN` aside."""
    logits = reference_logits(reference, [*prompt, *tokens])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    behind = logits.max(1).values - chosen
    assert behind.max() <= TIE_WITHIN, f"token {int(behind.argmax())} lies {float(behind.max()):.5f} behind the best"
