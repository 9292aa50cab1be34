//! What the tensors of a decoder are called, as Python's table says: by part, for checkpoints and for GGUF files.
//!
//! Invariants: nothing is guessed; of several names for a part the first that the file has counts.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The parts of a decoder. Those with a bias have it beside their weight.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// The table of embeddings.
    Embedding,
    /// The table of positions.
    Positions,
    /// The table of kinds of tokens.
    TokenTypes,
    /// The norm of embeddings.
    EmbeddingNorm,
    /// By range of distances and head: added to scores.
    Distances,
    /// The table of embeddings by layer.
    PerLayerEmbedding,
    /// From hidden numbers to numbers by layer.
    PerLayerModel,
    /// The norm of those.
    PerLayerNorm,
    /// From hidden numbers to those of a layer.
    PerLayerGate,
    /// Back to hidden numbers.
    PerLayerOut,
    /// The norm of what comes back.
    PerLayerNormBehind,
    /// To the other streams of hidden numbers, one after the other.
    StreamIn,
    /// And back.
    StreamOut,
    /// To what mixes streams.
    StreamRouter,
    /// The norm of what that reads.
    StreamRouterNorm,
    /// From it to how streams are mixed before a layer.
    StreamPredict,
    /// From it to how far each stream follows what a layer gives.
    StreamCorrect,
    /// What the first stream is multiplied by where the layer's own numbers are made.
    StreamScale,
    /// The residual of low rank.
    LaurelDown,
    /// As above.
    LaurelUp,
    /// Its norm.
    LaurelNorm,
    /// What a layer gives is multiplied by it.
    LayerScale,
    /// The last norm.
    Norm,
    /// From hidden numbers to logits.
    Head,
    /// The norm before attention.
    AttentionNorm,
    /// The norm of what attention gives.
    AttentionNormBehind,
    /// To queries.
    Q,
    /// To keys.
    K,
    /// To values.
    V,
    /// All three in one tensor.
    Qkv,
    /// The norm of queries.
    QNorm,
    /// The norm of keys.
    KNorm,
    /// To the latent of queries.
    QueryDown,
    /// The norm of it.
    QueryNorm,
    /// From it to queries.
    QueryUp,
    /// To the latent of keys and values, and the part of all keys that is rotated.
    LatentDown,
    /// The norm of the latent.
    LatentNorm,
    /// From it to the keys and the values of each head.
    LatentUp,
    /// From a head's queries to what is multiplied with latents, in one tensor for all heads.
    LatentKeys,
    /// From latents to a head's values, in one tensor for all heads.
    LatentValues,
    /// Out of attention.
    Out,
    /// Into what keeps a state.
    MixIn,
    /// The convolution of it.
    Convolution,
    /// Out of it.
    MixOut,
    /// The norm of what goes out.
    MixNorm,
    /// How fast the state of each head fades.
    Fading,
    /// What is added to each head's step.
    StepBias,
    /// Into a delta net's gate of what goes out.
    MixGate,
    /// Into how much each head learns.
    MixRate,
    /// Into each head's step.
    MixStep,
    /// Queries, keys, values and that gate in one tensor, by head of keys.
    MixAll,
    /// Both numbers of each head, likewise.
    MixRates,
    /// How much of each head goes past its state.
    Past,
    /// By query head: a score beside those of keys.
    Sinks,
    /// The norm before the MLP.
    MlpNorm,
    /// The norm of what the MLP gives.
    MlpNormBehind,
    /// What goes through the activation.
    Gate,
    /// What is multiplied with it, or goes through the activation itself.
    Up,
    /// Both in one tensor.
    GateUp,
    /// Out of the MLP.
    Down,
    /// The router of a mixture of experts.
    Router,
    /// The norm of what the router reads.
    RouterNorm,
    /// What the weights of experts are multiplied by.
    ExpertScale,
    /// The norm before experts that stand beside a dense MLP.
    ExpertsNorm,
    /// The norm of what they give.
    ExpertsNormBehind,
    /// The norm of what the MLP beside them gives.
    BesideNormBehind,
    /// What its scores are added to for the choice of experts.
    ChoiceBias,
    /// As of an MLP, of an expert that has tensors of its own.
    ExpertGate,
    /// As above.
    ExpertUp,
    /// As above.
    ExpertDown,
    /// As of an MLP, of all experts in one tensor.
    ExpertsGate,
    /// As above.
    ExpertsUp,
    /// As above.
    ExpertsGateUp,
    /// As above.
    ExpertsDown,
    /// As above, with rows of inputs.
    ExpertsGateUpTransposed,
    /// As above.
    ExpertsDownTransposed,
    /// Biases of all experts.
    ExpertsGateBias,
    /// As above.
    ExpertsUpBias,
    /// As above.
    ExpertsGateUpBias,
    /// As above.
    ExpertsDownBias,
    /// A bias of what all experts of a token give together.
    ExpertsSumBias,
    /// As of an MLP, of the expert that every token goes through.
    SharedGate,
    /// As above.
    SharedUp,
    /// As above.
    SharedGateUp,
    /// As above.
    SharedDown,
    /// Its weight.
    SharedRouter,
}

impl Part {
    /// Whether it is a matrix of a layer that numbers of tokens are multiplied with.
    pub fn is_linear(self) -> bool {
        use Part::{Down, Gate, GateUp, K, Out, Q, Qkv, Up, V};
        matches!(self, Q | K | V | Qkv | Out | Gate | Up | GateUp | Down)
    }

    /// Whether the table has the whole name, without `.weight` to be added.
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

/// The names of one kind of files.
pub type Table = BTreeMap<Part, Vec<String>>;

/// What all kinds of files call the parts.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Names {
    /// Checkpoints of transformers.
    pub checkpoint: Files,
    /// GGUF files.
    pub gguf: Files,
}

/// One kind of files.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Files {
    /// Names by part.
    pub names: Table,
    /// Rows of queries and keys have the two halves of what is rotated in turns.
    pub interleaved: bool,
    /// Rows of experts' gates and ups come in turns, where one tensor has both.
    pub gate_up_in_turns: bool,
    /// Rows of a tensor of queries, keys and values are by KV head: its queries, its key, its value.
    pub grouped: bool,
    /// Heads of values that share one of keys are not neighbours: those of all heads of keys come in turns.
    pub tiled: bool,
    /// Matrices of layers are [inputs, outputs].
    pub transposed: bool,
    /// How the names of tensors end that are no weights.
    pub buffers: Vec<String>,
}

/// The numbers that a name may have in it.
#[derive(Clone, Copy, Debug, Default)]
pub struct At {
    /// `{layer}`
    pub layer: usize,
    /// `{expert}`
    pub expert: usize,
    /// `{head}`
    pub head: usize,
}

impl Files {
    /// The names that a part may have; `what` is weight or bias.
    pub fn candidates(&self, part: Part, at: At, what: &str) -> impl Iterator<Item = String> {
        let names = self.names.get(&part).into_iter().flatten();
        names.map(move |name| {
            let name = name
                .replace("{layer}", &at.layer.to_string())
                .replace("{expert}", &at.expert.to_string())
                .replace("{head}", &at.head.to_string());
            match name.strip_suffix('.') {
                Some(whole) => whole.to_owned(),
                None if part.is_whole() => name,
                None => format!("{name}.{what}"),
            }
        })
    }

    /// Whether files of this kind have such a part at all.
    pub fn knows(&self, part: Part) -> bool {
        self.names.contains_key(&part)
    }

    /// Whether each head has a tensor of its own.
    pub fn by_head(&self, part: Part) -> bool {
        let mut names = self.names.get(&part).into_iter().flatten();
        names.any(|name| name.contains("{head}"))
    }
}
