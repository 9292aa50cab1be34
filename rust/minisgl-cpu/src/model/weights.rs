//! A decoder's weights as they are held, and how its tensors become them, layer by layer.
//!
//! Invariants: every layer is loaded by one thread, all threads load at once; what does not fit the config is an error
//! that names the tensor.

use std::sync::Mutex;

use minisgl_kernels::attention::Distances;
use minisgl_kernels::convolution::Convolution;
use minisgl_kernels::mamba::{Gating, Way};
use minisgl_kernels::panels::{Matrix, PANEL, Part as Piece};
use minisgl_kernels::{Kernels, Kind, Mode, TensorView, plain};

use crate::error::{Error, Result};
use crate::model::config::{
    ByDistance, DeltaNet, HeadNorms, Heads, LatentConfig, Mamba2, ModelConfig, MoeConfig, Norms, ShortConv, Slopes,
    StateKind, Streams,
};
use crate::model::delta::{Delta, by_head};
use crate::model::names::{At, Part};
use crate::model::tensors::{Found, Tensors};
use crate::threads::{Counter, Pool};
use crate::weights::{Packer, Packing};

/// A matrix, perhaps with a bias. Both are padded to whole panels.
pub struct Linear {
    /// [outputs, inputs]
    pub weight: Matrix,
    /// [outputs]
    pub bias: Option<Vec<f32>>,
}

/// A norm over some numbers, by `ModelConfig::layer_norm` of one kind or the other.
pub struct Norm {
    /// As numbers are multiplied with, padded.
    pub weight: Vec<f32>,
    /// Added, padded.
    pub bias: Option<Vec<f32>>,
    /// Added to the mean square under the root.
    pub eps: f32,
}

impl Norm {
    /// Writes `size` numbers of `x`, normalised with the weights from `first` on, to `out`, which may be `x`.
    ///
    /// # Safety
    /// As of `Kernels::rms_norm`.
    #[allow(unsafe_code)]
    pub unsafe fn apply(
        &self,
        (kernels, config): (&Kernels, &ModelConfig),
        x: *const f32,
        (first, size): (usize, usize),
        out: *mut f32,
    ) {
        let weight = &self.weight[first..first + size];
        // SAFETY: the caller's.
        unsafe {
            if config.layer_norm {
                let bias = self.bias.as_ref().map(|bias| &bias[first..first + size]);
                std::ptr::copy(x, out, size);
                let numbers = std::slice::from_raw_parts_mut(out, size);
                plain::layer_norm(kernels.isa(), numbers, weight, bias, self.eps);
            } else {
                kernels.rms_norm(x, weight.as_ptr(), size, self.eps, out);
            }
        }
    }
}

/// down(activation(gate(x)) * up(x)), or down(activation(up(x))).
pub struct Mlp {
    /// Panels of both in turns: gate, up, gate, up; or, where the two are held differently, gate alone. The bias is of both
    /// in turns. Without a gate: up.
    pub gate_up: Linear,
    /// Up, where it is not in `gate_up`.
    pub up: Option<Matrix>,
    /// Back to the hidden size.
    pub down: Linear,
    /// Numbers between the two.
    pub inner: usize,
    /// Gates are cut, which takes all of a token's.
    pub cut: bool,
}

impl Mlp {
    /// Gate and up in as few matrices as their kinds allow.
    fn new(packing: &Packing<'_>, [gate, up]: [TensorView<'_>; 2], down: Matrix, inner: usize) -> Result<Self> {
        let (gate, up) = (Piece::new(gate), Piece::new(up));
        let alike = gate.tensor.kind().held() == up.tensor.kind().held();
        let linear = |weight| Linear { weight, bias: None };
        let (gate_up, up) = if alike {
            (packing.pack(&[gate, up], true, None)?, None)
        } else {
            (
                packing.pack(&[gate], false, None)?,
                Some(packing.pack(&[up], false, None)?),
            )
        };
        Ok(Self {
            gate_up: linear(gate_up),
            up,
            down: linear(down),
            inner,
            cut: false,
        })
    }

    /// Without a gate.
    fn ungated(packing: &Packing<'_>, up: TensorView<'_>, down: Matrix, inner: usize) -> Result<Self> {
        let linear = |weight| Linear { weight, bias: None };
        Ok(Self {
            gate_up: linear(packing.pack(&[Piece::new(up)], false, None)?),
            up: None,
            down: linear(down),
            inner,
            cut: false,
        })
    }

    /// Panels of gate and up.
    pub fn gate_up_panels(&self) -> usize {
        self.gate_up.weight.panels() + self.up.as_ref().map_or(0, Matrix::panels)
    }

    /// What both are multiplied with where `mode` is asked for.
    pub fn gate_up_mode(&self, mode: Mode) -> Mode {
        mode.with_all([&self.gate_up.weight].into_iter().chain(&self.up))
    }

    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        [&self.gate_up.weight, &self.down.weight].into_iter().chain(&self.up)
    }
}

/// Routed experts.
pub struct Experts {
    /// [experts, hidden], and a row for the gate of the shared one if it has one.
    pub router: Matrix,
    /// Added to scores for the choice.
    pub choice_bias: Option<Vec<f32>>,
    /// [experts]
    pub router_bias: Option<Vec<f32>>,
    /// All of them.
    pub experts: Vec<Mlp>,
    /// [hidden], of what all of a token's give together.
    pub sum_bias: Option<Vec<f32>>,
    /// One that every token goes through, or a dense MLP that stands beside them.
    pub shared: Option<Mlp>,
    /// Of what the router reads, if it has its own.
    pub router_norm: Option<Box<Norm>>,
    /// Weights are multiplied by it, by expert.
    pub scales: Option<Vec<f32>>,
    /// Where a dense MLP stands beside them.
    pub norms: Option<Box<BesideNorms>>,
}

/// Norms where a dense MLP stands beside experts.
pub struct BesideNorms {
    /// Before the experts.
    pub before: Norm,
    /// Behind them.
    pub behind: Norm,
    /// Behind the MLP.
    pub of_mlp: Norm,
}

/// What a layer adds of its part of the embeddings by layer.
pub struct PerLayerPart {
    /// [size, hidden], at column 0.
    pub gate: (usize, Matrix),
    /// [hidden, size]
    pub out: Linear,
    /// Behind it.
    pub norm: Norm,
}

/// How a layer's streams follow each other.
pub struct StreamPart {
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
    /// [rank, hidden], at column 0.
    pub down: (usize, Matrix),
    /// [hidden, rank], at column 0.
    pub up: (usize, Matrix),
    /// Behind it.
    pub laurel_norm: Norm,
}

/// Between the first stream and the others: [hidden, hidden] each, at column 0.
pub struct StreamTables {
    /// To them.
    pub into: Vec<(usize, Matrix)>,
    /// And back.
    pub out: Vec<(usize, Matrix)>,
}

impl StreamTables {
    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.into.iter().chain(&self.out).map(|(_, matrix)| matrix)
    }
}

/// What makes the embeddings by layer, of all layers together.
pub struct PerLayerTables {
    /// [vocabulary, layers * size]
    pub embedding: Matrix,
    /// [layers * size, hidden], at column 0.
    pub model: (usize, Matrix),
    /// Of each layer's part of what it gives.
    pub norm: Norm,
}

/// What follows attention.
pub enum FeedForward {
    /// Nothing.
    None,
    /// One for all tokens.
    Dense(Mlp),
    /// Each token's own choice.
    Experts(Experts),
}

/// Projections to queries, keys and values, side by side: (first column of the output, matrix).
pub type Projections = Vec<(usize, Matrix)>;

/// What is between latents and heads. A head's keys K are never made: q (K c) is (K' q) c, so that queries are made fit for
/// the latents c, and values are made of the weighted sum of latents.
pub struct Latent {
    /// The norm of the latent of queries, and what makes queries of it.
    pub queries: Option<(Norm, Projections)>,
    /// The norm of the latent of keys and values.
    pub norm: Norm,
    /// By head: [rank, plain].
    pub keys: Vec<Matrix>,
    /// By head: [value, rank].
    pub values: Vec<Matrix>,
}

impl Latent {
    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let queries = self.queries.iter().flat_map(|(_, all)| all).map(|(_, matrix)| matrix);
        queries.chain(&self.keys).chain(&self.values)
    }
}

/// What keeps a state in a layer.
pub struct Mixer {
    /// From hidden numbers, at their columns.
    pub into: Projections,
    /// What is in between.
    pub kind: Mixing,
    /// Back to hidden numbers.
    pub out: Linear,
}

/// What is between both products.
pub enum Mixing {
    /// A short convolution.
    Convolving(Convolving),
    /// A gated delta net.
    Delta(Delta),
    /// Mamba-2.
    Mamba(Mamba),
}

/// What is between the products of a Mamba-2 layer: columns of what goes in are the gate z, then x, B and C, which are
/// convolved, then a step for each head.
pub struct Mamba {
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

/// A convolution, and the bias of what goes in: by columns of the gate of numbers, the gate behind, the numbers.
pub struct Convolving {
    /// Of the gated numbers.
    pub convolution: Convolution,
    /// Padded.
    pub bias: Option<Vec<f32>>,
}

impl Mixer {
    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let into = self.into.iter().map(|(_, matrix)| matrix);
        into.chain([&self.out.weight])
    }
}

/// Attention of a layer.
pub struct Attending {
    /// One matrix if all are held alike, else up to three.
    pub qkv: Projections,
    /// The biases of all three, in the order of the columns.
    pub qkv_bias: Option<Vec<f32>>,
    /// Of queries, keys and values.
    pub head_norms: [Option<Norm>; 3],
    /// By query head: a logarithm to base 2 of a weight that gives no value.
    pub sinks: Option<Vec<f32>>,
    /// What keys and values of each head are made of, where pages hold latents.
    pub latent: Option<Latent>,
    /// Out of attention.
    pub out: Linear,
}

impl Attending {
    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let qkv = self.qkv.iter().map(|(_, part)| part);
        let latent = self.latent.iter().flat_map(Latent::matrices);
        qkv.chain(latent).chain([&self.out.weight])
    }
}

/// One layer.
pub struct Layer {
    /// Before attention, and before what keeps a state.
    pub attention_norm: Option<Norm>,
    /// Attention, if it has any.
    pub attention: Option<Attending>,
    /// What keeps a state, if anything does.
    pub mixer: Option<Mixer>,
    /// Before the MLP; none if attention's serves both, or there is none.
    pub mlp_norm: Option<Norm>,
    /// Behind attention and behind the MLP, or over the sums there.
    pub norms_behind: Option<(Norm, Norm)>,
    /// The MLP.
    pub feed_forward: FeedForward,
    /// After it.
    pub per_layer: Option<PerLayerPart>,
    /// Around all of it.
    pub streams: Option<Box<StreamPart>>,
    /// All that the layer gives is multiplied by it.
    pub scale: f32,
}

impl Layer {
    /// Those of routers aside.
    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.of_every_token().chain(self.of_experts())
    }

    /// Without routers and what tokens choose from.
    fn of_every_token(&self) -> impl Iterator<Item = &Matrix> {
        let per_layer = self.per_layer.iter();
        let mlp = match &self.feed_forward {
            FeedForward::None => None,
            FeedForward::Dense(mlp) => Some(mlp),
            FeedForward::Experts(all) => all.shared.as_ref(),
        };
        let attention = self.attention.iter().flat_map(Attending::matrices);
        attention
            .chain(self.mixer.iter().flat_map(Mixer::matrices))
            .chain(per_layer.flat_map(|part| [&part.gate.1, &part.out.weight]))
            .chain(self.streams.iter().flat_map(|part| [&part.down.1, &part.up.1]))
            .chain(mlp.into_iter().flat_map(Mlp::matrices))
    }

    fn of_experts(&self) -> impl Iterator<Item = &Matrix> {
        let experts = match &self.feed_forward {
            FeedForward::Experts(all) => all.experts.as_slice(),
            _ => &[],
        };
        experts.iter().flat_map(Mlp::matrices)
    }

    /// What is multiplied with what the MLP leaves.
    pub fn scale_behind_mlp(&self) -> f32 {
        if self.per_layer.is_some() { 1.0 } else { self.scale }
    }

    /// The norm of what the MLP reads.
    pub fn norm_before_mlp(&self) -> Option<&Norm> {
        // where both read the same, attention's is the only one
        let own = self.mlp_norm.as_ref();
        if self.norms_behind.is_some() {
            own
        } else {
            own.or(self.attention_norm.as_ref())
        }
    }
}

/// All of a model.
pub struct Weights {
    /// The layers, in order.
    pub layers: Vec<Layer>,
    /// After the last layer.
    pub norm: Option<Norm>,
    /// [vocabulary, hidden]; rows of it are the embeddings unless `embedding` is there.
    pub head: Matrix,
    /// [vocabulary], padded.
    pub head_bias: Option<Vec<f32>>,
    /// [vocabulary, hidden], where it is not the head.
    pub embedding: Option<Matrix>,
    /// [positions, hidden], added to embeddings.
    pub positions: Option<Matrix>,
    /// [kinds, hidden], added to embeddings.
    pub token_types: Option<Matrix>,
    /// Of the sums.
    pub embedding_norm: Option<Norm>,
    /// Added to scores.
    pub distances: Option<Distances>,
    /// Embeddings by layer.
    pub per_layer: Option<PerLayerTables>,
    /// Between streams of hidden numbers.
    pub streams: Option<StreamTables>,
}

impl Weights {
    /// Matrices of no layer.
    fn tables(&self) -> impl Iterator<Item = &Matrix> {
        let per_layer = self.per_layer.iter();
        std::iter::once(&self.head)
            .chain(&self.embedding)
            .chain(&self.positions)
            .chain(&self.token_types)
            .chain(per_layer.flat_map(|all| [&all.embedding, &all.model.1]))
            .chain(self.streams.iter().flat_map(StreamTables::matrices))
    }
}

/// What of a load is done: (parts done, parts in all).
pub type Progress<'a> = &'a (dyn Fn(usize, usize) + Sync);

impl Weights {
    /// Read all tensors on all threads of `pool`.
    pub fn load(
        (tensors, packer): (&Tensors, &Packer),
        config: &ModelConfig,
        pool: &mut Pool,
        progress: Progress<'_>,
    ) -> Result<Self> {
        let parts = config.num_layers + 1;
        let layers: Vec<Mutex<Option<Layer>>> = (0..config.num_layers).map(|_| Mutex::new(None)).collect();
        let tables = Mutex::new(None);
        let failed = Mutex::new(None);
        let (next, done) = (Counter::default(), Counter::default());
        pool.run(&|_, _| {
            while let Some(part) = next.take(parts) {
                if locked(&failed).is_some() {
                    return;
                }
                // the largest first
                let loaded = if part == 0 {
                    load_tables(tensors, config, &packer.part(0)).map(|found| *locked(&tables) = Some(found))
                } else {
                    Loader {
                        tensors,
                        config,
                        packing: packer.part(part),
                        layer: part - 1,
                    }
                    .load()
                    .map(|found| *locked(&layers[part - 1]) = Some(found))
                };
                if let Err(error) = loaded {
                    locked(&failed).get_or_insert(error);
                    return;
                }
                // panels and file together would be twice the model
                tensors.release();
                if let Some(before) = done.take(usize::MAX) {
                    progress(before + 1, parts);
                }
            }
        })?;
        if let Some(error) = locked(&failed).take() {
            return Err(error);
        }
        let lost = || Error::file("a part of the weights was not loaded");
        let layers = layers
            .into_iter()
            .map(|cell| cell.into_inner().unwrap_or_else(|e| e.into_inner()).ok_or_else(lost))
            .collect::<Result<Vec<Layer>>>()?;
        let (head, embedding, [positions, token_types], per_layer) = locked(&tables).take().ok_or_else(lost)?;
        let of_all = |there: bool, part| {
            there
                .then(|| load_norm(tensors, config, part, At::default(), config.hidden_size))
                .transpose()
        };
        let norm = of_all(config.last_norm, Part::Norm)?;
        let embedding_norm = of_all(config.embedding_norm, Part::EmbeddingNorm)?;
        let distances = config
            .distances
            .as_ref()
            .map(|kind| load_distances(tensors, config.num_heads, kind));
        let streams = load_streams(tensors, config, &packer.part(parts))?;
        let head_bias = if config.head_bias {
            Some(padded(tensors.part_vector(
                Part::Head,
                At::default(),
                "bias",
                config.vocab_size,
            )?))
        } else {
            None
        };
        tensors.all_used(|name| is_redundant(name, tensors, config))?;
        Ok(Self {
            layers,
            norm,
            head,
            head_bias,
            embedding,
            positions,
            token_types,
            embedding_norm,
            distances: distances.transpose()?,
            per_layer,
            streams,
        })
    }

    /// Bytes of all matrices.
    pub fn bytes(&self) -> usize {
        let of_layer = |layer: &Layer| {
            let router = match &layer.feed_forward {
                FeedForward::Experts(all) => all.router.bytes(),
                _ => 0,
            };
            router + layer.matrices().map(Matrix::bytes).sum::<usize>()
        };
        self.layers.iter().map(of_layer).sum::<usize>() + self.tables().map(Matrix::bytes).sum::<usize>()
    }

    /// What one token that is decoded goes through: bytes that are read of matrices, and multiply-adds. Of experts as many as
    /// a token chooses; of tables of tokens a row, which counts for nothing.
    pub fn of_a_token(&self, config: &ModelConfig) -> (usize, usize) {
        let mut of_all = (0, 0);
        let mut add = |matrix: &Matrix, of: usize, all: usize| {
            of_all.0 += matrix.bytes() * of / all;
            of_all.1 += matrix.n() * matrix.k() * of / all;
        };
        let (chosen, experts) = config
            .moe
            .as_ref()
            .map_or((0, 1), |moe| (moe.experts_per_token, moe.num_experts));
        for layer in &self.layers {
            if let FeedForward::Experts(all) = &layer.feed_forward {
                add(&all.router, 1, 1);
            }
            layer.of_every_token().for_each(|matrix| add(matrix, 1, 1));
            layer.of_experts().for_each(|matrix| add(matrix, chosen, experts));
        }
        let of_streams = self.streams.iter().flat_map(StreamTables::matrices);
        of_streams.chain([&self.head]).for_each(|matrix| add(matrix, 1, 1));
        of_all
    }

    /// How the matrices are held, by bytes, the most first.
    pub fn kinds(&self) -> Vec<(Kind, usize)> {
        let mut found: Vec<(Kind, usize)> = Vec::new();
        let mut add = |matrix: &Matrix| match found.iter_mut().find(|(kind, _)| *kind == matrix.kind()) {
            Some((_, bytes)) => *bytes += matrix.bytes(),
            None => found.push((matrix.kind(), matrix.bytes())),
        };
        self.tables().for_each(&mut add);
        self.layers.iter().flat_map(Layer::matrices).for_each(&mut add);
        found.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        found
    }
}

/// In GGUF; the config's frequencies have them already.
const ROPE_FACTORS: [&str; 3] = [
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
];

/// What files have besides: a copy of the table as a head, and frequencies that the config already says.
fn is_redundant(name: &str, tensors: &Tensors, config: &ModelConfig) -> bool {
    ROPE_FACTORS.contains(&name)
        || tensors.files.buffers.iter().any(|end| name.ends_with(end))
        || name.ends_with("rotary_emb.inv_freq")
        || config.left_out.iter().any(|prefix| name.starts_with(prefix))
        || (config.tie_word_embeddings && name == "lm_head.weight")
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// The head, embeddings that are not the head, positions and kinds of tokens, and embeddings by layer.
type Tables = (Matrix, Option<Matrix>, [Option<Matrix>; 2], Option<PerLayerTables>);

pub(super) fn load_tables(tensors: &Tensors, config: &ModelConfig, packing: &Packing<'_>) -> Result<Tables> {
    let shape = [config.vocab_size, config.hidden_size];
    let of = |part, shape: &[usize; 2]| pack(packing, &[tensors.part(part, At::default(), shape)?], false);
    let embedding = of(Part::Embedding, &shape)?;
    let added = |part, count: usize| (count > 0).then(|| of(part, &[count, config.hidden_size])).transpose();
    let added = [
        added(Part::Positions, config.learned_positions)?,
        added(Part::TokenTypes, config.token_types)?,
    ];
    let per_layer = if let Some(per_layer) = config.per_layer {
        let all = config.num_layers * per_layer.size;
        Some(PerLayerTables {
            embedding: of(Part::PerLayerEmbedding, &[per_layer.vocab_size, all])?,
            model: (0, of(Part::PerLayerModel, &[all, config.hidden_size])?),
            norm: load_norm(tensors, config, Part::PerLayerNorm, At::default(), per_layer.size)?,
        })
    } else {
        None
    };
    if config.tie_word_embeddings && !has_other_head(tensors, shape)? {
        return Ok((embedding, None, added, per_layer));
    }
    Ok((of(Part::Head, &shape)?, Some(embedding), added, per_layer))
}

fn load_distances(tensors: &Tensors, heads: usize, kind: &ByDistance) -> Result<Distances> {
    let by_distance = |positions: usize, of: &dyn Fn(usize, i64) -> f32| {
        let most = positions as i64;
        let all = (0..heads).flat_map(|head| (1 - most..most).map(move |behind| (head, behind)));
        Distances {
            numbers: all
                .map(|(head, behind)| of(head, behind) * std::f32::consts::LOG2_E)
                .collect(),
            most: positions,
        }
    };
    match kind {
        ByDistance::Ranges(ranges) => {
            let found = tensors.part(Part::Distances, At::default(), &[ranges.count, heads])?;
            let numbers = found.view()?.decode();
            let of = |head, behind| numbers[ranges.of(behind) * heads + head];
            Ok(by_distance(ranges.positions, &of))
        }
        ByDistance::Slopes(Slopes { by_head, positions }) => {
            let of = |head: usize, behind: i64| by_head[head] * behind.unsigned_abs() as f32;
            Ok(by_distance(*positions, &of))
        }
    }
}

/// Checkpoints have a tensor of each stream, GGUF has one for all.
fn load_streams(tensors: &Tensors, config: &ModelConfig, packing: &Packing<'_>) -> Result<Option<StreamTables>> {
    let Some(streams) = config.streams else {
        return Ok(None);
    };
    let (size, others) = (config.hidden_size, streams.count - 1);
    let all = |part| -> Result<Vec<(usize, Matrix)>> {
        if tensors.is_checkpoint() {
            let of = |expert| {
                tensors.part(
                    part,
                    At {
                        expert,
                        ..At::default()
                    },
                    &[size, size],
                )
            };
            return (0..others)
                .map(|other| Ok((0, pack(packing, &[of(other)?], false)?)))
                .collect();
        }
        let found = tensors.part(part, At::default(), &[others, size, size])?;
        let view = found.view()?;
        let one = |other| packing.pack(&[Piece::new(view.slice(other)?)], false, None);
        (0..others).map(|other| Ok((0, one(other)?))).collect()
    };
    Ok(Some(StreamTables {
        into: all(Part::StreamIn)?,
        out: all(Part::StreamOut)?,
    }))
}

/// People train a model whose head was tied and forget to say that it no longer is.
fn has_other_head(tensors: &Tensors, shape: [usize; 2]) -> Result<bool> {
    if !tensors.has(Part::Head, At::default(), "weight") {
        return Ok(false);
    }
    let of = |part| tensors.part(part, At::default(), &shape);
    let (head, table) = (of(Part::Head)?, of(Part::Embedding)?);
    let (head, table) = (head.view()?, table.view()?);
    Ok(head.kind() != table.kind() || head.data() != table.data())
}

/// A norm over `size` numbers.
pub(super) fn load_norm(tensors: &Tensors, config: &ModelConfig, part: Part, at: At, size: usize) -> Result<Norm> {
    let weight = tensors.part_vector(part, at, "weight", size)?;
    let bias = if config.norm_bias {
        Some(padded(tensors.part_vector(part, at, "bias", size)?))
    } else {
        None
    };
    Ok(Norm {
        weight: padded(with_offset(tensors, config, weight)),
        bias,
        eps: config.norm_eps,
    })
}

/// The weights of a norm as numbers are multiplied with them.
fn with_offset(tensors: &Tensors, config: &ModelConfig, mut weights: Vec<f32>) -> Vec<f32> {
    if tensors.is_checkpoint() {
        weights.iter_mut().for_each(|weight| *weight += config.norm_offset);
    }
    weights
}

fn pack(packing: &Packing<'_>, found: &[Found<'_>], interleave: bool) -> Result<Matrix> {
    let views: Vec<TensorView<'_>> = found.iter().map(Found::view).collect::<Result<_>>()?;
    let pieces: Vec<_> = views.into_iter().map(Piece::new).collect();
    packing.pack(&pieces, interleave, None)
}

/// With zeros up to whole panels.
fn padded(mut numbers: Vec<f32>) -> Vec<f32> {
    numbers.resize(numbers.len().next_multiple_of(2 * PANEL), 0.0);
    numbers
}

/// Loads one layer.
pub(super) struct Loader<'a> {
    pub tensors: &'a Tensors,
    pub config: &'a ModelConfig,
    pub packing: Packing<'a>,
    pub layer: usize,
}

impl Loader<'_> {
    pub fn load(&self) -> Result<Layer> {
        let config = self.config;
        let inner = config.intermediate_sizes[self.layer];
        let experts = config.experts_of(self.layer);
        let (attends, has_mlp) = (config.attends[self.layer], inner > 0 || experts.is_some());
        let state = config.state.filter(|_| config.state_layers[self.layer]);
        let before = !matches!(config.norms, Norms::Behind | Norms::Over);
        let bare = config.bare_first && self.layer == 0;
        let norms_behind = if matches!(config.norms, Norms::Behind | Norms::Both | Norms::Over) {
            Some((self.norm(Part::AttentionNormBehind)?, self.norm(Part::MlpNormBehind)?))
        } else {
            None
        };
        Ok(Layer {
            attention_norm: (before && !bare && (attends || state.is_some()))
                .then(|| self.norm(Part::AttentionNorm))
                .transpose()?,
            attention: attends.then(|| self.attention()).transpose()?,
            mixer: state.map(|kind| self.mixer(kind)).transpose()?,
            mlp_norm: (before && has_mlp && config.norms != Norms::Parallel)
                .then(|| self.norm(Part::MlpNorm))
                .transpose()?,
            norms_behind,
            feed_forward: match experts {
                None if inner == 0 => FeedForward::None,
                None => {
                    let mlp = self.dense([Part::Gate, Part::Up, Part::Down], inner)?;
                    let cut = config.gate_cut(self.layer).is_some();
                    FeedForward::Dense(Mlp { cut, ..mlp })
                }
                Some(moe) => FeedForward::Experts(self.experts(moe)?),
            },
            per_layer: self.per_layer()?,
            streams: config.streams.map(|streams| self.streams(streams)).transpose()?,
            scale: if config.layer_scales {
                self.vector(Part::LayerScale, "weight", 1)?[0]
            } else {
                1.0
            },
        })
    }

    fn streams(&self, streams: Streams) -> Result<Box<StreamPart>> {
        let (size, count) = (self.config.hidden_size, streams.count);
        let of = |part, shape: [usize; 2]| -> Result<Vec<f32>> { Ok(self.part(part, shape)?.view()?.decode()) };
        let mut norm = self.norm(Part::StreamRouterNorm)?;
        norm.weight.iter_mut().for_each(|number| *number /= size as f32);
        let matrix = |part, shape| -> Result<(usize, Matrix)> {
            Ok((0, pack(&self.packing, &[self.part(part, shape)?], false)?))
        };
        Ok(Box::new(StreamPart {
            norm,
            router: of(Part::StreamRouter, [count, size])?,
            predict: of(Part::StreamPredict, [count * count, count])?,
            correct: of(Part::StreamCorrect, [count, count])?,
            scale: self.vector(Part::StreamScale, "weight", size)?,
            down: matrix(Part::LaurelDown, [streams.rank, size])?,
            up: matrix(Part::LaurelUp, [size, streams.rank])?,
            laurel_norm: self.norm(Part::LaurelNorm)?,
        }))
    }

    fn attention(&self) -> Result<Attending> {
        let config = self.config;
        Ok(Attending {
            qkv: self.projections()?,
            qkv_bias: self.qkv_bias()?,
            head_norms: self.head_norms()?,
            sinks: self.sinks()?,
            latent: config.latent.as_ref().map(|latent| self.latent(latent)).transpose()?,
            out: self.linear(
                Part::Out,
                [config.hidden_size, config.attended(self.layer)],
                config.out_bias,
            )?,
        })
    }

    fn mixer(&self, kind: StateKind) -> Result<Mixer> {
        match kind {
            StateKind::ShortConv(conv) => self.convolving(conv),
            StateKind::DeltaNet(net) => self.delta(net),
            StateKind::Mamba2(sizes) => self.mamba(sizes),
        }
    }

    fn mamba(&self, sizes: Mamba2) -> Result<Mixer> {
        let (config, heads, inner) = (self.config, sizes.heads, sizes.inner());
        let (hidden, channels, of_groups) = (config.hidden_size, sizes.channels(), sizes.groups * sizes.size);
        let into = self.linear(Part::MixIn, [sizes.projected(), hidden], false)?;
        let mut convolution = self.convolution((sizes.length, channels), sizes.conv_bias)?;
        let [_, of_x, of_b, of_c, _] = sizes.factors;
        convolution.scale(0..inner, of_x);
        convolution.scale(inner..inner + of_groups, of_b);
        convolution.scale(inner + of_groups..channels, of_c);
        let is_checkpoint = self.tensors.is_checkpoint();
        // GGUF has the norm by group
        let (whole, by_group) = ([inner], [sizes.groups, inner / sizes.groups]);
        let shape = if is_checkpoint { &whole[..] } else { &by_group[..] };
        let norm = if sizes.gating == Gating::Alone {
            Vec::new()
        } else {
            self.tensors.part(Part::MixNorm, self.at(), shape)?.view()?.decode()
        };
        Ok(Mixer {
            into: vec![(0, into.weight)],
            kind: Mixing::Mamba(Mamba {
                convolution,
                fading: self.fading(heads)?,
                past: self.vector(Part::Past, "weight", heads)?,
                step_bias: self.vector(Part::StepBias, "bias", heads)?,
                norm,
                eps: config.norm_eps,
                sizes,
            }),
            out: self.linear(Part::MixOut, [hidden, inner], false)?,
        })
    }

    fn convolving(&self, conv: ShortConv) -> Result<Mixer> {
        let hidden = self.config.hidden_size;
        let into = self.linear(Part::MixIn, [3 * hidden, hidden], conv.bias)?;
        let convolution = self.convolution((conv.length, hidden), conv.bias)?;
        Ok(Mixer {
            into: vec![(0, into.weight)],
            kind: Mixing::Convolving(Convolving {
                convolution,
                bias: into.bias,
            }),
            out: self.linear(Part::MixOut, [hidden, hidden], conv.bias)?,
        })
    }

    fn delta(&self, net: DeltaNet) -> Result<Mixer> {
        let (config, heads, dim) = (self.config, net.value_heads, net.key_dim as f32);
        Ok(Mixer {
            into: self.delta_projections(&net)?,
            kind: Mixing::Delta(Delta {
                convolution: self.convolution((net.length, net.channels()), false)?,
                lengths: [1.0 / dim, 1.0 / dim.sqrt()].map(|one| vec![one; net.key_dim]),
                fading: self.fading(heads)?,
                step_bias: self.vector(Part::StepBias, "bias", heads)?,
                norm: padded(self.vector(Part::MixNorm, "weight", net.value_dim)?),
                eps: config.norm_eps,
                tiled: self.tensors.files.tiled,
                net,
            }),
            out: self.linear(Part::MixOut, [config.hidden_size, net.inner()], false)?,
        })
    }

    /// By head, below 0; checkpoints have the logarithm of what it is without its sign.
    fn fading(&self, heads: usize) -> Result<Vec<f32>> {
        let mut fading = self.vector(Part::Fading, "weight", heads)?;
        if self.tensors.is_checkpoint() {
            fading.iter_mut().for_each(|fading| *fading = -fading.exp());
        }
        Ok(fading)
    }

    /// Files have queries, keys, values and gate in one tensor by head of keys, or in two; and so the two numbers of each
    /// head.
    fn delta_projections(&self, net: &DeltaNet) -> Result<Projections> {
        let (files, hidden) = (&self.tensors.files, self.config.hidden_size);
        let (inner, heads) = (net.inner(), net.value_heads);
        let (group, keys) = (heads / net.key_heads, (net.key_heads * net.key_dim, net.key_dim));
        let values = (inner, group * net.value_dim);
        let of_all = |row: usize| by_head(&[keys, keys, values, values], row);
        let of_rates = |row: usize| by_head(&[(heads, group), (heads, group)], row);
        let (all, rates) = (files.knows(Part::MixAll), files.knows(Part::MixRates));
        let wide: &[_] = if all {
            &[(Part::MixAll, net.channels() + inner)]
        } else {
            &[(Part::MixIn, net.channels()), (Part::MixGate, inner)]
        };
        let narrow: &[_] = if rates {
            &[(Part::MixRates, 2 * heads)]
        } else {
            &[(Part::MixRate, heads), (Part::MixStep, heads)]
        };
        let found: Vec<_> = (wide.iter().chain(narrow))
            .map(|(part, rows)| self.part(*part, [*rows, hidden]))
            .collect::<Result<_>>()?;
        let views: Vec<_> = found.iter().map(Found::view).collect::<Result<_>>()?;
        let mut pieces = Vec::new();
        for (at, view) in views.into_iter().enumerate() {
            pieces.push(match at < wide.len() {
                true if all => Piece::ordered(view, &of_all),
                false if rates => Piece::ordered(view, &of_rates),
                _ => Piece::new(view),
            });
        }
        side_by_side(&self.packing, &pieces)
    }

    /// Of so many tokens and channels.
    fn convolution(&self, (length, channels): (usize, usize), bias: bool) -> Result<Convolution> {
        let found = self
            .tensors
            .part(Part::Convolution, self.at(), &[channels, 1, length])?;
        let bias = self.bias(bias, Part::Convolution, channels)?;
        Ok(Convolution::new(&found.view()?.decode(), bias, (length, channels)))
    }

    /// A matrix of its own.
    fn linear(&self, part: Part, shape: [usize; 2], bias: bool) -> Result<Linear> {
        Ok(Linear {
            weight: pack(&self.packing, &[self.part(part, shape)?], false)?,
            bias: self.bias(bias, part, shape[0])?,
        })
    }

    fn per_layer(&self) -> Result<Option<PerLayerPart>> {
        let Some(per_layer) = self.config.per_layer else {
            return Ok(None);
        };
        let hidden = self.config.hidden_size;
        Ok(Some(PerLayerPart {
            gate: (
                0,
                pack(
                    &self.packing,
                    &[self.part(Part::PerLayerGate, [per_layer.size, hidden])?],
                    false,
                )?,
            ),
            out: self.linear(Part::PerLayerOut, [hidden, per_layer.size], false)?,
            norm: self.norm(Part::PerLayerNormBehind)?,
        }))
    }

    fn at(&self) -> At {
        At {
            layer: self.layer,
            ..At::default()
        }
    }

    fn part(&self, part: Part, shape: [usize; 2]) -> Result<Found<'_>> {
        self.tensors.part(part, self.at(), &shape)
    }

    fn vector(&self, part: Part, what: &str, size: usize) -> Result<Vec<f32>> {
        self.tensors.part_vector(part, self.at(), what, size)
    }

    fn norm(&self, part: Part) -> Result<Norm> {
        load_norm(self.tensors, self.config, part, self.at(), self.config.hidden_size)
    }

    /// Of queries, of keys and of values.
    fn head_norms(&self) -> Result<[Option<Norm>; 3]> {
        let config = self.config;
        let dim = config.heads[self.layer].head_dim;
        let [_, keys, _] = config.widths(self.layer);
        let of = |part, heads| -> Result<Norm> {
            let found = match config.qk_norm {
                HeadNorms::Heads => self.tensors.by_head(part, self.layer, "weight", (heads, dim))?,
                HeadNorms::Whole => self.vector(part, "weight", heads * dim)?,
                _ => self.vector(part, "weight", dim)?,
            };
            let found = with_offset(self.tensors, config, self.apart(found));
            Ok(Norm {
                weight: found,
                bias: None,
                eps: config.norm_eps,
            })
        };
        let there = config.qk_norm != HeadNorms::None;
        let plain = || Norm {
            weight: vec![1.0; dim],
            bias: None,
            eps: config.norm_eps,
        };
        if config.qk_norm == HeadNorms::Plain {
            let norms = || config.rotary[self.layer].map(|_| plain());
            return Ok([norms(), norms(), config.value_norm.then(plain)]);
        }
        Ok([
            there.then(|| of(Part::QNorm, config.num_heads)).transpose()?,
            (there && keys > 0).then(|| of(Part::KNorm, keys / dim)).transpose()?,
            (config.value_norm && keys > 0).then(plain),
        ])
    }

    fn sinks(&self) -> Result<Option<Vec<f32>>> {
        if !self.config.sinks {
            return Ok(None);
        }
        let found = self.vector(Part::Sinks, "weight", self.config.num_heads)?;
        Ok(Some(found.iter().map(|sink| sink * std::f32::consts::LOG2_E).collect()))
    }

    fn bias(&self, there: bool, part: Part, size: usize) -> Result<Option<Vec<f32>>> {
        if !there {
            return Ok(None);
        }
        self.vector(part, "bias", size).map(|bias| Some(padded(bias)))
    }

    /// Columns of queries, keys and values, or of what they are made of, one after the other.
    fn widths(&self) -> Vec<(Part, usize)> {
        let (config, dim) = (self.config, self.config.heads[self.layer].head_dim);
        match &config.latent {
            None => {
                let [queries, keys, values] = config.widths(self.layer);
                let queries = config.gates(self.layer) + queries;
                let all = [(Part::Q, queries), (Part::K, keys), (Part::V, values)].into_iter();
                all.filter(|(_, width)| *width > 0).collect()
            }
            Some(latent) if latent.query_rank > 0 => {
                vec![(Part::QueryDown, latent.query_rank), (Part::LatentDown, dim)]
            }
            Some(_) => vec![
                (Part::Q, config.num_heads * config.query_dim(self.layer)),
                (Part::LatentDown, dim),
            ],
        }
    }

    /// Where a row of queries or keys, of heads of `dim` rows, lies in the file: halves of what is rotated that are in
    /// turns are put apart. It is the first of a head, or the last where pages hold latents.
    fn source_of(&self, dim: usize, row: usize) -> usize {
        let rotated = self.config.rotary_dim(self.layer);
        let half = rotated / 2;
        let start = if self.config.latent.is_some() { dim - rotated } else { 0 };
        let (head, within) = (row / dim * dim + start, row % dim);
        if !self.tensors.files.interleaved || within < start || within >= start + rotated {
            return row;
        }
        let within = within - start;
        head + within % half * 2 + within / half
    }

    fn latent(&self, latent: &LatentConfig) -> Result<Latent> {
        let norm = |part, size| -> Result<Norm> {
            Ok(Norm {
                weight: padded(self.vector(part, "weight", size)?),
                bias: None,
                eps: latent.norm_eps,
            })
        };
        let (heads, dim) = (self.config.num_heads, self.config.query_dim(self.layer));
        let order = |row: usize| self.source_of(dim, row);
        let queries = if latent.query_rank > 0 {
            let found = self.part(Part::QueryUp, [heads * dim, latent.query_rank])?;
            let matrix = self
                .packing
                .pack(&[Piece::ordered(found.view()?, &order)], false, None)?;
            Some((norm(Part::QueryNorm, latent.query_rank)?, vec![(0, matrix)]))
        } else {
            None
        };
        let (keys, values) = self.heads_of_latents(latent)?;
        Ok(Latent {
            queries,
            norm: norm(Part::LatentNorm, latent.rank)?,
            keys,
            values,
        })
    }

    /// Checkpoints have keys and values of a head one below the other; GGUF apart, those of keys turned.
    fn heads_of_latents(&self, latent: &LatentConfig) -> Result<(Vec<Matrix>, Vec<Matrix>)> {
        let (heads, rank) = (self.config.num_heads, latent.rank);
        let (plain, size) = (latent.plain_dim, latent.value_dim);
        let as_it_is = |view: TensorView<'_>| self.packing.pack(&[Piece::new(view)], false, None);
        if self.tensors.has(Part::LatentKeys, self.at(), "weight") {
            let of = |part, shape: [usize; 3]| self.tensors.part(part, self.at(), &shape);
            let keys = of(Part::LatentKeys, [heads, rank, plain])?;
            let values = of(Part::LatentValues, [heads, size, rank])?;
            let (keys, values) = (keys.view()?, values.view()?);
            let all = |view: TensorView<'_>| -> Result<Vec<Matrix>> {
                (0..heads).map(|head| as_it_is(view.slice(head)?)).collect()
            };
            return Ok((all(keys)?, all(values)?));
        }
        let both = self.part(Part::LatentUp, [heads * (plain + size), rank])?;
        let both = both.view()?;
        let (of_key, of_value) = ([plain, rank], [size, rank]);
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for head in 0..heads {
            let data = &both.data()[head * (plain + size) * both.row_bytes()..];
            let (key, rest) = data.split_at(plain * both.row_bytes());
            let rest = &rest[..size * both.row_bytes()];
            keys.push(turned(
                &self.packing,
                TensorView::new(both.name(), both.kind(), &of_key, key)?,
            )?);
            values.push(as_it_is(TensorView::new(both.name(), both.kind(), &of_value, rest)?)?);
        }
        Ok((keys, values))
    }

    /// Where a row of queries, keys and values lies in a tensor that has all of them, perhaps by KV head.
    fn source_of_qkv(&self, row: usize) -> usize {
        let heads = self.config.num_heads;
        let Heads {
            kv_heads,
            head_dim: dim,
            ..
        } = self.config.heads[self.layer];
        let (head, group) = (row / dim, heads / kv_heads);
        if !self.tensors.files.grouped {
            return if head < heads + kv_heads {
                self.source_of(dim, row)
            } else {
                row
            };
        }
        let (kv_head, within) = if head < heads {
            (head / group, head % group)
        } else {
            ((head - heads) % kv_heads, group + (head - heads) / kv_heads)
        };
        (kv_head * (group + 2) + within) * dim + row % dim
    }

    /// Whether queries, keys and values are one tensor; some architectures have files of both forms.
    fn has_qkv(&self) -> bool {
        let files = &self.tensors.files;
        files.knows(Part::Qkv) && (!files.knows(Part::Q) || self.tensors.has(Part::Qkv, self.at(), "weight"))
    }

    fn apart(&self, numbers: Vec<f32>) -> Vec<f32> {
        let dim = self.config.heads[self.layer].head_dim;
        (0..numbers.len())
            .map(|row| numbers[self.source_of(dim, row)])
            .collect()
    }

    fn projections(&self) -> Result<Projections> {
        let hidden = self.config.hidden_size;
        let widths = self.widths();
        if self.has_qkv() {
            let rows = widths.iter().map(|(_, width)| width).sum();
            let (found, order) = (self.part(Part::Qkv, [rows, hidden])?, |row| self.source_of_qkv(row));
            let piece = if self.tensors.files.grouped || self.tensors.files.interleaved {
                Piece::ordered(found.view()?, &order)
            } else {
                Piece::new(found.view()?)
            };
            return Ok(vec![(0, self.packing.pack(&[piece], false, None)?)]);
        }
        let (gates, dim) = (self.config.gates(self.layer), self.config.query_dim(self.layer));
        let of_query = |row: usize| {
            // files have each head's query, then its gate; here all gates come first
            let within = row % gates.max(1);
            match gates {
                0 => self.source_of(dim, row),
                _ => within + (within / dim + usize::from(row < gates)) * dim,
            }
        };
        let of_key = |row: usize| self.source_of(self.config.heads[self.layer].head_dim, row);
        let found = widths
            .iter()
            .map(|(part, width)| self.part(*part, [*width, hidden]))
            .collect::<Result<Vec<_>>>()?;
        let views: Vec<TensorView<'_>> = found.iter().map(Found::view).collect::<Result<_>>()?;
        let pieces: Vec<Piece<'_>> = views
            .iter()
            .zip(&widths)
            .map(|(view, (part, _))| match part {
                Part::Q if self.tensors.files.interleaved || gates > 0 => Piece::ordered(*view, &of_query),
                Part::K | Part::LatentDown if self.tensors.files.interleaved => Piece::ordered(*view, &of_key),
                _ => Piece::new(*view),
            })
            .collect();
        side_by_side(&self.packing, &pieces)
    }

    fn qkv_bias(&self) -> Result<Option<Vec<f32>>> {
        if !self.config.qkv_bias {
            return Ok(None);
        }
        let widths = self.widths();
        if self.has_qkv() {
            let rows = widths.iter().map(|(_, width)| width).sum();
            let bias = self.vector(Part::Qkv, "bias", rows)?;
            return Ok(Some(padded(
                (0..rows).map(|row| bias[self.source_of_qkv(row)]).collect(),
            )));
        }
        let mut all = Vec::new();
        for (part, width) in widths {
            let bias = self.vector(part, "bias", width)?;
            all.extend(if part == Part::V { bias } else { self.apart(bias) });
        }
        Ok(Some(padded(all)))
    }

    /// Gate, up and down by the names of these parts.
    fn dense(&self, [gate, up, down]: [Part; 3], inner: usize) -> Result<Mlp> {
        let (config, hidden) = (self.config, self.config.hidden_size);
        let bias = match (config.mlp_bias, config.gated) {
            (false, _) => None,
            (true, false) => Some(padded(self.vector(up, "bias", inner)?)),
            (true, true) => Some(panels_in_turns(
                &self.vector(gate, "bias", inner)?,
                &self.vector(up, "bias", inner)?,
            )),
        };
        let down_weight = pack(&self.packing, &[self.part(down, [hidden, inner])?], false)?;
        let mut mlp = if !config.gated {
            let up = self.part(up, [inner, hidden])?;
            Mlp::ungated(&self.packing, up.view()?, down_weight, inner)?
        } else if let Some(both) = self.fused(gate) {
            let both = self.part(both, [2 * inner, hidden])?;
            let half = [inner, hidden];
            let (gate, up) = in_halves(both.view()?, &half)?;
            Mlp::new(&self.packing, [gate, up], down_weight, inner)?
        } else {
            let (gate, up) = (self.part(gate, [inner, hidden])?, self.part(up, [inner, hidden])?);
            Mlp::new(&self.packing, [gate.view()?, up.view()?], down_weight, inner)?
        };
        mlp.gate_up.bias = bias;
        mlp.down.bias = self.bias(config.mlp_bias || config.down_bias, down, hidden)?;
        Ok(mlp)
    }

    /// The part that is gate and up in one, if files of this kind have it; some architectures have files of both forms.
    fn fused(&self, gate: Part) -> Option<Part> {
        let both = [(Part::Gate, Part::GateUp), (Part::SharedGate, Part::SharedGateUp)];
        let found = both.into_iter().find(|(one, _)| *one == gate).map(|(_, both)| both);
        let apart = self.tensors.files.knows(gate) && self.tensors.has(gate, self.at(), "weight");
        found.filter(|both| self.tensors.files.knows(*both) && !apart)
    }

    fn experts(&self, moe: &MoeConfig) -> Result<Experts> {
        let (hidden, inner, count) = (self.config.hidden_size, moe.intermediate_size, moe.num_experts);
        let mut router = vec![self.part(Part::Router, [count, hidden])?];
        let shared = if moe.shared_size > 0 {
            if moe.shared_gated {
                router.push(self.part(Part::SharedRouter, [1, hidden])?);
            }
            let parts = [Part::SharedGate, Part::SharedUp, Part::SharedDown];
            Some(self.dense(parts, moe.shared_size)?)
        } else if moe.beside {
            let inner = self.config.intermediate_sizes[self.layer];
            Some(self.dense([Part::Gate, Part::Up, Part::Down], inner)?)
        } else {
            None
        };
        let router = pack(&self.packing, &router, false)?;
        let choice_bias = if moe.choice_bias {
            Some(self.vector(Part::ChoiceBias, "bias", count)?)
        } else {
            None
        };
        let router_bias = self.bias(moe.router_bias, Part::Router, count)?;
        let apart = self.tensors.files.knows(Part::ExpertDown);
        let experts = if apart && !self.tensors.has(Part::ExpertsDown, self.at(), "weight") {
            (0..count)
                .map(|expert| self.own_expert(expert, inner))
                .collect::<Result<Vec<_>>>()?
        } else {
            self.stacked_experts(moe)?
        };
        Ok(Experts {
            router,
            choice_bias,
            router_bias,
            experts,
            sum_bias: moe
                .sum_bias
                .then(|| self.vector(Part::ExpertsSumBias, "bias", hidden))
                .transpose()?,
            shared,
            router_norm: moe.router_norm.then(|| self.router_norm().map(Box::new)).transpose()?,
            scales: moe
                .expert_scale
                .then(|| self.vector(Part::ExpertScale, "weight", count))
                .transpose()?,
            norms: moe.beside.then(|| self.beside_norms().map(Box::new)).transpose()?,
        })
    }

    /// Its numbers are less than those of others by the root of the hidden size.
    fn router_norm(&self) -> Result<Norm> {
        let hidden = self.config.hidden_size;
        let mut weight = self.vector(Part::RouterNorm, "weight", hidden)?;
        let by = (hidden as f32).sqrt().recip();
        weight.iter_mut().for_each(|number| *number *= by);
        Ok(Norm {
            weight: padded(weight),
            bias: None,
            eps: self.config.norm_eps,
        })
    }

    fn beside_norms(&self) -> Result<BesideNorms> {
        Ok(BesideNorms {
            before: self.norm(Part::ExpertsNorm)?,
            behind: self.norm(Part::ExpertsNormBehind)?,
            of_mlp: self.norm(Part::BesideNormBehind)?,
        })
    }

    /// An expert whose matrices are tensors of their own.
    fn own_expert(&self, expert: usize, inner: usize) -> Result<Mlp> {
        let hidden = self.config.hidden_size;
        let at = At { expert, ..self.at() };
        let of = |part, shape: [usize; 2]| self.tensors.part(part, at, &shape);
        if !self.config.gated {
            let up = of(Part::ExpertUp, [inner, hidden])?;
            let down = pack(&self.packing, &[of(Part::ExpertDown, [hidden, inner])?], false)?;
            return Mlp::ungated(&self.packing, up.view()?, down, inner);
        }
        let (gate, up) = (
            of(Part::ExpertGate, [inner, hidden])?,
            of(Part::ExpertUp, [inner, hidden])?,
        );
        let down = pack(&self.packing, &[of(Part::ExpertDown, [hidden, inner])?], false)?;
        Mlp::new(&self.packing, [gate.view()?, up.view()?], down, inner)
    }

    /// All experts' matrices in one tensor: gate and up in one, too (checkpoints), or apart (GGUF).
    fn stacked_experts(&self, moe: &MoeConfig) -> Result<Vec<Mlp>> {
        let (hidden, inner, count) = (self.config.hidden_size, moe.intermediate_size, moe.num_experts);
        let (files, half) = (&self.tensors.files, [count, inner, hidden]);
        let transposed =
            files.knows(Part::ExpertsDownTransposed) && !self.tensors.has(Part::ExpertsDown, self.at(), "weight");
        let of = |part, shape: [usize; 3]| self.tensors.part(part, self.at(), &shape);
        let both = if !self.config.gated {
            vec![of(Part::ExpertsUp, half)?]
        } else if transposed {
            vec![of(Part::ExpertsGateUpTransposed, [count, hidden, 2 * inner])?]
        } else if files.knows(Part::ExpertsGateUp) {
            vec![of(Part::ExpertsGateUp, [count, 2 * inner, hidden])?]
        } else {
            vec![of(Part::ExpertsGate, half)?, of(Part::ExpertsUp, half)?]
        };
        let down = if transposed {
            of(Part::ExpertsDownTransposed, half)?
        } else {
            of(Part::ExpertsDown, [count, hidden, inner])?
        };
        let views: Vec<TensorView<'_>> = both.iter().map(Found::view).collect::<Result<_>>()?;
        let (down, biases) = (down.view()?, self.expert_biases(moe)?);
        let one = |expert| -> Result<Mlp> {
            let down = pack(&self.packing, &[Found::turned(down.slice(expert)?, transposed)?], false)?;
            let mut mlp = match views.as_slice() {
                [up] if !self.config.gated => Mlp::ungated(&self.packing, up.slice(expert)?, down, inner)?,
                [both] => {
                    let both = Found::turned(both.slice(expert)?, transposed)?;
                    self.of_both(both.view()?, down, inner)?
                }
                _ => Mlp::new(
                    &self.packing,
                    [views[0].slice(expert)?, views[1].slice(expert)?],
                    down,
                    inner,
                )?,
            };
            if let Some([gate, up, down]) = biases.get(expert) {
                mlp.gate_up.bias = Some(panels_in_turns(gate, up));
                mlp.down.bias = Some(padded(down.clone()));
            }
            Ok(mlp)
        };
        (0..count).map(one).collect()
    }

    /// An expert whose gate and up are one tensor.
    fn of_both(&self, both: TensorView<'_>, down: Matrix, inner: usize) -> Result<Mlp> {
        if !self.tensors.files.gate_up_in_turns {
            let half = [inner, self.config.hidden_size];
            let (gate, up) = in_halves(both, &half)?;
            return Mlp::new(&self.packing, [gate, up], down, inner);
        }
        let [gate, up] = [0, 1].map(|first| Found::of_rows(&both, (first..2 * inner).step_by(2)));
        Mlp::new(&self.packing, [gate.view()?, up.view()?], down, inner)
    }

    /// By expert, of gate, up and down; nothing if there are none.
    fn expert_biases(&self, moe: &MoeConfig) -> Result<Vec<[Vec<f32>; 3]>> {
        if !moe.bias {
            return Ok(Vec::new());
        }
        let (files, inner) = (&self.tensors.files, moe.intermediate_size);
        let of = |part, size: usize| -> Result<Vec<f32>> {
            let found = self.tensors.part(part, self.at(), &[moe.num_experts, size])?;
            Ok(found.view()?.decode())
        };
        let (gate, up) = if files.knows(Part::ExpertsGateUpBias) {
            let both = of(Part::ExpertsGateUpBias, 2 * inner)?;
            let side = |up: usize| -> Vec<f32> {
                let at = |i: usize| {
                    if files.gate_up_in_turns {
                        i * 2 + up
                    } else {
                        i / inner * 2 * inner + up * inner + i % inner
                    }
                };
                (0..both.len() / 2).map(|i| both[at(i)]).collect()
            };
            (side(0), side(1))
        } else {
            (of(Part::ExpertsGateBias, inner)?, of(Part::ExpertsUpBias, inner)?)
        };
        let down = of(Part::ExpertsDownBias, self.config.hidden_size)?;
        let of_up = gate.chunks_exact(inner).zip(up.chunks_exact(inner));
        let all = of_up.zip(down.chunks_exact(self.config.hidden_size));
        Ok(all
            .map(|((gate, up), down)| [gate, up, down].map(<[f32]>::to_vec))
            .collect())
    }
}

/// One matrix if all are held alike, else one of each.
fn side_by_side(packing: &Packing<'_>, pieces: &[Piece<'_>]) -> Result<Projections> {
    let kind = |piece: &Piece<'_>| piece.tensor.kind().held();
    let alike = pieces.windows(2).all(|two| kind(&two[0]) == kind(&two[1]));
    let whole = pieces.iter().all(|piece| piece.tensor.rows().is_multiple_of(PANEL));
    if alike || !whole {
        let held = if alike { None } else { Some(Kind::F32) };
        return Ok(vec![(0, packing.pack(pieces, false, held)?)]);
    }
    let mut column = 0;
    let mut parts = Vec::new();
    for piece in pieces {
        parts.push((column, packing.pack(std::slice::from_ref(piece), false, None)?));
        column += piece.tensor.rows();
    }
    Ok(parts)
}

/// Rows become columns; blocks become the numbers that they stand for.
fn turned(packing: &Packing<'_>, view: TensorView<'_>) -> Result<Matrix> {
    if view.kind().block_len() == 1 {
        return pack(packing, &[Found::turned(view, true)?], false);
    }
    let data: Vec<u8> = view.decode().into_iter().flat_map(f32::to_le_bytes).collect();
    let view = TensorView::new(view.name(), Kind::F32, view.shape(), &data)?;
    pack(packing, &[Found::turned(view, true)?], false)
}

/// Gate and up of a tensor that has the one behind the other, each of the shape `half`.
fn in_halves<'a>(both: TensorView<'a>, half: &'a [usize; 2]) -> Result<(TensorView<'a>, TensorView<'a>)> {
    let (gate, up) = both.data().split_at(both.data().len() / 2);
    let part = |data| TensorView::new(both.name(), both.kind(), half, data);
    Ok((part(gate)?, part(up)?))
}

/// Panels of two vectors in turns, as the panels of their matrices lie.
fn panels_in_turns(one: &[f32], other: &[f32]) -> Vec<f32> {
    let (one, other) = (padded(one.to_vec()), padded(other.to_vec()));
    one.chunks(PANEL)
        .zip(other.chunks(PANEL))
        .flat_map(|(a, b)| a.iter().chain(b).copied())
        .collect()
}
