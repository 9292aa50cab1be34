"""Names of a decoder's tensors, in checkpoints of transformers and in GGUF files.

Names are by part; `{layer}`, `{expert}` and `{head}` stand for indexes. `.weight` or `.bias` is appended to a name,
except to those of sinks, stacked experts and their selection bias, which are complete, and to a name that ends in a
dot, which is complete without the dot. Several names are tried in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Names = Mapping[str, str | tuple[str, ...]]

PREFIX = "model."  # prefix of all names but the head's
_GLOBAL = (
    *("embedding", "positions", "token_types", "embedding_norm", "distances"),
    *("per_layer_embedding", "per_layer_model", "per_layer_norm", "norm", "head"),
    *("stream_in", "stream_out"),
)
CHECKPOINT: Names = {
    "embedding": "model.embed_tokens",
    "positions": "model.embed_positions",
    "per_layer_embedding": "model.embed_tokens_per_layer",
    "per_layer_model": "model.per_layer_model_projection",
    "per_layer_norm": "model.per_layer_projection_norm",
    "norm": "model.norm",
    "head": "lm_head",
    "mtp_embedding_norm": "enorm",
    "mtp_hidden_norm": "hnorm",
    "mtp_in": "eh_proj",
    "mtp_norm": "shared_head.norm",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "query_down": "self_attn.q_a_proj",
    "query_norm": "self_attn.q_a_layernorm",
    "query_up": "self_attn.q_b_proj",
    "latent_down": "self_attn.kv_a_proj_with_mqa",
    "latent_norm": "self_attn.kv_a_layernorm",
    "latent_up": "self_attn.kv_b_proj",
    "out": "self_attn.o_proj",
    "attention_norm_behind": "post_attention_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_norm_behind": "post_feedforward_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "per_layer_gate": "per_layer_input_gate",
    "per_layer_out": "per_layer_projection",
    "per_layer_norm_behind": "post_per_layer_input_norm",
    "stream_in": "model.altup_projections.{expert}",
    "stream_out": "model.altup_unembed_projections.{expert}",
    "stream_router": "altup.modality_router",
    "stream_router_norm": "altup.router_norm",
    "stream_predict": "altup.prediction_coefs",
    "stream_correct": "altup.correction_coefs",
    "stream_scale": "altup.correct_output_scale",
    "laurel_down": "laurel.linear_left",
    "laurel_up": "laurel.linear_right",
    "laurel_norm": "laurel.post_laurel_norm",
    "layer_scale": "layer_scalar",
    "router": "mlp.gate",
    "choice_bias": "mlp.gate.e_score_correction_bias",
    "expert_gate": "mlp.experts.{expert}.gate_proj",
    "expert_up": "mlp.experts.{expert}.up_proj",
    "expert_down": "mlp.experts.{expert}.down_proj",
    "experts_gate_up": "mlp.experts.gate_up_proj",
    "experts_down": "mlp.experts.down_proj",
    "shared_gate": "mlp.shared_expert.gate_proj",
    "shared_up": "mlp.shared_expert.up_proj",
    "shared_down": "mlp.shared_expert.down_proj",
    "shared_router": "mlp.shared_expert_gate",
}
GGUF: Names = {
    "embedding": "token_embd",
    "positions": "position_embd",
    "token_types": "token_types",
    "embedding_norm": "token_embd_norm",
    "per_layer_embedding": "per_layer_token_embd",
    "per_layer_model": "per_layer_model_proj",
    "per_layer_norm": "per_layer_proj_norm",
    "norm": "output_norm",
    "head": "output",
    "mtp_embedding_norm": "nextn.enorm",
    "mtp_hidden_norm": "nextn.hnorm",
    "mtp_in": "nextn.eh_proj",
    "mtp_norm": "nextn.shared_head_norm",
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "query_down": "attn_q_a",
    "query_norm": "attn_q_a_norm",
    "query_up": "attn_q_b",
    "latent_down": "attn_kv_a_mqa",
    "latent_norm": "attn_kv_a_norm",
    "latent_up": "attn_kv_b",
    "latent_keys": "attn_k_b",
    "latent_values": "attn_v_b",
    "out": "attn_output",
    "sinks": "attn_sinks.weight",
    "attention_norm_behind": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_norm_behind": "post_ffw_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "per_layer_gate": "inp_gate",
    "per_layer_out": "proj",
    "per_layer_norm_behind": "post_norm",
    "stream_in": "altup_proj",
    "stream_out": "altup_unembd_proj",
    "stream_router": "altup_router",
    "stream_router_norm": "altup_router_norm",
    "stream_predict": "altup_predict_coef",
    "stream_correct": "altup_correct_coef",
    "stream_scale": "altup_correct_scale.weight",
    "laurel_down": "laurel_l",
    "laurel_up": "laurel_r",
    "laurel_norm": "laurel_post_norm",
    "layer_scale": "layer_output_scale.weight",
    "router": "ffn_gate_inp",
    "router_norm": "ffn_gate_inp.scale",
    "expert_scale": "ffn_down_exps.scale",
    "experts_norm": "pre_ffw_norm_2",
    "experts_norm_behind": "post_ffw_norm_2",
    "beside_norm_behind": "post_ffw_norm_1",
    "choice_bias": "exp_probs_b.bias",
    "experts_gate": "ffn_gate_exps.weight",
    "experts_up": "ffn_up_exps.weight",
    "experts_down": "ffn_down_exps.weight",
    "experts_gate_bias": "ffn_gate_exps.bias",
    "experts_up_bias": "ffn_up_exps.bias",
    "experts_down_bias": "ffn_down_exps.bias",
    "shared_gate": "ffn_gate_shexp",
    "shared_up": "ffn_up_shexp",
    "shared_down": "ffn_down_shexp",
    "shared_router": "ffn_gate_inp_shexp",
}
_FUSED = {
    "qkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
    "shared_gate_up": ("shared_gate", "shared_up"),
    "experts_gate_up": ("expert_gate", "expert_up", "expert_down"),
    "experts_down_transposed": ("expert_gate", "expert_up", "expert_down", "experts_gate_up", "experts_down"),
    "experts_gate_up_transposed": ("expert_gate", "expert_up", "expert_down", "experts_gate_up", "experts_down"),
}


def whole_names(common: Names, own: Names, layers: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of each part, with every prefix that layers may have. `own` names replace common ones; a fused
    tensor replaces its parts, except those that `own` also names."""
    replaced = {part for fused, parts in _FUSED.items() if fused in own for part in parts}
    by_part = {part: name for part, name in {**common, **own}.items() if part not in replaced or part in own}
    return {
        part: [
            alternative if part in _GLOBAL else f"{layer}.{alternative}"
            for alternative in ([name] if isinstance(name, str) else name)
            for layer in (layers if part not in _GLOBAL else layers[:1])
        ]
        for part, name in by_part.items()
    }


def with_flat(names: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Add the names without the model prefix, which embedding models that are saved without their head do not have."""
    return {part: list(dict.fromkeys([*ways, *map(flat, ways)])) for part, ways in names.items()}


def flat(name: str) -> str:
    return name.removeprefix(PREFIX)
