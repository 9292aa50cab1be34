//! The numbers of a model, as Python read them from its config.json.
//!
//! Invariants: a `ModelConfig` that `check` let pass has no size that could overflow or divide by zero later.

use serde::Deserialize;

use crate::error::{Error, Result};

/// Sizes beyond these are no model of today, but a damaged file.
const MAX_SIZE: usize = 1 << 24;
const MAX_LAYERS: usize = 4096;
const MAX_HEAD_DIM: usize = 256;

/// One decoder for all architectures: what differs between them is in here.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Numbers of a token between layers.
    pub hidden_size: usize,
    /// Layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Heads of keys and values; each serves `num_heads / num_kv_heads` query heads.
    pub num_kv_heads: usize,
    /// Numbers of a head.
    pub head_dim: usize,
    /// Numbers between the two halves of a dense MLP.
    pub intermediate_size: usize,
    /// Ids.
    pub vocab_size: usize,
    /// Added to the mean square under the root.
    pub rms_norm_eps: f32,
    /// Tables of [head_dim / 2] radians per position, of which layers choose one.
    pub inverse_frequencies: Vec<Vec<f32>>,
    /// Cosine and sine are multiplied by it (YaRN).
    pub rope_scale: f32,
    /// The head is the table of embeddings.
    pub tie_word_embeddings: bool,
    /// Biases of the projections to queries, keys and values.
    pub qkv_bias: bool,
    /// A bias of attention's way out.
    pub out_bias: bool,
    /// Biases of the MLP.
    pub mlp_bias: bool,
    /// An RMS norm over each head of queries and keys, before rotation.
    pub qk_norm: bool,
    /// By layer: a token attends to as many tokens, itself included; none: to all before it.
    pub windows: Vec<Option<usize>>,
    /// By layer: the table by which queries and keys are rotated; none: they are not.
    pub rotary: Vec<Option<usize>>,
    /// The factor of the products of queries and keys.
    pub attention_scale: f32,
    /// Embeddings are multiplied by it.
    pub embedding_scale: f32,
    /// What attention and the MLP give is normalised, too, before it is added (Gemma).
    pub norms_behind: bool,
    /// Added to the weights of norms as checkpoints have them; GGUF has the sums.
    pub norm_offset: f32,
    /// What the gate of an MLP goes through.
    pub activation: Activation,
    /// Routed experts in place of the MLP of some layers.
    pub moe: Option<MoeConfig>,
}

/// The activation function of an MLP's gate.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// g sigmoid(g).
    Silu,
    /// By its tanh approximation.
    Gelu,
}

/// Routed experts (Qwen3-MoE).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeConfig {
    /// Experts of a layer.
    pub num_experts: usize,
    /// How many of them each token goes through.
    pub experts_per_token: usize,
    /// Numbers between the two halves of an expert.
    pub intermediate_size: usize,
    /// A token's weights are scaled to sum up to 1.
    pub norm_topk_prob: bool,
    /// The layers that have experts.
    pub layers: Vec<usize>,
}

impl ModelConfig {
    /// Raises what cannot be, by the name that config.json gives it.
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("hidden_size", self.hidden_size, MAX_SIZE),
            ("num_hidden_layers", self.num_layers, MAX_LAYERS),
            ("num_attention_heads", self.num_heads, MAX_LAYERS),
            ("num_key_value_heads", self.num_kv_heads, MAX_LAYERS),
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            ("intermediate_size", self.intermediate_size, MAX_SIZE),
            ("vocab_size", self.vocab_size, MAX_SIZE),
        ];
        for (name, value, most) in sizes {
            if value == 0 || value > most {
                return Err(unsupported(name, value, &format!("must be 1..{most}")));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let why = format!("does not divide num_attention_heads {}", self.num_heads);
            return Err(unsupported("num_key_value_heads", self.num_kv_heads, &why));
        }
        let half = self.head_dim / 2;
        let fits = |table: &Vec<f32>| table.len() == half;
        if !self.head_dim.is_multiple_of(2) || !self.inverse_frequencies.iter().all(fits) {
            return Err(unsupported("head_dim", self.head_dim, "must be even"));
        }
        if self.windows.len() != self.num_layers {
            return Err(unsupported("layer_types", self.windows.len(), "one a layer"));
        }
        let tables = self.inverse_frequencies.len();
        let known = |table: &usize| *table < tables;
        if self.rotary.len() != self.num_layers || !self.rotary.iter().flatten().all(known) {
            return Err(unsupported(
                "no_rope_layers",
                self.rotary.len(),
                "one table or none a layer",
            ));
        }
        if self.windows.contains(&Some(0)) {
            return Err(unsupported("sliding_window", 0, "must be at least 1"));
        }
        if self.moe.is_some() && (self.norms_behind || self.activation != Activation::Silu) {
            return Err(unsupported("num_experts", 0, "of this architecture"));
        }
        self.moe.as_ref().map_or(Ok(()), |moe| moe.check())
    }

    /// Whether a layer's MLP is made of experts.
    pub fn experts_of(&self, layer: usize) -> Option<&MoeConfig> {
        self.moe.as_ref().filter(|moe| moe.layers.contains(&layer))
    }
}

impl MoeConfig {
    fn check(&self) -> Result<()> {
        let sizes = [
            ("num_experts", self.num_experts, 4096),
            ("moe_intermediate_size", self.intermediate_size, MAX_SIZE),
            ("num_experts_per_tok", self.experts_per_token, self.num_experts),
        ];
        for (name, value, most) in sizes {
            if value == 0 || value > most {
                return Err(unsupported(name, value, &format!("must be 1..{most}")));
            }
        }
        Ok(())
    }
}

fn unsupported(name: &str, value: usize, why: &str) -> Error {
    Error::unsupported(format!("config.json: {name}: {value}: {why}"))
}
