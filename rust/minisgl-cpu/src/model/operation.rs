//! The forward pass as data: a model's list of operations, with the weights that they use.
//!
//! `layers/` builds the list, `forward.rs` runs it, `printed.rs` prints it (`minisgl model FILE --operations`).
//!
//! Invariants: an operation makes no decision that was possible at load time, such as whether it exists, and its sizes.

use std::sync::Arc;

use minisgl_kernels::convolution::Convolution;
use minisgl_kernels::mamba::Way;
use minisgl_kernels::panels::Matrix;

use crate::model::adapter::Site;
use crate::model::config::{self, Activation, Mamba2, MoeConfig, QueryGrowth};
use crate::model::delta::Delta;
use crate::model::held::{Linear, Norm};

/// Buffer with a row for each token of a step, as input or output of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Hidden states (the first stream, if there are several).
    Hidden,
    /// Queries, keys and values, or the input projection of a recurrent layer.
    Projected,
    /// Output of attention or of a recurrent layer, before the output projection.
    Attended,
    /// Queries computed from their own latent (MLA).
    Queries,
    /// Queries mapped to the KV latent space (MLA).
    Fitted,
    /// Attention output as latents (MLA).
    Latents,
    /// Activations of an MLP between up and down projection.
    Inner,
    /// Output that is changed before it is added to the hidden states, or added later.
    Aside,
    /// Per-layer embeddings of all layers.
    PerLayer,
    /// Hidden states of a stream after the first, by index from 0.
    Stream(usize),
    /// Low-rank residual alongside attention (Laurel).
    Beside,
}

/// Operation of the forward pass. All threads share its work, and all have finished when the next one begins.
pub enum Operation {
    /// Embedding lookup, and RoPE angles of positions.
    Embed(Embed),
    /// Pixel values, learned positions and RoPE angles of an image's patches.
    Patches(PatchEmbed),
    /// Copy of the hidden states to a buffer of their own, by its index.
    Tap(usize),
    /// Addition of image features (DeepStack), by the index of the layer that they follow.
    AddFeatures(usize),
    /// Matmul with one or more weight matrices.
    Project(Project),
    /// Steps on each token's projected row, all in one pass.
    EachToken(Vec<TokenStep>),
    /// Matmul with a separate matrix for each head.
    PerHead(PerHead),
    /// Attention over the KV cache.
    Attend(Attend),
    /// Gate of attention's output: multiplies by sigmoids of the first n projected columns.
    Gate(usize),
    /// Short convolution between two gates.
    Convolve(Convolve),
    /// Gated delta net, between its projections.
    Delta(Delta),
    /// Mamba-2 layer, between its projections.
    Mamba(Mamba),
    /// Gate/up projection and activation of an MLP.
    GateUp(GateUp),
    /// Choice of experts for each token.
    Route(Route),
    /// Gate/up and down projection of the chosen experts.
    Experts(Experts),
    /// Weighted sum of each token's experts.
    Combine(Combine),
    /// Addition of the side buffer to the hidden states.
    Add(Add),
    /// Norm of the hidden states, in place.
    Norm(Norm),
    /// Computation of the per-layer embeddings of all layers.
    SumPerLayer(SumPerLayer),
    /// Gate of a per-layer embedding: activation, elements per layer, first column of the layer.
    GatePerLayer(Activation, usize, usize),
    /// Norm of the side buffer and its addition to all streams but the first.
    AddToStreams(Norm),
    /// Scaling of all streams to the RMS of the first.
    ScaleStreams,
    /// Prediction of each stream from all streams.
    Predict(Arc<Mixing>),
    /// Norm of the low-rank residual, to which attention's input is added.
    Laurel {
        /// Norm of attention's input.
        before: Option<Arc<Norm>>,
        /// Norm of the low-rank matmul's output.
        norm: Norm,
    },
    /// Merge of the hidden states and the low-rank residual.
    AddLaurel,
    /// Correction of all streams by the layer's change of the first.
    Correct(Arc<Mixing>),
    /// Scaling of a stream to the RMS of the first, and its addition to the sum: stream index, stream count.
    SumStreams(usize, usize),
    /// Input of the MTP layer: norms of the next token's embedding and of the last layer's normalized hidden states.
    JoinNext(Norm, Norm),
    /// Check that all hidden states are finite.
    Check,
}

/// Weight matrices side by side: (first column of the output, matrix).
pub type Projections = Vec<(usize, Matrix)>;

/// Matmul of some rows with weight matrices side by side.
pub struct Project {
    /// Norm of the matmul's input; `None` reads it unchanged.
    pub norm: Option<Arc<Norm>>,
    /// Input buffer of the matmul.
    pub from: Rows,
    /// Weights: one matrix if all have the same element type, else several.
    pub matrices: Projections,
    /// Bias of all columns, padded to whole panels.
    pub bias: Option<Vec<f32>>,
    /// Output buffer of the matmul.
    pub to: Rows,
    /// True if the result is added to the output, false if it overwrites it.
    pub adds: bool,
    /// True if int8-capable matrices use int8 activations even when others of this matmul need exact ones.
    pub as_held: bool,
    /// Layer and site of LoRA adapters that may apply.
    pub adapted: Option<(usize, Site)>,
}

impl Project {
    /// Creates a matmul without norm, bias and adapters that overwrites its output.
    pub fn new(from: Rows, matrices: Projections, to: Rows) -> Self {
        Self {
            norm: None,
            from,
            matrices,
            bias: None,
            to,
            adds: false,
            as_held: false,
            adapted: None,
        }
    }

    /// Returns the weight matrices of the matmul.
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.matrices.iter().map(|(_, matrix)| matrix)
    }
}

/// Embedding lookup: token embedding, plus learned embeddings of type and position.
pub struct Embed {
    /// Token embedding, [vocabulary, hidden]; `None` uses the LM head.
    pub table: Option<Matrix>,
    /// Scale of token embeddings.
    pub scale: f32,
    /// Token type embedding, [types, hidden].
    pub token_types: Option<Matrix>,
    /// Position embedding, [positions, hidden].
    pub positions: Option<Matrix>,
    /// Row of position 0 in `positions`.
    pub first_position: usize,
    /// Norm of the embedding sums.
    pub norm: Option<Norm>,
    /// RoPE tables of the model.
    pub angles: Angles,
}

/// RoPE tables of a model.
pub struct Angles {
    /// Radians per position, and the scale of cosines and sines.
    pub tables: Vec<(Vec<f32>, f32)>,
    /// Axis (time, row, column) whose position counts for each pair; empty if a token has one position.
    pub axes: Vec<usize>,
}

/// Input of a vision tower. The matmul of the pixel values follows.
pub struct PatchEmbed {
    /// Sizes of patches, and their order.
    pub patches: config::Patches,
    /// Learned positions, [side, side, hidden], resampled to the grid of each image.
    pub positions: Vec<f32>,
    /// RoPE tables of the tower.
    pub angles: Angles,
}

/// Adjacent heads in a token's projected row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Column of the first head.
    pub at: usize,
    /// Number of adjacent heads.
    pub count: usize,
    /// Elements per head.
    pub size: usize,
}

/// Step on a token's projected row.
pub enum TokenStep {
    /// Copy of heads to a column, for values that equal the unnormalized keys.
    Copy(Heads, usize),
    /// Norm of each head; the weights of adjacent heads are this many elements apart.
    Norm(Norm, Heads, usize),
    /// RoPE on each head.
    Rotate(Heads, Rotation),
    /// Multiplication of heads by a factor.
    Scale(Heads, f32),
    /// Scaling of queries by their position.
    Grow(Heads, QueryGrowth),
    /// Write of keys and values to the KV cache.
    Store {
        /// Layer index in the KV pool.
        layer: usize,
        /// Column of the keys.
        keys: usize,
        /// Column of the values.
        values: usize,
    },
}

/// RoPE table of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// Column of the cosines in the angles buffer. The sines follow.
    pub at: usize,
    /// Number of rotated pairs.
    pub half: usize,
}

/// Matmul with a separate matrix for each head.
pub struct PerHead {
    /// Matrix of each head.
    pub matrices: Vec<Matrix>,
    /// Input, and the columns from one head to the next.
    pub from: (Rows, usize),
    /// Output, and the columns from one head to the next.
    pub to: (Rows, usize),
    /// Number of columns after the matmul's input that are copied after its output, and the RoPE applied to them.
    pub beside: (usize, Option<Rotation>),
}

/// Attention of one layer.
pub struct Attend {
    /// Index of the attention layer.
    pub layer: usize,
    /// Layer whose keys and values are used, and its index in the KV pool.
    pub kv_of: (usize, usize),
    /// Buffer and first column of the queries.
    pub queries: (Rows, usize),
    /// Output buffer of attention.
    pub to: Rows,
    /// Query heads, KV heads, elements per head.
    pub heads: [usize; 3],
    /// Sliding window in tokens; `None` attends to all preceding tokens.
    pub window: Option<usize>,
    /// Attention sink of each query head: an extra score without a value, as a logarithm to base 2.
    pub sinks: Option<Vec<f32>>,
}

/// Short convolution between two gates. The projected columns are input gate, output gate, input.
pub struct Convolve {
    /// Layer index, which selects the state.
    pub layer: usize,
    /// Convolution of the gated input.
    pub convolution: Convolution,
    /// Number of channels of the convolution.
    pub size: usize,
}

/// Mamba-2. The projected columns are the gate z; x, B and C, which are convolved; and a step size for each head.
pub struct Mamba {
    /// Layer index, which selects the state.
    pub layer: usize,
    /// Sizes and factors of the Mamba layer.
    pub sizes: Mamba2,
    /// Convolution of x, B and C.
    pub convolution: Convolution,
    /// Decay rate of each head, below 0.
    pub decay_rates: Vec<f32>,
    /// Skip weight of each head (D).
    pub skip: Vec<f32>,
    /// Bias of each head's step size.
    pub step_bias: Vec<f32>,
    /// Weight of the output norm; empty if there is none.
    pub norm: Vec<f32>,
    /// Epsilon of the output norm.
    pub eps: f32,
}

impl Mamba {
    /// Returns the gate and norm of the layer's output.
    pub fn gated_norm(&self) -> Way<'_> {
        Way {
            gating: self.sizes.gating,
            weight: &self.norm,
            group: self.sizes.inner() / self.sizes.groups,
            eps: self.eps,
            gate_scale: self.sizes.factors[0],
            out_scale: self.sizes.out_scale,
        }
    }
}

/// Gate/up projection and activation: activation(gate(x)) * up(x), or activation(up(x)).
pub struct GateUp {
    /// Norm of the MLP's input; `None` reads it unchanged.
    pub norm: Option<Arc<Norm>>,
    /// Weights of gate and up, and the activation.
    pub halves: Halves,
    /// Layer of LoRA adapters that may apply.
    pub adapted: Option<usize>,
}

/// Gate and up projection of an MLP.
pub struct Halves {
    /// Gate and up, interleaved by panel, and their bias; gate only if element types differ; up only without a gate.
    pub gate_up: Linear,
    /// Up projection, if it is not in `gate_up`.
    pub up: Option<Matrix>,
    /// Intermediate size of the MLP, in elements.
    pub inner: usize,
    /// Activation function of the MLP.
    pub activation: Activation,
    /// True if the MLP has a gate.
    pub gated: bool,
    /// Sparsity threshold of gates, in standard deviations above the token's mean. `None` keeps all gates.
    pub cut: Option<f32>,
}

/// Weights of an MLP or an expert.
pub struct Mlp {
    /// Gate and up projection with the activation.
    pub halves: Halves,
    /// Down projection of the MLP.
    pub down: Linear,
}

/// Choice of each token's experts.
pub struct Route {
    /// Norm of the router's input.
    pub norm: Option<Arc<Norm>>,
    /// Router, [experts, hidden], plus a row for the gate of the shared expert if it has one.
    pub router: Matrix,
    /// Router bias, [experts].
    pub bias: Option<Vec<f32>>,
    /// Bias of the scores, used only to choose the experts.
    pub choice_bias: Option<Vec<f32>>,
    /// Scale of each expert's weight.
    pub scales: Option<Vec<f32>>,
    /// Rules by which experts are chosen.
    pub by: Arc<MoeConfig>,
}

/// Gate/up and down projection of the chosen experts.
pub struct Experts {
    /// Norm of the experts' input.
    pub norm: Option<Arc<Norm>>,
    /// All experts of the layer, by index.
    pub experts: Vec<Mlp>,
    /// Number of experts that each token goes through.
    pub per_token: usize,
    /// True if weights multiply the experts' input, not their output.
    pub weighs_input: bool,
}

/// Weighted sum of each token's experts, added to the hidden states.
pub struct Combine {
    /// Number of experts that each token goes through.
    pub per_token: usize,
    /// True if weights were applied to the experts' input.
    pub weighs_input: bool,
    /// Bias of the sum, [hidden].
    pub sum_bias: Option<Vec<f32>>,
    /// `Some` if the side buffer is added, too, with a gate from this router column if there is one.
    pub aside: Option<Option<usize>>,
    /// Norms of the sum and of the side buffer, if a dense MLP runs alongside the experts.
    pub norms: Option<Box<(Norm, Norm)>>,
    /// True if the norm applies to hidden states plus sum, not to the sum.
    pub over: bool,
    /// Norm and scales of the addition.
    pub add: Add,
}

/// Addition to the hidden states.
pub struct Add {
    /// Norm of the value that is added; `None` adds it unchanged.
    pub norm: Option<Norm>,
    /// Factor of the value that is added.
    pub scale: f32,
    /// Factor of the hidden states after the addition.
    pub last: f32,
}

/// Weights that compute the per-layer embeddings of all layers.
pub struct SumPerLayer {
    /// Embedding of token ids, [vocabulary, layers * size].
    pub embedding: Matrix,
    /// Norm of each layer's part of the projection.
    pub norm: Norm,
    /// Elements of a per-layer embedding, per layer.
    pub size: usize,
    /// Number of layers.
    pub layers: usize,
}

/// Weights that mix the streams of a layer (AltUp).
pub struct Mixing {
    /// Norm of the router's input.
    pub norm: Norm,
    /// Router, [streams, hidden].
    pub router: Vec<f32>,
    /// Prediction weights, [streams * streams, streams].
    pub predict: Vec<f32>,
    /// Correction weights, [streams, streams].
    pub correct: Vec<f32>,
    /// Scale of the first stream as per-layer input, [hidden].
    pub scale: Vec<f32>,
}

impl Halves {
    /// Returns the weight matrices of gate and up.
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        [&self.gate_up.weight].into_iter().chain(&self.up)
    }

    /// Returns the number of panels of gate and up.
    pub fn panels(&self) -> usize {
        self.matrices().map(Matrix::panels).sum()
    }
}

impl Mlp {
    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.halves.matrices().chain([&self.down.weight])
    }
}

/// Fraction of a matrix's bytes that one token reads, as (numerator, denominator).
type Share = (usize, usize);
const WHOLE: Share = (1, 1);
/// Share of a table of which a token reads a single row, counted as nothing.
const ROW: Share = (0, 1);

fn whole<'a>(matrices: impl Iterator<Item = &'a Matrix>) -> Vec<(&'a Matrix, Share)> {
    matrices.map(|one| (one, WHOLE)).collect()
}

impl Operation {
    /// Returns the matrices, each with the fraction that one token reads.
    pub fn matrices(&self) -> Vec<(&Matrix, Share)> {
        match self {
            Self::Embed(embed) => {
                let tables = embed.table.iter().chain(&embed.positions).chain(&embed.token_types);
                tables.map(|table| (table, ROW)).collect()
            }
            Self::SumPerLayer(sum) => vec![(&sum.embedding, ROW)],
            Self::Project(project) => whole(project.matrices()),
            Self::PerHead(heads) => whole(heads.matrices.iter()),
            Self::GateUp(mlp) => whole(mlp.halves.matrices()),
            Self::Route(route) => vec![(&route.router, WHOLE)],
            Self::Experts(all) => {
                let share = (all.per_token, all.experts.len());
                all.experts
                    .iter()
                    .flat_map(Mlp::matrices)
                    .map(|matrix| (matrix, share))
                    .collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns the index in `PARTS` of the part that its time counts for.
    pub fn part(&self) -> usize {
        match self {
            Self::Route(_) => 0,
            Self::Project(Project {
                to: Rows::Projected | Rows::Queries,
                ..
            }) => 1,
            Self::EachToken(_) => 2,
            Self::PerHead(_)
            | Self::Attend(_)
            | Self::Gate(_)
            | Self::Convolve(_)
            | Self::Delta(_)
            | Self::Mamba(_) => 3,
            Self::Project(Project {
                from: Rows::Attended, ..
            })
            | Self::Laurel { .. }
            | Self::AddLaurel => 4,
            Self::Project(Project { to: Rows::Inner, .. }) | Self::GateUp(_) => 5,
            Self::Project(Project { from: Rows::Inner, .. })
            | Self::GatePerLayer(..)
            | Self::Experts(_)
            | Self::Combine(_)
            | Self::Add(_)
            | Self::Norm(_) => 6,
            _ => 7,
        }
    }
}
