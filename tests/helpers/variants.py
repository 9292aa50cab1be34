"""Table of tiny random checkpoints: their class in transformers, their config, published models of that kind, and the
features that each covers. Data alone: tests/helpers/models.py makes them, and `python -m tests.helpers.our_models`
measures those with a name, which docs/features.md shows.

A GGUF file of a variant is a row of tests/helpers/gguf_rows.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Config = dict[str, Any]


class Model(NamedTuple):
    """Tiny random checkpoint."""

    architecture: str
    """Class of transformers."""
    notes: str = ""
    """Features that it has beyond a Llama."""
    config: Config = {}  # noqa: RUF012
    """Settings in addition to those of all variants."""
    called: str = ""
    """Names of published models; "": not listed on the page."""
    torch: bool = False
    """True if the native torch layers support it, not only the CPU engine."""
    vision: Config | None = None
    """Config of a vision tower; `config` is the text model's then. A `None` value becomes the text's hidden size."""
    whole: Config = {}  # noqa: RUF012
    """Settings of text model and tower together."""

    @property
    def name(self) -> str:
        return f"{self.architecture}: {self.notes}" if self.notes else self.architecture


class Refused(NamedTuple):
    """Model that transformers' layers cannot run, and the text of the error."""

    architecture: str
    says: str
    settings: Config = {}  # noqa: RUF012


def _model(
    architecture: str,
    called: str = "",
    notes: str = "",
    *like: Config,
    torch: bool = False,
    vision: Config | None = None,
    whole: Config | None = None,
    **own: Any,
) -> Model:
    config = {name: value for one in (*like, own) for name, value in one.items()}
    return Model(architecture, notes, config, called, torch, vision, whole or {})


def _theirs(architecture: str, notes: str = "", *like: Config, **own: Any) -> Model:
    return _model(architecture, "", notes, *like, **own)


def _without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


# fmt: off
TINY: Config = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15, "eos_token_id": 2,
    "bos_token_id": 1, "pad_token_id": None,
}
CONFIG: Config = {  # the least that a config.json of a Llama has
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512,
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 100,
}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500.0}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 48,
             "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 3.5]}
_LONGER = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5]}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 20.0, "factor": 1.0}
_GROWING = {"head_dim": 16, "rope_parameters": {**YARN_ROPE, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                                                "mscale_all_dim": 1.0}}
_HALF_MROPE = {"rope_parameters": {**_PLAIN_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
_MROPE = {"head_dim": 16, "rope_parameters": {**_PLAIN_ROPE, "mrope_section": [2, 3, 3]}}
_MIXED_ROPE = {"full_attention": YARN_ROPE, "sliding_attention": _PLAIN_ROPE}
_TWO_BASES = {"full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
              "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
_SLIDING_FULL = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_FOUR = {"num_hidden_layers": 4, "sliding_window": 9}
_SIX = {"num_hidden_layers": 6, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 9}
_EXPERTS = {"num_experts": 7, "num_local_experts": 7, "num_experts_per_tok": 3}
_MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 16}
_GROUPED = {"head_dim": 16, "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
            "moe_intermediate_size": 40, "n_shared_experts": 2, "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7}
_LESS = {"routed_scaling_factor": 0.6}
_LATENT = {**_without(_GROUPED, "head_dim"), "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
           "qk_rope_head_dim": 8, "qk_nope_head_dim": 20, "v_head_dim": 16}
_SCALES = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_GEMMA3 = {"head_dim": 16, "sliding_window": 9, **_SLIDING_FULL, "query_pre_attn_scalar": 16}
_GEMMA4 = {**_SIX, "global_head_dim": 32, "vocab_size_per_layer_input": 131, "use_double_wide_mlp": True}
_GEMMA4_SMALL = {**_GEMMA4, "hidden_size_per_layer_input": 24, "num_kv_shared_layers": 3}
_GEMMA3N = {**_SIX, "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 120, "num_kv_shared_layers": 2,
            "laurel_rank": 12, "activation_sparsity_pattern": [0.9, 0.8, 0.0, 0.0, 0.0, 0.0]}
_LLAMA4 = {"head_dim": 16, "num_hidden_layers": 5, "intermediate_size": 40, "intermediate_size_mlp": 112,
           "num_local_experts": 6, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2,
           "attention_chunk_size": 24, "floor_scale": 12, "attn_scale": 0.3}
_LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16, "tie_word_embeddings": True}
_DELTA = {"num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 24, "linear_value_head_dim": 20, "initializer_range": 0.1,
          "rms_norm_eps": 1e-2}  # values read from a state may nearly cancel; its norm amplifies that
_DELTA_EXPERTS = {**_MOE, **_DELTA, "shared_expert_intermediate_size": 48}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 20, "mamba_d_conv": 4}
_FALCON_H1 = {**_MAMBA, "mamba_d_ssm": 192}
_GRANITE_HYBRID = {
    **_SCALES, **_MAMBA, "mamba_d_head": 16, "num_hidden_layers": 4, "shared_intermediate_size": 144,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
_NEMOTRON_H = {"mamba_num_heads": 8, "mamba_head_dim": 24, "n_groups": 4, "ssm_state_size": 20, "head_dim": 16,
               "time_step_min": 1e-30}  # transformers' minimum of steps in prompts
_FALCON = {"ffn_hidden_size": 112, "num_kv_heads": 4}
_FALCON_NEW = {"ffn_hidden_size": 112, "num_kv_heads": 2, "new_decoder_architecture": True}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_PATCHES = {**_TOWER, "image_size": 32, "patch_size": 16}
_EARS = {"hidden_size": 32, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2, "vocab_size": 8,
         "vocab_offset": 1008, "input_feat_size": 16, "sscp_conv_channel_size": [4, 4]}
_TILES = {"image_size": 16, "patch_size": 4}
_PIXTRAL = {"model_type": "pixtral", "head_dim": 16, **_PATCHES}
_QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": None}

MODELS = {
    "llama3-tied": _model("LlamaForCausalLM", "Llama 2 to 3.3, SmolLM2, DeepSeek-R1-Distill-Llama", "scaling of 3.1",
        torch=True, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    "llama-bias-untied": _model("LlamaForCausalLM", "", "", _BIASES, torch=True),
    "llama-linear-mha": _model("LlamaForCausalLM", torch=True, num_key_value_heads=4,
        rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}),
    "llama-yarn-untruncated": _model("LlamaForCausalLM", torch=True, rope_parameters={
        **YARN_ROPE, "beta_fast": 9.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.6, "truncate": False}),
    "llama-dynamic": _model("LlamaForCausalLM", torch=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}),
    "mistral": _model("MistralForCausalLM", "Mistral 7B, Nemo, Devstral", "heads of a size of their own", torch=True,
        sliding_window=None, head_dim=32),
    "mistral-window": _model("MistralForCausalLM", torch=True, sliding_window=10),
    "mistral3": _model("Mistral3ForConditionalGeneration", "Mistral Small 3.1 and 3.2", "its language model",
        torch=True, vision=_PIXTRAL, model_type="mistral", head_dim=16, sliding_window=None),
    "idefics3": _model("Idefics3ForConditionalGeneration", "Idefics 3", "its language model", torch=True,
        vision={**_TOWER, **_TILES}, model_type="llama"),
    "smolvlm": _model("SmolVLMForConditionalGeneration", "SmolVLM, SmolVLM2", "their language models", torch=True,
        vision={**_TOWER, **_TILES}, model_type="llama"),
    "qwen2-tied": _model("Qwen2ForCausalLM", "Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen", "biases", torch=True,
        tie_word_embeddings=True),
    "qwen2-window-in-the-last-layers": _model("Qwen2ForCausalLM", torch=True, use_sliding_window=True,
        sliding_window=21, max_window_layers=1),
    "qwen2-yarn": _model("Qwen2ForCausalLM", torch=True, rope_parameters=YARN_ROPE),
    "qwen3-tied": _model("Qwen3ForCausalLM", torch=True, tie_word_embeddings=True, head_dim=24),
    "qwen3-untied": _model("Qwen3ForCausalLM", "Qwen3-0.6B to 32B", "norms of q and k", torch=True, head_dim=16,
        rms_norm_eps=1e-3),
    "qwen3-moe": _model("Qwen3MoeForCausalLM", "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder", "the same, experts",
        _MOE, torch=True, norm_topk_prob=True),
    "qwen3-moe-not-everywhere": _model("Qwen3MoeForCausalLM", "", "", _MOE, torch=True, num_hidden_layers=4,
        decoder_sparse_step=2, mlp_only_layers=[3], tie_word_embeddings=True),
    "qwen3-moe-window": _model("Qwen3MoeForCausalLM", "", "", _MOE, torch=True, use_sliding_window=True,
        sliding_window=13),
    "smollm3-tied": _model("SmolLM3ForCausalLM", "SmolLM3", "layers without positions", torch=True,
        tie_word_embeddings=True, no_rope_layers=[1, 0, 1]),
    "smollm3-window": _model("SmolLM3ForCausalLM", torch=True, no_rope_layer_interval=2, use_sliding_window=True,
        sliding_window=11, attention_bias=True),
    "gemma3-tied": _model("Gemma3ForCausalLM", "Gemma 3 270M, 1B", "mixed windows, two bases, norms before and behind",
        _GEMMA3, torch=True),
    "gemma3-scaled-untied": _model("Gemma3ForCausalLM", "", "", _SLIDING_FULL, torch=True, head_dim=24,
        sliding_window=14, query_pre_attn_scalar=40, tie_word_embeddings=False, rope_parameters=_TWO_BASES),
    "gemma3": _model("Gemma3ForConditionalGeneration", "Gemma 3 4B to 27B", "its language model", _GEMMA3, torch=True,
        vision={"model_type": "siglip_vision_model", **_PATCHES}, whole={"mm_tokens_per_image": 4},
        model_type="gemma3_text"),
    "phi3-window": _model("Phi3ForCausalLM", "Phi-3, Phi-4", "fused projections, window", sliding_window=11),
    "phi3-longrope": _model("Phi3ForCausalLM", "Phi-3.5, Phi-4-mini",
        "partial rotary, longrope beyond its original context", tie_word_embeddings=True,
        rope_parameters={**_LONGROPE, **_LONGER, "partial_rotary_factor": 0.75}, original_max_position_embeddings=48),
    "granite": _model("GraniteForCausalLM", "Granite 3 and 4.1",
        "scales of embeddings, residuals, attention and logits; biases", _SCALES, _BIASES),
    "granite-moe": _model("GraniteMoeForCausalLM", "Granite 3 MoE", "the same, experts", _SCALES, _EXPERTS,
        tie_word_embeddings=True),
    "granite-moe-shared": _model("GraniteMoeSharedForCausalLM", "Granite 3 MoE with a shared expert",
        "the same, an expert that all tokens go through", _SCALES, _EXPERTS, num_experts_per_tok=6,
        shared_intermediate_size=144),
    "olmo2": _model("Olmo2ForCausalLM", "OLMo 2", "norms behind, norms of q and k over all heads"),
    "olmo3-yarn": _model("Olmo3ForCausalLM", "OLMo 3",
        "the same, mixed windows, YaRN in full layers beyond its original context", _FOUR, rope_parameters=_MIXED_ROPE),
    "olmoe": _model("OlmoeForCausalLM", "OLMoE", "norms of q and k over all heads, experts", _EXPERTS),
    "gemma": _model("GemmaForCausalLM", "Gemma", head_dim=24),
    "gemma2-caps": _model("Gemma2ForCausalLM", "Gemma 2", "soft caps, mixed windows, norms before and behind, scale",
        _FOUR, head_dim=16, query_pre_attn_scalar=10, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "mixtral-window": _model("MixtralForCausalLM", "Mixtral", "experts, window", _EXPERTS, sliding_window=10),
    "minimax-m2": _model("MiniMaxM2ForCausalLM", "MiniMax M2, M2.1, M2.5",
        "experts chosen by sigmoids with a bias, norms of q and k over all heads, partial rotary", _EXPERTS,
        head_dim=16, rotary_dim=8),
    "qwen2-moe": _model("Qwen2MoeForCausalLM", "Qwen1.5-MoE, Qwen2-57B-A14B",
        "experts, a shared one with its gate, a dense layer", _EXPERTS, moe_intermediate_size=40,
        shared_expert_intermediate_size=144, num_hidden_layers=4, mlp_only_layers=[1]),
    "stablelm": _model("StableLmForCausalLM", "StableLM 2 12B", "LayerNorm, by head too, partial rotary, biases",
        use_qkv_bias=True, qk_layernorm=True, partial_rotary_factor=0.25),
    "stablelm-parallel": _model("StableLmForCausalLM", "StableLM", "attention beside MLP", use_parallel_residual=True),
    "starcoder2-window": _model("Starcoder2ForCausalLM", "StarCoder 2",
        "LayerNorm, biases, an MLP without gate, window", sliding_window=10),
    "cohere": _model("CohereForCausalLM", "Command-R+, Aya",
        "LayerNorm, by head too, attention beside MLP, interleaved rotary, scaled logits, biases", use_qk_norm=True,
        logit_scale=0.3, attention_bias=True),
    "cohere2": _model("Cohere2ForCausalLM", "Command-R7B", "the same, mixed windows, layers without positions", _FOUR,
        logit_scale=0.3),
    "glm": _model("GlmForCausalLM", "GLM-4-9B", "interleaved partial rotary, fused gate and up, biases", head_dim=16,
        attention_bias=True),
    "glm4": _model("Glm4ForCausalLM", "GLM-4-0414", "the same, norms before and behind", head_dim=24,
        attention_bias=False),
    "ernie4.5": _model("Ernie4_5ForCausalLM", "Ernie 4.5 0.3B", "interleaved rotary, biases", head_dim=24,
        use_bias=True),
    "exaone4": _model("Exaone4ForCausalLM", "Exaone 4 32B",
        "norms behind, mixed windows, layers without positions", _FOUR, sliding_window_pattern=4),
    "exaone4-everywhere": _model("Exaone4ForCausalLM", "Exaone 4 1.2B", "norms behind, no window",
        sliding_window=None, layer_types=["full_attention"] * 3),
    "seed-oss": _model("SeedOssForCausalLM", "Seed-OSS 36B", "biases", head_dim=16, attention_out_bias=True),
    "arcee": _model("ArceeForCausalLM", "AFM 4.5B", "squared ReLU without gate, biases", _BIASES),
    "ministral3": _model("Ministral3ForCausalLM", "Ministral 3, by itself",
        "YaRN beyond its original context, queries that grow with their position", _GROWING),
    "ministral3-that-sees": _model("Mistral3ForConditionalGeneration", "Ministral 3", "its language model", _GROWING,
        vision=_PIXTRAL, model_type="ministral3"),
    "hunyuan-dense": _model("HunYuanDenseV1ForCausalLM", "Hunyuan 0.5B to 7B", "norms behind rotation, alpha",
        head_dim=16, rope_parameters=_ALPHA),
    "glm4-moe": _model("Glm4MoeForCausalLM", "GLM-4.5, GLM-4.5-Air, GLM-4.6",
        "experts chosen by sigmoids with a bias, in groups, shared ones, a dense layer, partial rotary", _GROUPED,
        use_qk_norm=True, attention_bias=True),
    "deepseek2": _model("DeepseekV2ForCausalLM", "DeepSeek V2 Lite",
        "attention over latents, which pages hold, experts, shared ones, a dense layer, interleaved rotary", _LATENT,
        q_lora_rank=None),
    "deepseek2-groups": _model("DeepseekV2ForCausalLM", "DeepSeek V2",
        "the same, queries of a latent, groups of experts", _LATENT, _LESS, topk_method="group_limited_greedy"),
    "deepseek3-yarn": _model("DeepseekV3ForCausalLM", "DeepSeek V3 and R1",
        "the same, experts chosen by sigmoids with a bias, YaRN with its scales of attention", _LATENT,
        rope_parameters={**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.8}),
    "glm4-moe-lite": _model("Glm4MoeLiteForCausalLM", "GLM-4.7-Flash", "the same", _LATENT, rms_norm_eps=1e-5),
    "minicpm3": _model("MiniCPM3ForCausalLM", "MiniCPM 3",
        "attention over latents, longrope, scales of embeddings, residuals and logits", _LATENT, scale_emb=3,
        scale_depth=0.9, dim_model_base=40, rope_parameters=_LONGROPE),
    "llama4": _model("Llama4ForCausalLM", "Llama 4, by itself",
        "chunks, layers without positions whose queries grow, norms without weights behind rotation, experts that "
        "read weighted", _LLAMA4),
    "llama4-no-norms": _model("Llama4ForCausalLM", "", "", _LLAMA4, use_qk_norm=False, attn_temperature_tuning=False,
        num_experts_per_tok=1),
    "llama4-that-sees": _model("Llama4ForConditionalGeneration", "Llama 4 Scout and Maverick", "its language model",
        _LLAMA4, vision={**_PATCHES, "model_type": "llama4_vision_model", "intermediate_size": 128,
        "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}, model_type="llama4_text"),
    "dots1-window": _model("Dots1ForCausalLM", "dots.llm1", "the same routing, window in the last layers", _GROUPED,
        n_group=1, topk_group=1, sliding_window=9, max_window_layers=1, norm_topk_prob=True),
    "ernie4.5-moe": _model("Ernie4_5_MoeForCausalLM", "Ernie 4.5 21B-A3B, 300B-A47B",
        "experts in some layers, chosen with a bias, shared ones, interleaved rotary", head_dim=24, moe_num_experts=7,
        moe_k=3, moe_intermediate_size=40, num_hidden_layers=5, moe_layer_interval=2, moe_layer_end_index=3),
    "hunyuan-moe": _model("HunYuanMoEV1ForCausalLM", "Hunyuan A13B",
        "experts, a shared one, norms behind rotation, alpha", head_dim=16, num_experts=6, moe_topk=3,
        rope_parameters=_ALPHA),
    "gpt-oss": _model("GptOssForCausalLM", "gpt-oss-20b, gpt-oss-120b",
        "sinks, mixed windows, biases of all projections, of the router and of experts, a clamped SwiGLU, YaRN; "
        "experts in full, or in MXFP4 as published", _EXPERTS, _FOUR, head_dim=16, swiglu_alpha=1.3,
        swiglu_limit=0.8, rope_parameters={**YARN_ROPE, "truncate": False}),
    "gemma3n": _model("Gemma3nForCausalLM", "Gemma 3n E2B, E4B",
        "hidden numbers in several streams, a residual of low rank, gates that are cut, embeddings by layer, layers "
        "that attend to what an earlier one keeps", _GEMMA3N),
    "gemma3n-that-sees": _model("Gemma3nForConditionalGeneration", "Gemma 3n, as published", "its language model",
        _GEMMA3N, vision={**_PATCHES, "vocab_offset": 1000, "vocab_size": 8, "rms_norm_eps": 1e-6},
        whole={"audio_config": _EARS}, model_type="gemma3n_text", pad_token_id=0),
    "gemma4": _model("Gemma4ForCausalLM", "Gemma 4 E2B, E4B",
        "heads of two sizes, scores without a scale, p-RoPE, normalised values, embeddings by layer, layers that "
        "attend to what an earlier one keeps, scales of layers", _GEMMA4_SMALL),
    "gemma4-large": _model("Gemma4ForCausalLM", "Gemma 4 31B",
        "the same without those embeddings; KV heads by layer, values that are keys", _GEMMA4,
        hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4-moe": _model("Gemma4ForCausalLM", "Gemma 4 26B-A4B",
        "the same, experts beside a dense MLP, capped logits", _GEMMA4, hidden_size_per_layer_input=0,
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], enable_moe_block=True,
        num_experts=7, top_k_experts=3, moe_intermediate_size=40, attention_k_eq_v=True, final_logit_softcapping=3.0),
    "gemma4-that-sees": _model("Gemma4ForConditionalGeneration", "Gemma 4, as published", "its language model",
        _GEMMA4_SMALL, vision={**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4,
        "position_embedding_size": 16}, model_type="gemma4_text", pad_token_id=0),
    "nemotron": _model("NemotronForCausalLM", "Nemotron 4, Minitron",
        "LayerNorm whose weights lack 1, squared ReLU, partial rotary", attention_bias=True, partial_rotary_factor=0.5),
    "phi": _model("PhiForCausalLM", "Phi-1, Phi-1.5, Phi-2",
        "attention beside MLP, partial rotary, biases, of the head, too", partial_rotary_factor=0.5),
    "falcon-7b": _model("FalconForCausalLM", "Falcon 7B",
        "one KV head, a fused projection, attention beside MLP, GELU by the error function", _FALCON, hidden_size=72,
        num_attention_heads=18),
    "falcon-40b": _model("FalconForCausalLM", "Falcon 40B, 180B; Falcon 2 11B",
        "projections fused by KV head, a norm each, or one, for attention beside MLP; `alibi` is refused", _FALCON_NEW),
    "falcon-heads": _model("FalconForCausalLM", "", "", _FALCON, multi_query=False, parallel_attn=False, bias=True),
    "falcon-11b": _model("FalconForCausalLM", "", "", _FALCON_NEW, num_ln_in_parallel_attn=1),
    "gpt2": _model("GPT2LMHeadModel", "GPT-2", "learned positions, matrices with inputs first, a fused projection"),
    "gpt-bigcode": _model("GPTBigCodeForCausalLM", "StarCoder, SantaCoder", "learned positions, one KV head",
        multi_query=True),
    "gpt-bigcode-heads": _model("GPTBigCodeForCausalLM", multi_query=False),
    "gpt-neox": _model("GPTNeoXForCausalLM", "Pythia, GPT-NeoX 20B",
        "projections fused by head, partial rotary, attention beside MLP with a norm each, or before it",
        rotary_pct=0.5),
    "gpt-neox-in-turn": _model("GPTNeoXForCausalLM", use_parallel_residual=False, hidden_act="gelu_fast"),
    "lfm2": _model("Lfm2ForCausalLM", "LFM2, LFM2.5",
        "short convolutions, whose states are kept and found as pages are; norms of q and k", _LFM2),
    "lfm2-bias": _model("Lfm2ForCausalLM", "", "", _LFM2, conv_bias=True, conv_L_cache=4, num_hidden_layers=4,
        block_auto_adjust_ff_dim=False, layer_types=["full_attention", "conv", "conv", "full_attention"],
        tie_word_embeddings=False),
    "lfm2-moe": _model("Lfm2MoeForCausalLM", "LFM2-8B-A1B",
        "the same, experts chosen by sigmoids with a bias, dense layers", _LFM2, _MOE, num_dense_layers=1,
        norm_topk_prob=True, routed_scaling_factor=1.5),
    "granite-hybrid": _model("GraniteMoeHybridForCausalLM", "Granite 4.0 H 350M, 1B, Micro",
        "Mamba-2 layers, a few of attention without positions", _GRANITE_HYBRID, num_local_experts=0),
    "granite-hybrid-moe": _model("GraniteMoeHybridForCausalLM", "Granite 4.0 H Tiny and Small",
        "the same, experts and one that all tokens go through", _GRANITE_HYBRID, num_local_experts=7,
        num_experts_per_tok=3, position_embedding_type="rope", mamba_conv_bias=False, tie_word_embeddings=True),
    "falcon-h1": _model("FalconH1ForCausalLM", "Falcon H1",
        "attention and Mamba-2 side by side, numbers that much is multiplied by", _FALCON_H1, head_dim=16,
        lm_head_multiplier=0.7, embedding_multiplier=3.0, mlp_multipliers=[0.8, 0.6], key_multiplier=0.4,
        attention_out_multiplier=0.9, attention_in_multiplier=1.3, ssm_multipliers=[0.35, 0.5, 1.2, 0.7, 1.5],
        ssm_in_multiplier=1.25, ssm_out_multiplier=0.6),
    "falcon-h1-norm": _model("FalconH1ForCausalLM", "Falcon H1, `mamba_rms_norm`", "the same, a norm behind the gate",
        _FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False),
    "falcon-h1-norm-first": _model("FalconH1ForCausalLM", "", "", _FALCON_H1, mamba_rms_norm=True,
        time_step_limit=[0.3, 1.7]),
    "nemotron-h": _model("NemotronHForCausalLM", "Nemotron-H, Nemotron Nano 2",
        "a layer is Mamba-2, attention without positions, or an MLP", _NEMOTRON_H,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]),
    "nemotron-h-moe": _model("NemotronHForCausalLM", "Nemotron 3 Nano", "the same, experts without gates", _NEMOTRON_H,
        _without(_GROUPED, "head_dim", "first_k_dense_replace"), _LESS, moe_shared_expert_intermediate_size=80,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"]),
    "mamba2": _model("Mamba2ForCausalLM", "Mamba-2, Codestral Mamba", "Mamba-2 alone: no keys and values",
        num_heads=8, head_dim=16, n_groups=2, state_size=20, conv_kernel=3),
    "qwen2-vl": _model("Qwen2VLForConditionalGeneration", "Qwen2-VL", "its language model", _MROPE,
        vision={**_QWEN, "hidden_size": None, "embed_dim": 32}),
    "qwen2.5-vl": _model("Qwen2_5_VLForConditionalGeneration", "Qwen2.5-VL", "its language model", _MROPE,
        vision=_QWEN),
    "qwen3-vl": _model("Qwen3VLForConditionalGeneration", "Qwen3-VL", "its language model", _MROPE,
        vision={**_QWEN, "deepstack_visual_indexes": []}),
    "qwen3-vl-moe": _model("Qwen3VLMoeForConditionalGeneration", "Qwen3-VL-30B-A3B, 235B-A22B", "the same, experts",
        _MOE, _MROPE, vision={**_QWEN, "deepstack_visual_indexes": []}),
    "qwen3.5": _model("Qwen3_5ForCausalLM", "Qwen3.5-0.8B to 27B, their text models",
        "gated delta nets with states, gated attention", _DELTA, linear_value_head_dim=40, tie_word_embeddings=True),
    "qwen3.5-that-sees": _model("Qwen3_5ForConditionalGeneration", "Qwen3.5-0.8B to 27B", "their language models",
        _DELTA, _HALF_MROPE, vision=_QWEN),
    "qwen3.5-moe": _model("Qwen3_5MoeForCausalLM", "Qwen3.5-35B-A3B to 397B-A17B, their text models",
        "the same, experts", _DELTA_EXPERTS, linear_num_value_heads=6,
        rope_parameters={**YARN_ROPE, "partial_rotary_factor": 0.5}),
    "qwen3.5-moe-that-sees": _model("Qwen3_5MoeForConditionalGeneration", "Qwen3.5-35B-A3B to 397B-A17B",
        "their language models", _DELTA_EXPERTS, _HALF_MROPE, vision=_QWEN),
    "qwen3-next": _model("Qwen3NextForCausalLM", "Qwen3-Next-80B-A3B", "the same, projections by head of keys",
        _DELTA_EXPERTS, mlp_only_layers=[1]),
    "qwen3-next-at-first": _model("Qwen3NextForCausalLM", "", "", _DELTA_EXPERTS, linear_conv_kernel_dim=2,
        layer_types=["full_attention", *["linear_attention"] * 3], num_experts_per_tok=6, norm_topk_prob=False),
}

VARIANTS = [name for name, model in MODELS.items() if model.torch and model.vision is None]
ON_CPU = [name for name, model in MODELS.items() if not model.torch and model.vision is None]
VISION = [name for name, model in MODELS.items() if model.vision is not None]

TINY_ENCODER = {**_without(TINY, "num_key_value_heads", "eos_token_id", "bos_token_id", "pad_token_id"),
                "max_position_embeddings": 96}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
_JINA = {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
NOMIC_MOE = {"activation_function": "gelu", "moe_every_n_layers": 2, "moe_normalize_expert_weights": False,
             "moe_top_k": 2, "num_experts": 8, "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True,
             "type_vocab_size": 1, "layer_norm_epsilon": 1e-5, "layer_norm_eps": 1e-5}
_JUDGE = "ModernBertForSequenceClassification"
ENCODERS = {
    "bert": _model("BertModel", "BERT, all-MiniLM, bge, e5, gte v1, Arctic Embed"),
    "bert-masked": _model("BertForMaskedLM", type_vocab_size=1, hidden_act="gelu_new", layer_norm_eps=1e-3),
    "roberta": _model("RobertaModel", "RoBERTa"),
    "xlm-roberta-masked": _model("XLMRobertaForMaskedLM", "XLM-R: bge-m3, multilingual-e5, Arctic Embed L v2",
        pad_token_id=5),
    "nomic-bert": _model("NomicBertModel", "nomic-embed-text v1, v1.5"),
    "nomic-moe": _model("NomicBertModel", "nomic-embed-text-v2-moe", "", NOMIC_MOE, num_hidden_layers=4),
    "jina-bert": _model("JinaBertModel", "jina-embeddings-v2", "", _JINA),
    "jina-bert-12": _model("JinaBertModel", "", "", _JINA, num_attention_heads=12, hidden_size=96,
        max_position_embeddings=200),
    "modernbert": _model("ModernBertModel", "ModernBERT: gte-modernbert, modernbert-embed", "", _IDS,
        local_attention=10),
    "modernbert-masked": _model("ModernBertForMaskedLM", "", "", _IDS, local_attention=7, norm_bias=True,
        attention_bias=True, num_hidden_layers=4),
    "mpnet": _model("MPNetModel", "all-mpnet-base-v2, multi-qa-mpnet", max_position_embeddings=300),
    "mpnet-masked": _model("MPNetForMaskedLM"),
    "embedding-gemma": _model("Gemma3TextModel", "EmbeddingGemma", "", _GEMMA3, use_bidirectional_attention=True,
        sliding_window=12, num_key_value_heads=2),
}
CROSS_ENCODERS = {
    "bert": _model("BertForSequenceClassification", num_labels=1),
    "xlm-roberta": _model("XLMRobertaForSequenceClassification", num_labels=1, pad_token_id=5),
    "roberta-classes": _model("RobertaForSequenceClassification", num_labels=3),
    "mpnet": _model("MPNetForSequenceClassification", num_labels=1),
    "modernbert": _model(_JUDGE, "", "", _IDS, num_labels=1, local_attention=10, classifier_pooling="mean"),
    "qwen3-classes": _model("Qwen3ForSequenceClassification", num_labels=3, num_key_value_heads=2, head_dim=16,
        pad_token_id=0),
    "modernbert-cls": _model(_JUDGE, "", "", _IDS, num_labels=1, classifier_bias=True, norm_bias=True),
}
CARD_PREFIX = (  # this and the next two as the model card of Qwen3-Reranker has them
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
CARD_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
CARD_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

# Through transformers' layers: what an engine makes of them is beside transformers alone.
TINY_THEIRS = {**TINY, "eos_token_id": None, "bos_token_id": None}
_GPT_J = {"n_embd": 64, "n_head": 4, "n_layer": 3, "rotary_dim": 8, "n_positions": 256}
_SIX_EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_FEW_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "topk_group": 1,
                "first_k_dense_replace": 1}
_DEEPSEEK = {**_FEW_EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8,
             "qk_nope_head_dim": 12, "v_head_dim": 10, "n_group": 2, "n_shared_experts": 1}
_MIXED = {**_FOUR, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}
_BOTH_SIZES = "heads of K and V of different sizes, experts"
CASES = [
    _theirs("ApertusForCausalLM"),
    _theirs("ArceeForCausalLM"),
    _theirs("BioGptForCausalLM", "learned positions"),
    _theirs("CodeGenForCausalLM", "partial rotary", _GPT_J),
    _theirs("CohereForCausalLM", "norms of q and k, scaled logits", use_qk_norm=True, logit_scale=0.3),
    _theirs("Cohere2ForCausalLM", "mixed windows", _FOUR),
    _theirs("DeepseekV2ForCausalLM", _BOTH_SIZES, _DEEPSEEK, topk_method="greedy"),
    _theirs("DeepseekV3ForCausalLM", _BOTH_SIZES, _DEEPSEEK),
    _theirs("DiffLlamaForCausalLM", "attention asked twice a layer"),
    _theirs("Ernie4_5ForCausalLM", head_dim=16),
    _theirs("Exaone4ForCausalLM", "mixed windows", _MIXED),
    _theirs("FalconForCausalLM", "40b's form", alibi=False, new_decoder_architecture=True, num_kv_heads=2),
    _theirs("FalconForCausalLM", "7b's form, one KV head", alibi=False, multi_query=True, parallel_attn=True),
    _theirs("FalconForCausalLM", "biases", alibi=False, multi_query=False, parallel_attn=False, bias=True),
    _theirs("GemmaForCausalLM", head_dim=16),
    _theirs("Gemma2ForCausalLM", "soft caps, mixed windows, scale", _FOUR, head_dim=16, query_pre_attn_scalar=10,
            attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    _theirs("Gemma3ForCausalLM", "mixed windows with frequencies of their own, scale", _MIXED, head_dim=16,
            query_pre_attn_scalar=10),
    Model("Gemma3ForConditionalGeneration", "its language model", {"head_dim": 16, "tie_word_embeddings": True},
        vision={**_TOWER, "image_size": 28, "patch_size": 14}, whole={"mm_tokens_per_image": 4}),
    _theirs("GlmForCausalLM", "partial rotary, biases", head_dim=16, attention_bias=True),
    _theirs("Glm4ForCausalLM", "partial rotary", head_dim=16),
    _theirs("Glm4MoeForCausalLM", "experts", _FEW_EXPERTS, head_dim=16, n_group=1),
    _theirs("GPT2LMHeadModel", "learned positions"),
    _theirs("GPTBigCodeForCausalLM", "learned positions, one KV head"),
    _theirs("GPTJForCausalLM", "partial rotary", _GPT_J),
    _theirs("GPTNeoXForCausalLM", "partial rotary, biases", rotary_pct=0.25),
    _theirs("GraniteForCausalLM", "scales of embeddings, residuals, attention and logits", _SCALES),
    _theirs("GraniteMoeForCausalLM", "experts", _SIX_EXPERTS),
    _theirs("HeliumForCausalLM", head_dim=16),
    _theirs("HunYuanDenseV1ForCausalLM", "norms of q and k", head_dim=16),
    _theirs("MixtralForCausalLM", "experts, window", _SIX_EXPERTS, sliding_window=10),
    _theirs("NemotronForCausalLM", "partial rotary"),
    _theirs("OlmoForCausalLM"),
    _theirs("Olmo2ForCausalLM"),
    _theirs("Olmo3ForCausalLM", "mixed windows", _MIXED),
    _theirs("OlmoeForCausalLM", "experts", _SIX_EXPERTS),
    _theirs("OPTForCausalLM", "learned positions", ffn_dim=112, word_embed_proj_dim=64),
    _theirs("PersimmonForCausalLM", "partial rotary, norms of q and k"),
    _theirs("PhiForCausalLM", "partial rotary, biases", partial_rotary_factor=0.5),
    _theirs("Phi3ForCausalLM", "window", sliding_window=11),
    _theirs("Phi3ForCausalLM", "partial rotary, longrope up to its original context", sliding_window=None,
            partial_rotary_factor=0.75, original_max_position_embeddings=128,
            rope_parameters={**_LONGROPE, **_LONGER, "rope_theta": 10_000.0, "original_max_position_embeddings": 128}),
    _theirs("PhimoeForCausalLM", "experts, window", _SIX_EXPERTS, sliding_window=9, attention_bias=True),
    _theirs("Qwen2MoeForCausalLM", "experts", _SIX_EXPERTS, shared_expert_intermediate_size=48),
    _theirs("SeedOssForCausalLM", head_dim=16),
    _theirs("SmolLM3ForCausalLM", "a layer without positions", no_rope_layers=[1, 1, 0]),
    _theirs("StableLmForCausalLM", "partial rotary, biases, norms of q and k", use_qkv_bias=True, qk_layernorm=True),
    _theirs("Starcoder2ForCausalLM", "window, biases", sliding_window=10),
    _theirs("LlamaForCausalLM", "native, too; by --model-impl transformers"),
]
_STATE, _ENCODES = "keep a state of their own", "it is not a decoder that generates text"
REFUSED = [
    *(Refused(f"{name}ForCausalLM", _STATE) for name in ("Mamba", "FalconMamba", "Rwkv", "RecurrentGemma", "Jamba",
                                                         "FalconH1", "GraniteMoeHybrid", "Qwen3Next")),
    Refused("MiniMaxForCausalLM", "layer_types: linear_attention"),
    Refused("Lfm2ForCausalLM", "layer_types: conv", {"layer_types": ["conv", "full_attention", "conv"]}),
    Refused("Llama4ForCausalLM", "layer_types: chunked_attention"),
    Refused("FalconForCausalLM", "ALiBi", {"alibi": True}),
    Refused("BloomForCausalLM", "ALiBi"),
    Refused("MptForCausalLM", "ALiBi"),
    Refused("XGLMForCausalLM", "do not use the registry"),
    Refused("T5ForConditionalGeneration", _ENCODES),
    Refused("BartForCausalLM", "an encoder-decoder"),
    Refused("BertForMaskedLM", _ENCODES),
]
# fmt: on
