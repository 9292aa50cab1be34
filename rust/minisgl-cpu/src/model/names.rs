//! What the tensors of a decoder are called, in checkpoints and in GGUF files.
//!
//! Invariants: one name for each part and layer; nothing is guessed.

/// Whose names a file uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// Checkpoints of transformers.
    Checkpoint,
    /// GGUF. `rotated`: rows of queries and keys have the two halves of each head interleaved (llama.cpp does so to
    /// the architectures `llama` and `smollm3`).
    Gguf {
        /// See above.
        rotated: bool,
    },
}

/// Parts that exist once.
#[derive(Clone, Copy, Debug)]
pub enum Global {
    /// The table of embeddings.
    Embedding,
    /// The last norm.
    Norm,
    /// From hidden numbers to logits.
    Head,
}

/// Parts of a layer. Those with a bias have it beside their weight.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    /// input_layernorm.
    AttentionNorm,
    /// q_proj.
    Q,
    /// k_proj.
    K,
    /// v_proj.
    V,
    /// q_norm, of each head.
    QNorm,
    /// k_norm, of each head.
    KNorm,
    /// o_proj.
    Out,
    /// post_attention_layernorm: the norm before the MLP.
    MlpNorm,
    /// pre_feedforward_layernorm: the norm before the MLP of models with four norms a layer.
    MlpNormOfFour,
    /// post_attention_layernorm of models with four norms a layer: the norm of what attention gives.
    AttentionNormBehind,
    /// post_feedforward_layernorm: the norm of what the MLP gives.
    MlpNormBehind,
    /// gate_proj.
    Gate,
    /// up_proj.
    Up,
    /// down_proj.
    Down,
    /// The router of a mixture of experts.
    Router,
}

impl Naming {
    /// The full name of a global part's weight.
    pub fn global(self, part: Global) -> &'static str {
        match (self, part) {
            (Self::Checkpoint, Global::Embedding) => "model.embed_tokens.weight",
            (Self::Checkpoint, Global::Norm) => "model.norm.weight",
            (Self::Checkpoint, Global::Head) => "lm_head.weight",
            (Self::Gguf { .. }, Global::Embedding) => "token_embd.weight",
            (Self::Gguf { .. }, Global::Norm) => "output_norm.weight",
            (Self::Gguf { .. }, Global::Head) => "output.weight",
        }
    }

    /// The full name of a layer's part; `what` is weight or bias.
    pub fn layer(self, layer: usize, part: Part, what: &str) -> String {
        match self {
            Self::Checkpoint => format!("model.layers.{layer}.{}.{what}", checkpoint(part)),
            Self::Gguf { .. } => format!("blk.{layer}.{}.{what}", gguf(part)),
        }
    }

    /// One expert's weight in a checkpoint of its own tensors.
    pub fn expert(self, layer: usize, expert: usize, part: Part) -> String {
        let own = checkpoint(part).trim_start_matches("mlp.");
        format!("model.layers.{layer}.mlp.experts.{expert}.{own}.weight")
    }

    /// All experts' weights in one tensor, [experts, rows, columns].
    pub fn experts(self, layer: usize, part: Part) -> String {
        match self {
            Self::Checkpoint => {
                let own = if matches!(part, Part::Down) {
                    "down_proj"
                } else {
                    "gate_up_proj"
                };
                format!("model.layers.{layer}.mlp.experts.{own}")
            }
            Self::Gguf { .. } => format!("blk.{layer}.{}_exps.weight", gguf(part)),
        }
    }
}

fn checkpoint(part: Part) -> &'static str {
    match part {
        Part::AttentionNorm => "input_layernorm",
        Part::Q => "self_attn.q_proj",
        Part::K => "self_attn.k_proj",
        Part::V => "self_attn.v_proj",
        Part::QNorm => "self_attn.q_norm",
        Part::KNorm => "self_attn.k_norm",
        Part::Out => "self_attn.o_proj",
        Part::MlpNorm | Part::AttentionNormBehind => "post_attention_layernorm",
        Part::MlpNormOfFour => "pre_feedforward_layernorm",
        Part::MlpNormBehind => "post_feedforward_layernorm",
        Part::Gate => "mlp.gate_proj",
        Part::Up => "mlp.up_proj",
        Part::Down => "mlp.down_proj",
        Part::Router => "mlp.gate",
    }
}

fn gguf(part: Part) -> &'static str {
    match part {
        Part::AttentionNorm => "attn_norm",
        Part::Q => "attn_q",
        Part::K => "attn_k",
        Part::V => "attn_v",
        Part::QNorm => "attn_q_norm",
        Part::KNorm => "attn_k_norm",
        Part::Out => "attn_output",
        Part::MlpNorm | Part::MlpNormOfFour => "ffn_norm",
        Part::AttentionNormBehind => "post_attention_norm",
        Part::MlpNormBehind => "post_ffw_norm",
        Part::Gate => "ffn_gate",
        Part::Up => "ffn_up",
        Part::Down => "ffn_down",
        Part::Router => "ffn_gate_inp",
    }
}
