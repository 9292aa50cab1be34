//! Tensor names of a model by part, for checkpoints and for GGUF files, as Python's table lists them.
//!
//! Invariants: names are never guessed; of several names for a part the first that the file has is used.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Part of a decoder that has a tensor. A bias is stored next to its weight.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Token embedding.
    Embedding,
    /// Learned position embedding.
    Positions,
    /// Token type embedding.
    TokenTypes,
    /// Projection of a vision tower's patches.
    Patches,
    /// Norm of a vision tower's merger.
    MergerNorm,
    /// First matrix of a merger.
    MergerUp,
    /// Second matrix of a merger.
    MergerDown,
    /// Norm of a merger after a layer (DeepStack).
    DeepMergerNorm,
    /// First matrix of such a merger.
    DeepMergerUp,
    /// Second matrix of such a merger.
    DeepMergerDown,
    /// Norm of embeddings.
    EmbeddingNorm,
    /// Relative position bias, by bucket and head.
    Distances,
    /// Per-layer embedding of token ids.
    PerLayerEmbedding,
    /// Projection of embeddings to per-layer embeddings.
    PerLayerModel,
    /// Norm of the projection to per-layer embeddings.
    PerLayerNorm,
    /// Gate projection of per-layer embeddings.
    PerLayerGate,
    /// Output projection of per-layer embeddings.
    PerLayerOut,
    /// Norm after that output projection.
    PerLayerNormBehind,
    /// Projection of the first stream to each other stream.
    StreamIn,
    /// Projection of each other stream back to the first.
    StreamOut,
    /// Router that computes how streams are mixed.
    StreamRouter,
    /// Norm of the stream router's input.
    StreamRouterNorm,
    /// Map from router outputs to the mixing matrix before a layer.
    StreamPredict,
    /// Map from router outputs to the correction of each stream after a layer.
    StreamCorrect,
    /// Scale of the first stream as input of the per-layer gate.
    StreamScale,
    /// Down projection of the low-rank residual (Laurel).
    LaurelDown,
    /// Up projection of the low-rank residual (Laurel).
    LaurelUp,
    /// Norm of the low-rank residual (Laurel).
    LaurelNorm,
    /// Scale of a layer's output.
    LayerScale,
    /// Final norm, before the LM head.
    Norm,
    /// LM head: hidden states to logits.
    Head,
    /// Norm of the next token's embedding (MTP).
    MtpEmbeddingNorm,
    /// Norm of the model's hidden states (MTP).
    MtpHiddenNorm,
    /// Projection of both, side by side, to the hidden states of the MTP layer.
    MtpIn,
    /// Norm of the MTP layer's output, before the LM head.
    MtpNorm,
    /// Norm before attention.
    AttentionNorm,
    /// Norm after attention.
    AttentionNormBehind,
    /// Query projection.
    Q,
    /// Key projection.
    K,
    /// Value projection.
    V,
    /// Query, key and value projection in one tensor.
    Qkv,
    /// Norm of queries.
    QNorm,
    /// Norm of keys.
    KNorm,
    /// Down projection to the query latent (MLA).
    QueryDown,
    /// Norm of the query latent.
    QueryNorm,
    /// Up projection from the query latent.
    QueryUp,
    /// Down projection to the KV latent and the RoPE part of keys (MLA).
    LatentDown,
    /// Norm of the KV latent.
    LatentNorm,
    /// Up projection from the KV latent to keys and values of each head.
    LatentUp,
    /// Map from queries to the KV latent space, one tensor for all heads.
    LatentKeys,
    /// Map from the KV latent to values, one tensor for all heads.
    LatentValues,
    /// Output projection of attention.
    Out,
    /// Input projection of a recurrent layer.
    MixIn,
    /// Convolution of a recurrent layer.
    Convolution,
    /// Output projection of a recurrent layer.
    MixOut,
    /// Norm of a recurrent layer's output.
    MixNorm,
    /// Decay rate of each head's state.
    Fading,
    /// Bias of each head's step size.
    StepBias,
    /// Output gate projection of a delta net.
    MixGate,
    /// Projection to the learning rate (beta) of each head.
    MixRate,
    /// Projection to the step size of each head.
    MixStep,
    /// Queries, keys, values and gate of a delta net in one tensor, rows by key head.
    MixAll,
    /// Beta and step size projections in one tensor, rows by key head.
    MixRates,
    /// Skip weight of each Mamba head (D): the share of the input that bypasses the state.
    Past,
    /// Attention sink of each query head: an extra score in the softmax.
    Sinks,
    /// Norm before the MLP.
    MlpNorm,
    /// Norm after the MLP.
    MlpNormBehind,
    /// Gate projection of an MLP, which the activation applies to.
    Gate,
    /// Up projection of an MLP; without a gate the activation applies to it.
    Up,
    /// Gate and up projection in one tensor.
    GateUp,
    /// Down projection of an MLP.
    Down,
    /// Router of a mixture of experts.
    Router,
    /// Norm of the router's input.
    RouterNorm,
    /// Scale of each expert's weight.
    ExpertScale,
    /// Norm before experts that run alongside a dense MLP.
    ExpertsNorm,
    /// Norm after experts that run alongside a dense MLP.
    ExpertsNormBehind,
    /// Norm after the dense MLP alongside experts.
    BesideNormBehind,
    /// Bias of router scores, used only to choose the experts.
    ChoiceBias,
    /// Gate projection of one expert.
    ExpertGate,
    /// Up projection of one expert.
    ExpertUp,
    /// Down projection of one expert.
    ExpertDown,
    /// Gate projections of all experts in one tensor.
    ExpertsGate,
    /// Up projections of all experts in one tensor.
    ExpertsUp,
    /// Gate and up projections of all experts in one tensor.
    ExpertsGateUp,
    /// Down projections of all experts in one tensor.
    ExpertsDown,
    /// Gate and up projections of all experts, stored as [inputs, outputs].
    ExpertsGateUpTransposed,
    /// Down projections of all experts, stored as [inputs, outputs].
    ExpertsDownTransposed,
    /// Gate biases of all experts.
    ExpertsGateBias,
    /// Up biases of all experts.
    ExpertsUpBias,
    /// Gate and up biases of all experts in one tensor.
    ExpertsGateUpBias,
    /// Down biases of all experts.
    ExpertsDownBias,
    /// Bias of the sum of a token's experts.
    ExpertsSumBias,
    /// Gate projection of the shared expert, which every token goes through.
    SharedGate,
    /// Up projection of the shared expert.
    SharedUp,
    /// Gate and up projection of the shared expert in one tensor.
    SharedGateUp,
    /// Down projection of the shared expert.
    SharedDown,
    /// Gate of the shared expert's output.
    SharedRouter,
}

impl Part {
    /// Returns true for a weight matrix of attention or a dense MLP.
    pub fn is_linear(self) -> bool {
        use Part::{Down, Gate, GateUp, K, Out, Q, Qkv, Up, V};
        matches!(self, Q | K | V | Qkv | Out | Gate | Up | GateUp | Down)
    }

    /// Returns true if the name table has the full tensor name, to which no `.weight` is appended.
    fn is_whole(self) -> bool {
        matches!(
            self,
            Self::Sinks
                | Self::Fading
                | Self::Past
                | Self::StepBias
                | Self::ChoiceBias
                | Self::ExpertsGate
                | Self::ExpertsUp
                | Self::ExpertsGateUp
                | Self::ExpertsDown
                | Self::ExpertsGateUpTransposed
                | Self::ExpertsDownTransposed
                | Self::ExpertsGateBias
                | Self::ExpertsUpBias
                | Self::ExpertsGateUpBias
                | Self::ExpertsDownBias
                | Self::ExpertsSumBias
                | Self::RouterNorm
                | Self::ExpertScale
                | Self::LayerScale
                | Self::StreamScale
        )
    }
}

/// Tensor names by part for one file format, in order of preference.
pub type Table = BTreeMap<Part, Vec<String>>;

/// Tensor names and layouts for all file formats.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Names {
    /// Names and layouts in checkpoints of transformers.
    pub checkpoint: Files,
    /// Names and layouts in GGUF files.
    pub gguf: Files,
}

/// Tensor names and layouts of one file format.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Files {
    /// Tensor names by part.
    pub names: Table,
    /// True if rows of queries and keys interleave the two halves of RoPE pairs.
    pub interleaved: bool,
    /// True if a fused gate/up tensor of experts interleaves their rows.
    pub gate_up_in_turns: bool,
    /// True if a fused QKV tensor is grouped by KV head: its queries, its key, its value.
    pub grouped: bool,
    /// True if value head i of a delta net uses key head i % key_heads; else consecutive value heads share one.
    pub tiled: bool,
    /// True if matrices of layers are stored as [inputs, outputs].
    pub transposed: bool,
    /// Name endings of tensors that are not weights.
    pub buffers: Vec<String>,
}

/// Indices that replace placeholders in a tensor name.
#[derive(Clone, Copy, Debug, Default)]
pub struct At {
    /// Layer index, for `{layer}`.
    pub layer: usize,
    /// Expert index, for `{expert}`.
    pub expert: usize,
    /// Head index, for `{head}`.
    pub head: usize,
    /// Layer of a vision tower whose output a merger reads, for `{tap}`.
    pub tap: usize,
}

impl Files {
    /// Returns the possible names of a part's tensor, preferred first; `what` is "weight" or "bias".
    pub fn candidates(&self, part: Part, at: At, what: &str) -> impl Iterator<Item = String> {
        let names = self.names.get(&part).into_iter().flatten();
        names.map(move |name| {
            let name = name
                .replace("{layer}", &at.layer.to_string())
                .replace("{expert}", &at.expert.to_string())
                .replace("{head}", &at.head.to_string())
                .replace("{tap}", &at.tap.to_string());
            match name.strip_suffix('.') {
                Some(whole) => whole.to_owned(),
                None if part.is_whole() => name,
                None => format!("{name}.{what}"),
            }
        })
    }

    /// Returns true if files of this format may have the part.
    pub fn knows(&self, part: Part) -> bool {
        self.names.contains_key(&part)
    }

    /// Returns true if each head of the part has its own tensor.
    pub fn by_head(&self, part: Part) -> bool {
        let mut names = self.names.get(&part).into_iter().flatten();
        names.any(|name| name.contains("{head}"))
    }
}
