//! The memory of a forward, made once and grown when a step has more tokens than any before.
//!
//! Invariants: nothing is allocated within a forward.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;

use minisgl_kernels::{Acts, Mode};

use crate::model::adapter::{Between, OwnBetween};
use crate::model::config::{ModelConfig, MoeConfig, StateKind};
use crate::model::grid::Grid;
use crate::model::operation::{Operation, Rows};
use crate::model::weights::Weights;
use crate::threads::Counter;

/// Counters that an operation may take.
pub(super) const COUNTERS: usize = 4;

/// Tokens whose prepared activations stay in a core's cache while panels pass.
pub(super) const TOKENS: usize = 128;

/// What all threads share.
pub struct Buffers {
    /// Hidden numbers of each token.
    pub x: Grid,
    /// Queries, keys, values; or what else a layer's first products give.
    pub qkv: Grid,
    /// What attention read, or what a layer made of its state.
    pub attended: Grid,
    /// Where pages hold latents: queries as they are made of their own latent, queries made fit for latents, and the
    /// latents that attention read.
    pub latents: [Grid; 3],
    /// Between the halves of the MLP.
    pub inner: Grid,
    /// By table of frequencies: cosines, then sines.
    pub angles: Grid,
    /// What attention or the MLP gives, where it is changed before it is added, or added later.
    pub behind: Grid,
    /// By layer: the numbers of each token that it alone adds.
    pub per_layer: Grid,
    /// Hidden numbers of the streams behind the first.
    pub streams: Vec<Grid>,
    /// The first one as it was predicted; in the end, the sum of all.
    pub predicted: Grid,
    /// What goes beside attention.
    pub beside: Grid,
    /// What gates are multiplied with, where these are cut first.
    pub ups: Grid,
    /// What a product reads.
    pub acts: Acts,
    /// `COUNTERS` for each operation.
    pub counters: Vec<Counter>,
    /// What adapters need.
    pub between: Between,
    /// What routed experts need, if there are any.
    pub experts: Option<ExpertBuffers>,
    /// Numbers of the widest input of a product.
    pub widest: usize,
    /// Numbers of the widest input of a product of one head.
    of_heads: usize,
    mode: Mode,
    tokens: usize,
}

/// One thread's own.
pub struct Own {
    /// What a product of one head reads, of some tokens.
    pub of_head: Acts,
    /// What a product reads, of a token that is alone in its step.
    pub acts: Acts,
    /// A normalised row.
    pub row: Grid,
    /// Gate and up of some rows, side by side.
    pub both: Grid,
    /// What adapters need.
    pub between: OwnBetween,
}

impl Buffers {
    /// For steps of no tokens yet. What no operation uses has no room.
    pub fn new(config: &ModelConfig, weights: &Weights, mode: Mode) -> Self {
        let writes = |rows: Rows| {
            let mut all = weights.operations();
            all.any(|one| matches!(one, Operation::Project(project) if project.to == rows))
        };
        let if_written = |rows| if writes(rows) { config.hidden_size } else { 0 };
        let is_cut = |one: &Operation| matches!(one, Operation::GateUp(mlp) if mlp.halves.cut.is_some());
        let cut = if weights.operations().any(is_cut) {
            config.widest_inner()
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
        let widest = config.widest_inner().max(config.hidden_size).max(attended);
        let widest = config
            .latent
            .as_ref()
            .map_or(widest, |latent| widest.max(latent.query_rank));
        let mode = held(mode);
        Self {
            x: Grid::new(config.hidden_size),
            qkv: Grid::new(projected),
            attended: Grid::new(attended),
            latents: latents.map(Grid::new),
            of_heads: config
                .latent
                .as_ref()
                .map_or(1, |latent| latent.plain_dim.max(latent.rank)),
            inner: Grid::new(config.widest_inner()),
            angles: Grid::new(config.angles_at(config.inverse_frequencies.len())),
            behind: Grid::new(if_written(Rows::Aside)),
            per_layer: Grid::new(config.per_layer.map_or(0, |one| one.size * config.num_layers)),
            streams: (1..config.streams.map_or(1, |streams| streams.count))
                .map(|_| Grid::new(config.hidden_size))
                .collect(),
            predicted: Grid::new(if_written(Rows::Beside)),
            beside: Grid::new(if_written(Rows::Beside)),
            ups: Grid::new(cut),
            acts: Acts::new(1, widest, mode),
            counters: (0..weights.operations().count() * COUNTERS)
                .map(|_| Counter::default())
                .collect(),
            between: Between::default(),
            experts: config.moe.as_ref().map(|moe| ExpertBuffers::new(config, moe, mode)),
            widest,
            mode,
            tokens: 0,
        }
    }

    /// Before a step of so many tokens.
    pub fn begin(&mut self, tokens: usize) {
        self.counters.iter().for_each(Counter::reset);
        if tokens <= self.tokens {
            return;
        }
        self.tokens = tokens;
        let of_streams = self.streams.iter_mut().chain([&mut self.predicted, &mut self.beside]);
        let of_layers = [
            &mut self.qkv,
            &mut self.attended,
            &mut self.inner,
            &mut self.ups,
            &mut self.behind,
        ];
        let of_all = [&mut self.x, &mut self.angles, &mut self.per_layer].into_iter();
        of_all
            .chain(of_layers)
            .chain(&mut self.latents)
            .chain(of_streams)
            .for_each(|grid| grid.reserve(tokens));
        self.acts = Acts::new(tokens, self.widest, self.mode);
        if let Some(experts) = &mut self.experts {
            experts.reserve(tokens, self.mode);
        }
    }

    /// Where these numbers are.
    pub fn grid(&self, rows: Rows) -> &Grid {
        match rows {
            Rows::Hidden => &self.x,
            Rows::Projected => &self.qkv,
            Rows::Attended => &self.attended,
            Rows::Queries => &self.latents[0],
            Rows::Fitted => &self.latents[1],
            Rows::Latents => &self.latents[2],
            Rows::Inner => &self.inner,
            Rows::Aside => &self.behind,
            Rows::PerLayer => &self.per_layer,
            Rows::Stream(stream) => &self.streams[stream],
            Rows::Beside => &self.beside,
        }
    }

    /// A thread's own part.
    pub fn own(&self) -> Own {
        let mut row = Grid::new(self.widest);
        row.reserve(1);
        Own {
            of_head: Acts::new(TOKENS, self.of_heads, self.mode),
            acts: Acts::new(1, self.widest, self.mode),
            row,
            both: Grid::new(32 * 16),
            between: OwnBetween::new(self.widest),
        }
    }
}

/// What activations are held as where integer matrices are multiplied in `mode`: others need them as they are.
pub(super) fn held(mode: Mode) -> Mode {
    if mode == Mode::Int8 { Mode::Both } else { mode }
}

/// Memory for steps through experts. An assignment is a token and one of its experts.
pub struct ExpertBuffers {
    /// The router's logits, [tokens, experts].
    pub(super) logits: Grid,
    /// Between the halves, [assignments, inner].
    pub(super) inner: Grid,
    /// What comes out, [assignments, hidden].
    pub(super) out: Grid,
    pub(super) acts: Acts,
    pub(super) router_acts: Acts,
    /// By token and rank: expert, weight.
    pub(super) chosen: Vec<UnsafeCell<(u32, f32)>>,
    /// Written by one thread between two barriers.
    pub(super) order: UnsafeCell<Order>,
    per_token: usize,
    hidden: usize,
    widest: usize,
}

// SAFETY: the cells are written by one thread a piece, or by one thread alone, and read after a barrier.
unsafe impl Sync for ExpertBuffers {}

/// Assignments sorted by expert.
#[derive(Default)]
pub(super) struct Order {
    /// By sorted place: token * per_token + rank.
    pub(super) assignments: Vec<u32>,
    /// By token * per_token + rank: sorted place.
    pub(super) places: Vec<u32>,
    /// Each expert that some token chose, once: its tokens that decode, then those of prompts.
    pub(super) used: Vec<Used>,
    /// Assignments from here on are of prompts.
    pub(super) prompts: u32,
}

/// An expert of a step, with the sorted places of its tokens.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Used {
    pub(super) expert: usize,
    pub(super) start: usize,
    /// Places from here on are of prompts.
    pub(super) prompts: usize,
    pub(super) end: usize,
}

impl ExpertBuffers {
    /// For steps of no tokens yet.
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

    /// Before a step of more tokens than any before.
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
