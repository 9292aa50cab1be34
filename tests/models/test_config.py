"""config.json in both of transformers' spellings, and everything in it that must be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.models import ARCHITECTURES, MoeConfig, load_config, parse_config
from minisgl.models.architectures import Mamba2, ScaledSilu
from minisgl.models.decoder import build_model
from minisgl.models.rope import RopeConfig
from tests.helpers.variants import CONFIG

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

MISTRAL3 = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {**CONFIG, "model_type": "mistral"}}

GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 16}
MISTRAL = {"architectures": ["MistralForCausalLM"], "sliding_window": 16}

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 1,
}

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}

GRANITE_HYBRID = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["mamba", "attention"],
    "shared_intermediate_size": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
}
FALCON_H1 = {**GRANITE_HYBRID, "architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 128}
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M-*ME",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 48,
}


def test_both_spellings_mean_the_same() -> None:
    old = parse_config({**CONFIG, "rope_theta": 5e5, "rope_scaling": LLAMA3, "torch_dtype": "bfloat16"})
    new = parse_config({**CONFIG, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "dtype": "bfloat16"})
    assert old == new
    assert old.ropes[0] == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)
    assert old.dtype == "bfloat16"


def test_the_oldest_spelling_of_the_rope_type() -> None:
    config = parse_config({**CONFIG, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert config.ropes[0] == RopeConfig(10_000.0, "linear", 2.0)


@pytest.mark.parametrize(
    ("change", "context"),
    [
        ({}, 512),  # the config's own, if it is the larger one
        ({"factor": 16.0}, 1024),
        ({"factor": None}, 512),
        ({"original_max_position_embeddings": None}, 2048),
    ],
)
def test_the_context_that_yarn_makes(change: dict[str, Any], context: int) -> None:
    config = parse_config({**CONFIG, "rope_scaling": {**YARN, **change}})
    assert config.max_position == context


def test_defaults() -> None:
    config = parse_config({name: value for name, value in CONFIG.items() if name != "num_key_value_heads"})
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.ropes[0] == RopeConfig(10_000.0)
    assert not config.tie_word_embeddings
    assert config.eos_ids == ()


def test_defaults_of_gemma_files() -> None:
    """As Google wrote the text half of the 4B model."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    ours = parse_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    theirs = transformers.Gemma3TextConfig(**text)
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (ours.head_dim, ours.vocab_size) == (theirs.head_dim, theirs.vocab_size)
    assert (ours.max_position, ours.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
    assert [window is None for window in ours.windows] == [kind == "full_attention" for kind in theirs.layer_types]
    assert ours.tie_word_embeddings and ours.activation == "gelu" and ours.norm_offset == 1.0
    assert ours.ropes == (RopeConfig(1e6, "linear", 8.0), RopeConfig(1e4))
    written = json.loads(theirs.to_json_string())
    again = parse_config({**written, "architectures": ["Gemma3ForCausalLM"]})
    assert (again.ropes, again.rotary, again.windows) == (ours.ropes, ours.rotary, ours.windows)


def test_eos_ids_are_those_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 9}))
    assert load_config(tmp_path).eos_ids == (9,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    assert load_config(tmp_path).eos_ids == (4, 9)


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, (None, None)),
        (MISTRAL, (16, 16)),
        ({**MISTRAL, "sliding_window": None}, (None, None)),
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096)),  # transformers' default
        (QWEN2, (None, 16)),
        ({**QWEN2, "use_sliding_window": False}, (None, None)),
        ({**QWEN2, "max_window_layers": 2}, (None, None)),
        ({**QWEN2, "layer_types": ["sliding_attention", "full_attention"]}, (16, None)),
        ({**QWEN2, "use_sliding_window": False, "layer_types": ["full_attention"] * 2}, (None, None)),
        ({**MOE, "sliding_window": 16}, (None, None)),
        ({**MOE, "sliding_window": 16, "use_sliding_window": True}, (16, 16)),
        ({**GEMMA3, "num_hidden_layers": 7}, (16, 16, 16, 16, 16, None, 16)),
        ({**GEMMA3, "sliding_window_pattern": 2}, (16, None)),
        ({**GEMMA3, "_sliding_window_pattern": 1}, (None, None)),
        ({**GEMMA3, "layer_types": ["full_attention", "sliding_attention"]}, (None, 16)),
    ],
)
def test_windows_by_layer_are_parsed(change: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse_config({**CONFIG, **change}).windows == windows


@pytest.mark.parametrize(
    ("change", "biases"),
    [
        ({}, (False, False, False)),
        ({"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ({"architectures": ["Qwen2ForCausalLM"]}, (True, False, False)),
        ({**MISTRAL, "attention_bias": True, "mlp_bias": True}, (False, False, False)),
    ],
)
def test_bias_fields_are_parsed(change: dict[str, Any], biases: tuple[bool, bool, bool]) -> None:
    config = parse_config({**CONFIG, **change})
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == biases


@pytest.mark.parametrize(
    ("whole", "text", "tied"),
    [
        ({}, {}, False),
        ({}, {"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),
    ],
)
def test_the_head_of_a_model_with_a_text_half(whole: dict[str, Any], text: dict[str, Any], tied: bool) -> None:
    raw = {**MISTRAL3, "torch_dtype": "bfloat16", "vocab_size": 7, **whole}
    config = parse_config({**raw, "text_config": {**CONFIG, "rope_theta": 1e9, **text}})
    assert (config.vocab_size, config.ropes[0].theta, config.dtype) == (100, 1e9, "bfloat16")
    assert config.tie_word_embeddings is tied


def test_expert_fields_are_parsed() -> None:
    moe = parse_config({**CONFIG, **MOE, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}).moe
    assert moe == MoeConfig(8, 2, 16, norm_topk_prob=False, layers=frozenset({1, 5}))
    new = {**CONFIG, **MOE, "num_local_experts": 8, "norm_topk_prob": True}
    del new["num_experts"]
    assert parse_config(new).moe == MoeConfig(8, 2, 16, norm_topk_prob=True, layers=frozenset({0, 1}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "short_factor: missing"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor: missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "factor 0.5 must be at least 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 0.5}}, "beta_fast 0.5 at least beta_slow 1"),
        ({"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [0]}}, "must be positive"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type: 'spiral'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "factor: missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor: missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window: 0"),
        ({**MISTRAL, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types: must be sliding_attention"),
        ({**QWEN2, "layer_types": ["sliding_attention"]}, "layer_types: must be"),
        ({**QWEN2, "layer_types": ["full_attention", "chunked_attention"]}, "layer_types: must be"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "num_experts: missing"),
        ({**MOE, "num_experts_per_tok": 9}, "num_experts_per_tok: 9: must be between 1 and 8"),
        ({"architectures": ["Mistral3ForConditionalGeneration"]}, "text_config: missing"),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral4"}},
            "text_config: model_type: 'mistral4'",
        ),
        (
            {**MISTRAL3, "quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config: quant_method: 'bitsandbytes': must be one of awq, gptq, compressed-tensors, fp8",
        ),
        ({**GEMMA3, "hidden_activation": "silu"}, "hidden_activation: 'silu'"),
        ({**GEMMA3, "final_logit_softcapping": 30.0}, r"final_logit_softcapping: 30\.0 is not supported \(by"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
        ({**GEMMA3, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0: must be more than 0"),
        ({**GEMMA3, "sliding_window": None}, "sliding_window: missing"),
        ({**GEMMA3, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type: 'yarn' is not supported with"),
        ({**GRANITE_HYBRID, "mamba_d_head": 15}, "mamba_d_head: 15: must be 128 divided by 8 heads"),
        ({**GRANITE_HYBRID, "mamba_n_groups": 3}, "mamba_n_groups: 3: must divide 8 heads"),
        ({**GRANITE_HYBRID, "mamba_d_conv": 0}, "mamba_d_conv: 0: must be at least 1"),
        ({**GRANITE_HYBRID, "layer_types": ["mamba"]}, "layer_types: must be one of linear_attention, mamba,"),
        ({**GRANITE_HYBRID, "mamba_proj_bias": True}, "mamba_proj_bias: True is not supported"),
        ({**FALCON_H1, "projectors_bias": True}, "projectors_bias: True is not supported"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "M-*x"}, "layer_types: must be one of linear_attention, mamba,"),
        ({**NEMOTRON_H, "moe_latent_size": 16}, "moe_latent_size: 16 is not supported"),
        ({**NEMOTRON_H, "mlp_hidden_act": "silu"}, "mlp_hidden_act: 'silu' is not supported"),
        ({"hidden_size": "wide"}, "wide"),
        ({"architectures": []}, "architectures: missing"),
        ({"architectures": ["OPTForCausalLM"]}, "OPTForCausalLM is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(tmp_path)
    assert str(caught.value).count("config.json") == 1


def test_all_spellings_of_layers_mean_the_same() -> None:
    published = parse_config({**CONFIG, **NEMOTRON_H})
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"]
    raw = {name: value for name, value in NEMOTRON_H.items() if name != "hybrid_override_pattern"}
    limits = [0.0, {"__float__": "Infinity"}]
    assert parse_config({**CONFIG, **raw, "layers_block_type": kinds, "time_step_limit": limits}) == published
    assert published.attends == (False, False, True, False, False)
    assert published.state_layers == (True, False, False, True, False)
    assert published.intermediate_sizes == (0, CONFIG["intermediate_size"], 0, 0, 0)
    assert published.moe is not None and published.moe.layers == {4}


def test_numbers_of_falcon_h1_that_are_multiplied_with() -> None:
    of = {
        "attention_in_multiplier": 0.5,
        "attention_out_multiplier": 3.0,
        "key_multiplier": 0.25,
        "ssm_in_multiplier": 2.0,
    }
    config = parse_config({**CONFIG, **FALCON_H1, **of, "ssm_multipliers": [1, 2, 3, 4, 5], "mlp_multipliers": [6, 7]})
    assert config.attention_scale == pytest.approx(0.25 * 0.25 * config.head_dim**-0.5)
    assert (config.value_scale, config.activation) == (1.5, ScaledSilu(6.0, 7.0))
    assert isinstance(config.state, Mamba2) and config.state.factors == (2.0, 4.0, 6.0, 8.0, 10.0)
    assert config.state.gating == "alone"
    plain = parse_config({**CONFIG, **FALCON_H1})
    assert (plain.value_scale, plain.activation) == (1.0, "silu")


def test_an_unknown_architecture_lists_the_known_whatever_else_its_config_holds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    assert all(known in str(caught.value) for known in ("MambaForCausalLM", *ARCHITECTURES))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_usable_config(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


def test_real_configs() -> None:
    data = envs.data_dir()
    if data is None:
        pytest.skip(f"{envs.DATA} is not set")
    sizes = {}
    for file in sorted((data / "configs").glob("*.json")):
        raw = json.loads(file.read_text())
        # 'meta' tensors have shapes and no memory
        model = build_model(parse_config(raw), dtype=torch.bfloat16, device=torch.device("meta"), max_position=16)
        sizes[file.name.removesuffix(".config.json")] = sum(part.numel() for part in model.checkpoint().values())
    assert sizes == {
        "Llama-3.1-8B": 8_030_261_248,
        "Llama-3.2-1B": 1_235_814_400,
        "Qwen2-1.5B-Instruct": 1_543_714_304,
        "Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
        "Qwen3-4B-Instruct-2507": 4_022_468_096,
    }
