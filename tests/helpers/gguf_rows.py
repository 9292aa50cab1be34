"""Table of GGUF files: the changes of a tiny checkpoint before llama.cpp's converter writes it. Data alone: both
engines serve the files in tests/weights/test_gguf_folder_llama_cpp.py; tests.helpers.our_models records the
differences."""

from __future__ import annotations

from typing import NamedTuple

from tests.helpers.variants import YARN_ROPE, Config

SENTENCEPIECE, OF_TEXT = "sentencepiece", "BPE over plain text"


class Row(NamedTuple):
    """Tiny transformers model to be converted, whose row lengths are multiples of 256."""

    variant: str
    """Name in the table of tests/helpers/variants.py."""
    tokenizer: str = "gpt-2"
    """Value of `tokenizer.ggml.pre` that the converter writes, or `SENTENCEPIECE` or `OF_TEXT`."""
    changes: Config = {}  # noqa: RUF012
    norms_less: int = 0
    """Constant that the model adds to the weights of its norms."""
    packed: bool = False
    """True if the experts are in MXFP4."""
    decoded: bool = False
    """True if llama.cpp serves the weights decoded by its quantizer, so that it does not round activations to 8 bits,
    which changes the output of 64 layers or a delta net, and the choice of experts. One step in ten may still choose
    other experts; with two layers fewer."""
    without: tuple[str, ...] = ()
    """Names of sizes that the config derives from others, and so must not be given."""
    said: Config = {}  # noqa: RUF012
    """Fields of published config.json files that transformers writes differently; `None` for a field that they lack."""
    rewrite: str = ""
    """Name of the change of tensors, in tests/weights/test_gguf_folder_llama_cpp.py."""
    options: tuple[str, ...] = ()
    """Further arguments of the converter."""


# fmt: off
SIZES: Config = {"initializer_range": 0.05, "hidden_size": 256, "intermediate_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
PLAIN: Config = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
_MROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [6, 5, 5]}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 10 for i in range(12)], "long_factor": [2.0 + i / 3 for i in range(12)],
    "original_max_position_embeddings": 48}
# llama.cpp uses the short factors for the whole context
_FACTORS = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0 + i / 10 for i in range(16)],
    "long_factor": [2.0 + i / 3 for i in range(16)], "original_max_position_embeddings": 256}
# llama.cpp rounds the border dimensions of YaRN, which this base makes whole
_OPENAI: Config = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rope_parameters": {**YARN_ROPE,
    "rope_theta": 673.0, "truncate": False}}
_ROUTED: Config = {"moe_intermediate_size": 256, "num_mtp_layers": 0, "n_group": 1, "topk_group": 1,
    "scoring_func": "sigmoid"}
# which experts are chosen hangs on roundings
_LATENT: Config = {**_ROUTED, "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 256,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "routed_scaling_factor": 0.5}
# the converter reads what Google's files call the heads of full layers, llama.cpp caps logits by 30 if no key says how
_GEMMA4: Config = {"global_head_dim": 64, "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": 244}
_AS_PUBLISHED: Config = {"model_type": "gemma4 as published", "global_head_dim": 64}
# the converter pads tokens
_PADDED = {"vocab_size": 256}
_SSM: Config = {**_PADDED, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_heads": 8}
# as published
_MAMBA_KINDS = ["mamba", "attention", "mamba", "mamba"]
_NEMOTRON: Config = {**_PADDED, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 2}
_DELTA: Config = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "rms_norm_eps": 1e-6,
    "rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5}}
# as published
_PREDICTS = {"mtp_num_hidden_layers": 1}
_DELTA_EXPERTS: Config = {**_DELTA, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    "mlp_only_layers": []}

ROWS = {
    "llama": Row("llama3-tied", "llama-bpe"),
    "llama-sentencepiece": Row("llama-linear-mha", SENTENCEPIECE),
    "mistral": Row("mistral", "tekken", PLAIN),
    "qwen2": Row("qwen2-tied", "qwen2", PLAIN),
    "qwen3": Row("qwen3-untied", "qwen2", PLAIN),
    "qwen3-moe": Row("qwen3-moe", "qwen2", {**PLAIN, "moe_intermediate_size": 256}, decoded=True),
    "smollm3": Row("smollm3-tied", "smollm", {**PLAIN, "num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}),
    "gemma3": Row("gemma3-tied", SENTENCEPIECE, {"num_hidden_layers": 7,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}, norms_less=1),
    "phi3": Row("phi3-window", SENTENCEPIECE, {**PLAIN, "sliding_window": None}),
    "phi3-longrope": Row("phi3-longrope", SENTENCEPIECE, {"rope_parameters": _LONGROPE}),
    "granite": Row("granite", "refact", {**PLAIN, "attention_bias": False, "mlp_bias": False}),
    "granite-moe": Row("granite-moe", "refact", PLAIN, decoded=True),
    "granite-moe-shared": Row("granite-moe-shared", "refact", {**PLAIN, "shared_intermediate_size": 256},
        decoded=True),
    "olmo2": Row("olmo2", "olmo", PLAIN),
    "olmo3": Row("olmo3-yarn", "olmo"),
    "olmoe": Row("olmoe", "olmo", {**PLAIN, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_hidden_layers": 2},
        decoded=True),
    "gemma": Row("gemma", SENTENCEPIECE, PLAIN, norms_less=1),
    "gemma2": Row("gemma2-caps", SENTENCEPIECE, {**PLAIN, "query_pre_attn_scalar": 32}, norms_less=1),
    "mixtral": Row("mixtral-window", SENTENCEPIECE, {**PLAIN, "sliding_window": None, "num_hidden_layers": 2},
        decoded=True),
    "minimax-m2": Row("minimax-m2", "minimax-m2", {**PLAIN, "num_hidden_layers": 2}, decoded=True,
        said={"scoring_func": "sigmoid"}),
    "qwen2-moe": Row("qwen2-moe", "qwen2", {**PLAIN, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256, "mlp_only_layers": [], "num_hidden_layers": 2}, decoded=True),
    "stablelm": Row("stablelm", "stablelm2", {**PLAIN, "rope_parameters": {**PLAIN["rope_parameters"],
        "partial_rotary_factor": 0.25}}, rewrite="norms_stacked"),
    "stablelm-parallel": Row("stablelm-parallel", "stablelm2", PLAIN),
    "starcoder2": Row("starcoder2-window", "starcoder", {**PLAIN, "sliding_window": None}),
    "cohere": Row("cohere", "command-r", {**PLAIN, "attention_bias": False, "use_qk_norm": False}),
    # llama.cpp looks for norms of q and k, or a window, in the largest alone
    "cohere-norms": Row("cohere", "command-r", {**PLAIN, "attention_bias": False, "num_hidden_layers": 64}),
    "cohere2": Row("cohere2", "command-r", {**PLAIN, "rotary_pct": 1.0}),
    "glm": Row("glm", "chatglm-bpe", {"rope_parameters": {**PLAIN["rope_parameters"], "rope_theta": 10000.0}}),
    "chatglm": Row("glm", "chatglm-bpe", {"rope_parameters": {**PLAIN["rope_parameters"], "rope_theta": 10000.0}},
        rewrite="qkv_fused"),
    "glm4": Row("glm4", "glm4"),
    "ernie4.5": Row("ernie4.5", SENTENCEPIECE, {**PLAIN, "use_bias": False}),
    "exaone4": Row("exaone4", "exaone4", {**PLAIN, "num_hidden_layers": 64}, decoded=True),
    "exaone4-everywhere": Row("exaone4-everywhere", "exaone4", PLAIN),
    "seed-oss": Row("seed-oss", "seed-coder", {**PLAIN, "attention_out_bias": False}),
    "arcee": Row("arcee", "llama-bpe", {**PLAIN, "attention_bias": False, "mlp_bias": False}),
    "ministral3": Row("ministral3", "tekken"),
    "gpt-oss": Row("gpt-oss", "gpt-4o", _OPENAI, decoded=True),
    "gpt-oss-mxfp4": Row("gpt-oss", "gpt-4o", _OPENAI, packed=True, decoded=True),
    # llama.cpp cuts the gates of the first ten layers as published, whatever a file says, and shares keys from the 20th
    # on; its deviation of n gates divides by n - 1, which few make much of
    "gemma3n": Row("gemma3n", SENTENCEPIECE, {"activation_sparsity_pattern": [0.95] * 6, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 256, "laurel_rank": 64, "vocab_size_per_layer_input": 160,
        "final_logit_softcapping": 30.0}, decoded=True),
    # layers without keys attend to the last two that have some, the first of which must have a window
    "gemma4": Row("gemma4", OF_TEXT, {**_GEMMA4, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 2},
        said=_AS_PUBLISHED),
    "gemma4-large": Row("gemma4-large", OF_TEXT, {**_GEMMA4, "num_global_key_value_heads": 2}, said={**_AS_PUBLISHED,
        "num_global_key_value_heads": 2}),
    "gemma4-moe": Row("gemma4-moe", OF_TEXT, {**_GEMMA4, "num_global_key_value_heads": 2, "moe_intermediate_size": 256,
        "top_k_experts": 6}, decoded=True, said={**_AS_PUBLISHED, "num_global_key_value_heads": 2}),
    "nemotron": Row("nemotron", SENTENCEPIECE, {"attention_bias": False}, norms_less=1),
    "phi2": Row("phi", changes={"intermediate_size": 1024, "num_key_value_heads": 8}),
    "falcon-7b": Row("falcon-7b", "falcon", {"ffn_hidden_size": 1024, "num_kv_heads": 1}, without=("head_dim",)),
    "falcon-40b": Row("falcon-40b", "falcon", {"ffn_hidden_size": 1024}, without=("head_dim",)),
    "gpt2": Row("gpt2", said={"n_ctx": 256}),
    "starcoder": Row("gpt-bigcode", "starcoder"),
    "gpt-neox": Row("gpt-neox", said={"rotary_pct": 0.5, "model_type": "gpt_neox as published"}),
    "glm4-moe": Row("glm4-moe", "glm4", _ROUTED, decoded=True),
    "dots1": Row("dots1-window", "qwen2", {**_ROUTED, **PLAIN, "sliding_window": None, "num_key_value_heads": 8},
        decoded=True),
    # llama.cpp knows the small one, whose queries have no latent, by its layers
    "deepseek2": Row("deepseek2", "deepseek-llm", {**_LATENT, **PLAIN, "q_lora_rank": None, "scoring_func": "softmax",
        "num_hidden_layers": 27}, decoded=True),
    "deepseek3": Row("deepseek3-yarn", "deepseek-v3", _LATENT, decoded=True),
    "glm4-moe-lite": Row("glm4-moe-lite", "glm4", {**_LATENT, **PLAIN}, decoded=True),
    # its scales are in no key
    "minicpm3": Row("minicpm3", SENTENCEPIECE, {**_LATENT, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
        "tie_word_embeddings": True, "rope_parameters": _FACTORS}),
    "hunyuan-moe": Row("hunyuan-moe", "hunyuan", {**PLAIN, "moe_topk": 5}, decoded=True,
        said={"moe_intermediate_size": [256] * 3, "moe_topk": [5] * 3, "num_shared_expert": [1] * 3}),
    # the converter computes the shared experts' size as that of the MLP times KV heads
    "ernie4.5-moe": Row("ernie4.5-moe", SENTENCEPIECE, {**PLAIN, "intermediate_size": 2048,
        "moe_intermediate_size": 256, "moe_layer_end_index": 4, "moe_layer_interval": 1}, decoded=True),
    "llama4": Row("llama4", "llama4", {**PLAIN, "intermediate_size_mlp": 512, "attention_chunk_size": 8192,
        "floor_scale": 8192, "attn_scale": 0.1}, decoded=True),
    "hunyuan-dense": Row("hunyuan-dense", "hunyuan-dense", {"max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}}),
    "lfm2": Row("lfm2", "lfm2", {**PLAIN, "block_multiple_of": 256}),
    "lfm2-moe": Row("lfm2-moe", "lfm2", {**PLAIN, "moe_intermediate_size": 256, "num_dense_layers": 2}, decoded=True),
    "granite-hybrid": Row("granite-hybrid", "refact", {**_SSM, "shared_intermediate_size": 256},
        said={"layer_types": _MAMBA_KINDS, "num_experts_per_tok": 0}),
    "granite-hybrid-moe": Row("granite-hybrid-moe", "refact", {**_SSM, "shared_intermediate_size": 256,
        "position_embedding_type": None, "mamba_conv_bias": True}, decoded=True, said={"layer_types": _MAMBA_KINDS}),
    # the converter treats every model of this class as one with experts
    "nemotron-h": Row("nemotron-h", "pixtral", _NEMOTRON, said={"model_type": "nemotron_h as published",
        "rms_norm_eps": 1e-5, "num_hidden_layers": 5, "hybrid_override_pattern": "M-*M-",
        **dict.fromkeys(("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group"))}),
    "nemotron-h-moe": Row("nemotron-h-moe", "pixtral", {**_NEMOTRON, "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 256, "n_group": 1, "topk_group": 1}, decoded=True,
        said={"rms_norm_eps": 1e-5, "num_hidden_layers": 4, "hybrid_override_pattern": "ME*E"}),
    "mamba2": Row("mamba2", changes={**_PADDED, "head_dim": 64, "state_size": 128, "conv_kernel": 4},
        without=("num_attention_heads", "num_key_value_heads", "head_dim"), decoded=True,
        said={"intermediate_size": None}),
    # the values read from a state may nearly cancel, which its norm then amplifies
    "qwen3.5": Row("qwen3.5", "qwen35", _DELTA, decoded=True, said=_PREDICTS, rewrite="predicting"),
    "qwen3.5-moe": Row("qwen3.5-moe", "qwen35", {**_DELTA_EXPERTS, "linear_num_value_heads": 8}, decoded=True,
        said=_PREDICTS, rewrite="predicting"),
    "qwen3-next": Row("qwen3-next", "qwen2", {**_DELTA_EXPERTS, **PLAIN}, decoded=True, options=("--no-mtp",)),
    "falcon-h1": Row("falcon-h1", "falcon-h1", {**_PADDED, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_d_ssm": 512}),
    "mistral3": Row("mistral3", "tekken", PLAIN),
    "ministral3-that-sees": Row("ministral3-that-sees", "tekken"),
    "qwen2-vl": Row("qwen2-vl", "qwen2", {"rope_parameters": _MROPE}),
    "qwen2.5-vl": Row("qwen2.5-vl", "qwen2", {"rope_parameters": _MROPE}),
    "qwen3-vl": Row("qwen3-vl", "qwen2", {"rope_parameters": _MROPE}),
    "qwen3-vl-moe": Row("qwen3-vl-moe", "qwen2", {"rope_parameters": _MROPE, "moe_intermediate_size": 256},
        decoded=True),
}
# fmt: on
