//! Buffers of a forward pass, allocated once and grown when a step has more tokens than any before.
//!
//! Invariants: nothing is allocated within a forward pass.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;

use minisgl_kernels::{Acts, Mode};

use crate::model::adapter::{AdapterBuffers, ThreadAdapterBuffers};
use crate::model::config::{ModelConfig, MoeConfig, StateKind};
use crate::model::grid::Grid;
use crate::model::operation::{Operation, Rows};
use crate::model::weights::Weights;
use crate::threads::Counter;

/// Work counters that each operation owns.
pub(super) const COUNTERS: usize = 4;

/// Tokens per block, so that prepared activations stay in a core's cache while weight panels stream through.
pub(super) const TOKENS: usize = 128;

/// Buffers that all threads share. A `Grid` has one row a token unless stated otherwise.
pub struct Buffers {
    /// Hidden states of the step's tokens.
    pub x: Grid,
    /// Queries, keys and values, or the input projection of a recurrent layer.
    pub qkv: Grid,
    /// Output of attention or of a recurrent layer, before the output projection.
    pub attended: Grid,
    /// Latent attention (MLA): queries from their own latent, queries in the KV latent space, attended latents.
    pub latents: [Grid; 3],
    /// Activations of the MLP between up and down projection.
    pub inner: Grid,
    /// RoPE values by frequency table: cosines, then sines.
    pub angles: Grid,
    /// Output of attention or MLP that is changed before it is added to the hidden states, or added later.
    pub side: Grid,
    /// Embeddings that each layer adds, by layer.
    pub per_layer: Grid,
    /// Hidden states of the residual streams after the first (AltUp).
    pub streams: Vec<Grid>,
    /// Predicted first stream (AltUp); at the end, the sum of all streams.
    pub predicted: Grid,
    /// Residual of low rank, alongside attention (Laurel).
    pub laurel: Grid,
    /// Up projection, in layers that sparsify gates before multiplying.
    pub ups: Grid,
    /// Copies of the hidden states of a vision tower, after some layers.
    pub taps: Vec<Grid>,
    /// Activations prepared as matmul input.
    pub acts: Acts,
    /// Work counters, `COUNTERS` for each operation.
    pub counters: Vec<Counter>,
    /// Shared buffers of the LoRA adapters.
    pub between: AdapterBuffers,
    /// Buffers for routed experts; `None` if the model has no experts.
    pub experts: Option<ExpertBuffers>,
    /// Largest number of inputs of a matmul.
    pub widest: usize,
    /// Largest number of inputs of a per-head matmul.
    of_heads: usize,
    mode: Mode,
    tokens: usize,
}

/// Scratch buffers of one thread in the forward pass.
pub struct ThreadBuffers {
    /// Prepared activations of a per-head matmul, for one block of tokens.
    pub of_head: Acts,
    /// Prepared activations of a token that is alone in its step.
    pub acts: Acts,
    /// A normalized row, as input of a matmul.
    pub row: Grid,
    /// Gate and up projection of some rows, side by side.
    pub gate_up: Grid,
    /// Buffers of this thread for LoRA adapters.
    pub between: ThreadAdapterBuffers,
}

impl Buffers {
    /// Creates empty buffers. Buffers that no operation of the model uses have width 0.
    pub fn new(config: &ModelConfig, weights: &Weights, mode: Mode) -> Self {
        let writes = |rows: Rows| {
            let mut all = weights.operations();
            all.any(|one| matches!(one, Operation::Project(project) if project.to == rows))
        };
        let if_written = |rows| if writes(rows) { config.hidden_size } else { 0 };
        let is_sparse = |one: &Operation| matches!(one, Operation::GateUp(mlp) if mlp.halves.cut.is_some());
        let cut = if weights.operations().any(is_sparse) {
            config.max_inner()
        } else {
            0
        };
        let layers = (0..config.num_layers).filter(|layer| config.attends[*layer]);
        let attended = layers.clone().map(|layer| config.attended(layer)).max().unwrap_or(0);
        let projected = layers.map(|layer| config.projected(layer)).max().unwrap_or(0);
        let of_state = |size: fn(&StateKind, &ModelConfig) -> usize| config.state.map_or(0, |kind| size(&kind, config));
        let attended = attended.max(of_state(StateKind::mixed));
        let projected = projected.max(of_state(StateKind::projected));
        let latents = config.latent.as_ref().map_or([0; 3], |latent| {
            let heads = config.num_heads;
            let own = if latent.query_rank > 0 {
                heads * config.query_dim(0)
            } else {
                0
            };
            [own, heads * config.heads[0].head_dim, heads * latent.rank]
        });
        let widest = config.max_inner().max(config.hidden_size).max(attended);
        let widest = config
            .latent
            .as_ref()
            .map_or(widest, |latent| widest.max(latent.query_rank));
        let mode = activation_mode(mode);
        Self {
            x: Grid::new(config.hidden_size),
            qkv: Grid::new(projected),
            attended: Grid::new(attended),
            latents: latents.map(Grid::new),
            of_heads: config
                .latent
                .as_ref()
                .map_or(1, |latent| latent.plain_dim.max(latent.rank)),
            inner: Grid::new(config.max_inner()),
            angles: Grid::new(config.angles_at(config.inverse_frequencies.len())),
            side: Grid::new(if_written(Rows::Aside)),
            per_layer: Grid::new(config.per_layer.map_or(0, |one| one.size * config.num_layers)),
            streams: (1..config.streams.map_or(1, |streams| streams.count))
                .map(|_| Grid::new(config.hidden_size))
                .collect(),
            predicted: Grid::new(if_written(Rows::Beside)),
            laurel: Grid::new(if_written(Rows::Beside)),
            ups: Grid::new(cut),
            taps: (config.patches.iter().flat_map(|patches| &patches.taps))
                .map(|_| Grid::new(config.hidden_size))
                .collect(),
            acts: Acts::new(1, widest, mode),
            counters: (0..weights.operations().count() * COUNTERS)
                .map(|_| Counter::default())
                .collect(),
            between: AdapterBuffers::default(),
            experts: config.moe.as_ref().map(|moe| ExpertBuffers::new(config, moe, mode)),
            widest,
            mode,
            tokens: 0,
        }
    }

    /// Returns the bytes that a patch takes in the buffers of a vision tower.
    pub fn bytes_of_token(config: &ModelConfig, mode: Mode) -> usize {
        let (hidden, attended) = (config.hidden_size, config.attended(0));
        let taps = config.patches.as_ref().map_or(0, |patches| patches.taps.len());
        let angles = config.angles_at(config.inverse_frequencies.len());
        let grids = (1 + taps) * hidden + config.projected(0) + attended + config.max_inner() + angles;
        let widest = config.max_inner().max(hidden).max(attended);
        let acts = Acts::new(TOKENS, widest, activation_mode(mode)).bytes() / TOKENS;
        grids * size_of::<f32>() + acts
    }

    /// Resets the counters and grows the buffers for a step of `tokens` tokens.
    pub fn begin(&mut self, tokens: usize) {
        self.counters.iter().for_each(Counter::reset);
        if tokens <= self.tokens {
            return;
        }
        self.tokens = tokens;
        let of_streams = self.streams.iter_mut().chain([&mut self.predicted, &mut self.laurel]);
        let of_layers = [
            &mut self.qkv,
            &mut self.attended,
            &mut self.inner,
            &mut self.ups,
            &mut self.side,
        ];
        let of_all = [&mut self.x, &mut self.angles, &mut self.per_layer].into_iter();
        of_all
            .chain(of_layers)
            .chain(&mut self.latents)
            .chain(of_streams)
            .chain(&mut self.taps)
            .for_each(|grid| grid.reserve(tokens));
        self.acts = Acts::new(tokens, self.widest, self.mode);
        if let Some(experts) = &mut self.experts {
            experts.reserve(tokens, self.mode);
        }
    }

    /// Returns the buffer that `rows` names.
    pub fn grid(&self, rows: Rows) -> &Grid {
        match rows {
            Rows::Hidden => &self.x,
            Rows::Projected => &self.qkv,
            Rows::Attended => &self.attended,
            Rows::Queries => &self.latents[0],
            Rows::Fitted => &self.latents[1],
            Rows::Latents => &self.latents[2],
            Rows::Inner => &self.inner,
            Rows::Aside => &self.side,
            Rows::PerLayer => &self.per_layer,
            Rows::Stream(stream) => &self.streams[stream],
            Rows::Beside => &self.laurel,
        }
    }

    /// Creates the buffers of one thread.
    pub fn own(&self) -> ThreadBuffers {
        let mut row = Grid::new(self.widest);
        row.reserve(1);
        ThreadBuffers {
            of_head: Acts::new(TOKENS, self.of_heads, self.mode),
            acts: Acts::new(1, self.widest, self.mode),
            row,
            gate_up: Grid::new(32 * 16),
            between: ThreadAdapterBuffers::new(self.widest),
        }
    }
}

/// Returns the mode of shared activations. With int8 they are kept in both forms, as float matrices need exact ones.
pub(super) fn activation_mode(mode: Mode) -> Mode {
    if mode == Mode::Int8 { Mode::Both } else { mode }
}

/// Buffers for routed experts. An assignment is a (token, chosen expert) pair.
pub struct ExpertBuffers {
    /// Router logits, [tokens, experts].
    pub(super) logits: Grid,
    /// Activations between up and down projection, [assignments, inner].
    pub(super) inner: Grid,
    /// Outputs of the experts, [assignments, hidden].
    pub(super) out: Grid,
    pub(super) acts: Acts,
    pub(super) router_acts: Acts,
    /// Chosen (expert, weight) of each assignment, in the order token * per_token + rank.
    pub(super) chosen: Vec<UnsafeCell<(u32, f32)>>,
    /// Assignments sorted by expert. One thread writes it between two barriers.
    pub(super) order: UnsafeCell<Order>,
    per_token: usize,
    hidden: usize,
    widest: usize,
}

// SAFETY: the cells are written by one thread a piece, or by one thread alone, and read after a barrier.
unsafe impl Sync for ExpertBuffers {}

/// Assignments of a step, sorted by expert.
#[derive(Default)]
pub(super) struct Order {
    /// Assignment (token * per_token + rank) at each sorted index.
    pub(super) assignments: Vec<u32>,
    /// Sorted index of each assignment.
    pub(super) sorted_index: Vec<u32>,
    /// Chosen experts of the step, each once, with decode tokens first, then prefill tokens.
    pub(super) used: Vec<Used>,
    /// First assignment that belongs to a prefill token.
    pub(super) prompts: u32,
}

/// An expert that some token of the step chose, with the sorted indices of its assignments.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Used {
    pub(super) expert: usize,
    pub(super) start: usize,
    /// Sorted index of the first prefill assignment.
    pub(super) prompts: usize,
    pub(super) end: usize,
}

impl ExpertBuffers {
    /// Creates empty buffers for the experts of a model; `reserve` sizes them.
    pub fn new(config: &ModelConfig, moe: &MoeConfig, mode: Mode) -> Self {
        let widest = moe.intermediate_size.max(config.hidden_size);
        Self {
            logits: Grid::new(moe.num_experts + 1),
            inner: Grid::new(moe.intermediate_size),
            out: Grid::new(config.hidden_size),
            acts: Acts::new(1, widest, mode),
            router_acts: Acts::new(1, config.hidden_size, mode),
            chosen: Vec::new(),
            order: UnsafeCell::new(Order::default()),
            per_token: moe.experts_per_token,
            hidden: config.hidden_size,
            widest,
        }
    }

    /// Grows the buffers for a step of `tokens` tokens.
    pub fn reserve(&mut self, tokens: usize, mode: Mode) {
        let assignments = tokens * self.per_token;
        self.logits.reserve(tokens);
        self.inner.reserve(assignments);
        self.out.reserve(assignments);
        self.acts = Acts::new(assignments, self.widest, mode);
        self.router_acts = Acts::new(tokens, self.hidden, mode);
        self.chosen.resize_with(assignments, || UnsafeCell::new((0, 0.0)));
    }
}
