//! What a forward does, as data: the operations of a model, one after the other, with what they multiply by.
//!
//! `layers/` makes them of a config and a file, `forward.rs` runs them, `printed.rs` prints them as the model's documentation
//! (`minisgl model FILE --operations`).
//!
//! Invariants: an operation asks nothing that was known at load; whether one is there, and its sizes, are decided where
//! the list is made.

use std::sync::Arc;

use minisgl_kernels::convolution::Convolution;
use minisgl_kernels::mamba::Way;
use minisgl_kernels::panels::Matrix;

use crate::model::adapter::Site;
use crate::model::config::{Activation, Mamba2, MoeConfig, QueryGrowth};
use crate::model::delta::Delta;
use crate::model::held::{Linear, Norm};

/// Numbers of all tokens of a step, which operations read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Hidden numbers: of the first stream, where there are several.
    Hidden,
    /// Queries, keys, values; or what else a layer's first products give.
    Projected,
    /// What attention read, or what a layer made of its state.
    Attended,
    /// Queries as they are made of their own latent.
    Queries,
    /// Queries made fit for latents.
    Fitted,
    /// The latents that attention read.
    Latents,
    /// Between the halves of an MLP.
    Inner,
    /// What is changed before it is added to the hidden numbers, or added later.
    Aside,
    /// By layer: what it alone adds.
    PerLayer,
    /// Hidden numbers of a stream behind the first.
    Stream(usize),
    /// What goes beside attention.
    Beside,
}

/// One operation: all threads share its work, and none is still at it when the next one begins.
pub enum Operation {
    /// Embeddings of tokens and the angles of their positions.
    Embed(Embed),
    /// A product.
    Project(Project),
    /// What is done with what a token was projected to, in one go.
    EachToken(Vec<TokenStep>),
    /// A product of each head's own.
    PerHead(PerHead),
    /// Attention.
    Attend(Attend),
    /// What attention read is multiplied by sigmoids of so many of the first numbers that were projected.
    Gate(usize),
    /// A convolution between two gates.
    Convolve(Convolve),
    /// A gated delta net.
    Delta(Delta),
    /// Mamba-2.
    Mamba(Mamba),
    /// The first half of an MLP.
    GateUp(GateUp),
    /// The choice of experts.
    Route(Route),
    /// Each token's experts.
    Experts(Experts),
    /// The sum of a token's experts.
    Combine(Combine),
    /// What lies aside is added to the hidden numbers.
    Add(Add),
    /// The hidden numbers are normalised in place.
    Norm(Norm),
    /// The numbers of each token that layers add.
    SumPerLayer(SumPerLayer),
    /// The numbers that a layer adds go through its gate: of how many, and the first among those of all layers.
    GatePerLayer(Activation, usize, usize),
    /// What lies aside, normalised, is added to all streams but the first.
    AddToStreams(Norm),
    /// Streams become as long as the first one.
    ScaleStreams,
    /// Each stream from all of them.
    Predict(Arc<Mixing>),
    /// What goes beside attention: it is normalised, and what attention reads is added.
    Laurel {
        /// Of what attention reads.
        before: Option<Arc<Norm>>,
        /// Of the product.
        norm: Norm,
    },
    /// Attention and what goes beside it become one.
    AddLaurel,
    /// Streams follow what a layer made of the first one.
    Correct(Arc<Mixing>),
    /// A stream, made as long as the first one, is added to the sum of all: its number, of so many.
    SumStreams(usize, usize),
    /// Whether hidden numbers are numbers.
    Check,
}

/// Matrices side by side: (first column of the output, matrix).
pub type Projections = Vec<(usize, Matrix)>;

/// A product of some rows with matrices side by side.
pub struct Project {
    /// What is read is normalised.
    pub norm: Option<Arc<Norm>>,
    /// What is read.
    pub from: Rows,
    /// One matrix if all are held alike, else several.
    pub matrices: Projections,
    /// Of all columns, padded.
    pub bias: Option<Vec<f32>>,
    /// What is written.
    pub to: Rows,
    /// It is added to what is there.
    pub adds: bool,
    /// Matrices beside others of blocks are multiplied as they are, those in int8.
    pub as_held: bool,
    /// The layer and the site of adapters that change it.
    pub adapted: Option<(usize, Site)>,
}

impl Project {
    /// A product that nothing else goes with.
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

    /// Its matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.matrices.iter().map(|(_, matrix)| matrix)
    }
}

/// Embeddings, and what is added to them.
pub struct Embed {
    /// [vocabulary, hidden]; none: the head.
    pub table: Option<Matrix>,
    /// Embeddings are multiplied by it.
    pub scale: f32,
    /// [kinds, hidden]
    pub token_types: Option<Matrix>,
    /// [positions, hidden]
    pub positions: Option<Matrix>,
    /// The row of the first position.
    pub first_position: usize,
    /// Of the sums.
    pub norm: Option<Norm>,
    /// Tables of radians per position, and what their cosines and sines are multiplied by.
    pub angles: Vec<(Vec<f32>, f32)>,
}

/// Heads side by side among a token's projected numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// The column of the first one.
    pub at: usize,
    /// How many.
    pub count: usize,
    /// Numbers of one.
    pub size: usize,
}

/// A part of what is done with a token's projected numbers.
pub enum TokenStep {
    /// Heads are copied to a column: values are the keys as projected.
    Copy(Heads, usize),
    /// Each head is normalised; its weights lie so far behind those of the head before.
    Norm(Norm, Heads, usize),
    /// Each head is rotated.
    Rotate(Heads, Rotation),
    /// Heads are multiplied.
    Scale(Heads, f32),
    /// Queries grow with their position.
    Grow(Heads, QueryGrowth),
    /// Keys and values, at their columns, go into a page of a layer of the pool.
    Store {
        /// The layer.
        layer: usize,
        /// The column of the keys.
        keys: usize,
        /// The column of the values.
        values: usize,
    },
}

/// The angles of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    /// Column of their cosines; sines follow.
    pub at: usize,
    /// How many pairs of numbers are rotated.
    pub half: usize,
}

/// A product of each head's own.
pub struct PerHead {
    /// By head.
    pub matrices: Vec<Matrix>,
    /// What is read, and from one head to the next.
    pub from: (Rows, usize),
    /// What is written, and from one head to the next.
    pub to: (Rows, usize),
    /// So many numbers behind those that are multiplied are copied behind the product, and rotated if a layer does so.
    pub beside: (usize, Option<Rotation>),
}

/// Attention of a layer.
pub struct Attend {
    /// The layer.
    pub layer: usize,
    /// The layer whose keys and values it attends to, and where the pool has these.
    pub kv_of: (usize, usize),
    /// Queries, and their column.
    pub queries: (Rows, usize),
    /// What it writes.
    pub to: Rows,
    /// Query heads, heads of keys, numbers of a head.
    pub heads: [usize; 3],
    /// Tokens that one attends to; none: all before it.
    pub window: Option<usize>,
    /// By query head: a logarithm to base 2 of a weight that gives no value.
    pub sinks: Option<Vec<f32>>,
}

/// A convolution between two gates: columns are the gate of numbers, the gate behind, the numbers.
pub struct Convolve {
    /// The layer, whose state it is.
    pub layer: usize,
    /// Of the gated numbers.
    pub convolution: Convolution,
    /// Channels.
    pub size: usize,
}

/// Mamba-2: columns of what goes in are the gate z, then x, B and C, which are convolved, then a step for each head.
pub struct Mamba {
    /// The layer, whose state it is.
    pub layer: usize,
    /// Numbers of it.
    pub sizes: Mamba2,
    /// Of x, B and C.
    pub convolution: Convolution,
    /// By head: how fast it fades, below 0.
    pub fading: Vec<f32>,
    /// By head: how much goes past the state.
    pub past: Vec<f32>,
    /// By head: added to the step.
    pub step_bias: Vec<f32>,
    /// Of what goes out; empty: without a norm.
    pub norm: Vec<f32>,
    /// Of it.
    pub eps: f32,
}

impl Mamba {
    /// How numbers leave the layer.
    pub fn way(&self) -> Way<'_> {
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

/// activation(gate(x)) * up(x), or activation(up(x)).
pub struct GateUp {
    /// What is read is normalised.
    pub norm: Option<Arc<Norm>>,
    /// What multiplies.
    pub halves: Halves,
    /// The layer of adapters that change it.
    pub adapted: Option<usize>,
}

/// Gate and up of an MLP.
pub struct Halves {
    /// Panels of both in turns: gate, up, gate, up; or, where the two are held differently, gate alone. The bias is of both
    /// in turns. Without a gate: up.
    pub gate_up: Linear,
    /// Up, where it is not in `gate_up`.
    pub up: Option<Matrix>,
    /// Numbers of each.
    pub inner: usize,
    /// What the gate goes through.
    pub activation: Activation,
    /// There is a gate.
    pub gated: bool,
    /// Gates are cut by so many deviations above their mean, which takes all of a token's.
    pub cut: Option<f32>,
}

/// An MLP.
pub struct Mlp {
    /// Its first half.
    pub halves: Halves,
    /// Back to the hidden size.
    pub down: Linear,
}

/// The choice of each token's experts.
pub struct Route {
    /// Of what the router reads.
    pub norm: Option<Arc<Norm>>,
    /// [experts, hidden], and a row for the gate of the shared one if it has one.
    pub router: Matrix,
    /// [experts]
    pub bias: Option<Vec<f32>>,
    /// Added to scores for the choice.
    pub choice_bias: Option<Vec<f32>>,
    /// Weights are multiplied by it, by expert.
    pub scales: Option<Vec<f32>>,
    /// How they are chosen.
    pub by: Arc<MoeConfig>,
}

/// Routed experts.
pub struct Experts {
    /// Of what they read.
    pub norm: Option<Arc<Norm>>,
    /// All of them.
    pub experts: Vec<Mlp>,
    /// How many of them a token goes through.
    pub per_token: usize,
    /// What they read is weighted, not what they give.
    pub weighs_input: bool,
}

/// The weighted sum of a token's experts and its way to the hidden numbers.
pub struct Combine {
    /// How many experts a token goes through.
    pub per_token: usize,
    /// What they read was weighted.
    pub weighs_input: bool,
    /// [hidden], of what all of a token's give together.
    pub sum_bias: Option<Vec<f32>>,
    /// What lies aside comes in addition, perhaps weighted by a gate in that column of the router.
    pub aside: Option<Option<usize>>,
    /// Of the sum and of what lies aside, where a dense MLP stands beside the experts.
    pub norms: Option<Box<(Norm, Norm)>>,
    /// The sum of it and the hidden numbers is normalised, not it.
    pub over: bool,
    /// What is done with the sum.
    pub add: Add,
}

/// What is added to the hidden numbers.
pub struct Add {
    /// It is normalised.
    pub norm: Option<Norm>,
    /// And multiplied.
    pub scale: f32,
    /// The sums are multiplied.
    pub last: f32,
}

/// What makes the embeddings by layer, of all layers together.
pub struct SumPerLayer {
    /// [vocabulary, layers * size]
    pub embedding: Matrix,
    /// Of each layer's part of what hidden numbers give.
    pub norm: Norm,
    /// Numbers of a layer's part.
    pub size: usize,
    /// Layers.
    pub layers: usize,
}

/// How a layer's streams follow each other.
pub struct Mixing {
    /// Of what the router reads.
    pub norm: Norm,
    /// [streams, hidden]
    pub router: Vec<f32>,
    /// [streams * streams, streams]
    pub predict: Vec<f32>,
    /// [streams, streams]
    pub correct: Vec<f32>,
    /// [hidden]
    pub scale: Vec<f32>,
}

impl Halves {
    /// What gate and up are multiplied by.
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        [&self.gate_up.weight].into_iter().chain(&self.up)
    }

    /// Panels of gate and up.
    pub fn panels(&self) -> usize {
        self.matrices().map(Matrix::panels).sum()
    }
}

impl Mlp {
    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.halves.matrices().chain([&self.down.weight])
    }
}

/// How many of a matrix's bytes a token reads: so many of all.
type Share = (usize, usize);
const WHOLE: Share = (1, 1);
/// A row, which counts for nothing.
const ROW: Share = (0, 1);

fn whole<'a>(matrices: impl Iterator<Item = &'a Matrix>) -> Vec<(&'a Matrix, Share)> {
    matrices.map(|one| (one, WHOLE)).collect()
}

impl Operation {
    /// Its matrices, each with how much of it a token reads.
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

    /// The part of a forward (`PARTS`) that its time counts for.
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
