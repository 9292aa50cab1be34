//! The memory of a forward, made once and grown when a step has more tokens than any before.
//!
//! Invariants: nothing is allocated within a forward.

use crate::kernels::{Acts, Mode};
use crate::model::adapter::{Between, OwnBetween};
use crate::model::config::ModelConfig;
use crate::model::experts::ExpertBuffers;
use crate::model::forward::PHASES;
use crate::model::grid::Grid;
use crate::threads::Counter;

/// What all threads share.
pub struct Buffers {
    /// Hidden numbers of each token.
    pub x: Grid,
    /// Queries, keys, values.
    pub qkv: Grid,
    /// What attention read.
    pub attended: Grid,
    /// Between the halves of the MLP.
    pub inner: Grid,
    /// By table of frequencies: cosines, then sines.
    pub angles: Grid,
    /// What attention or the MLP gives, where it is normalised before it is added.
    pub behind: Grid,
    /// What a product reads.
    pub acts: Acts,
    /// One for each phase of each layer, and two more.
    pub counters: Vec<Counter>,
    /// Of adapters.
    pub between: Between,
    /// Of routed experts, if there are any.
    pub experts: Option<ExpertBuffers>,
    /// Numbers of the widest input of a product.
    pub widest: usize,
    mode: Mode,
    tokens: usize,
}

/// One thread's own.
pub struct Own {
    /// What a product reads, of a token that is alone in its step.
    pub acts: Acts,
    /// A normalised row.
    pub row: Grid,
    /// Gate and up of some rows, side by side.
    pub both: Grid,
    /// Of adapters.
    pub between: OwnBetween,
}

impl Buffers {
    /// For steps of no tokens yet.
    pub fn new(config: &ModelConfig, mode: Mode) -> Self {
        let attended = config.num_heads * config.head_dim;
        let widest = config.intermediate_size.max(config.hidden_size).max(attended);
        let mode = held(mode);
        Self {
            x: Grid::new(config.hidden_size),
            qkv: Grid::new(attended + 2 * config.num_kv_heads * config.head_dim),
            attended: Grid::new(attended),
            inner: Grid::new(config.intermediate_size),
            angles: Grid::new(config.inverse_frequencies.len() * config.head_dim),
            behind: Grid::new(config.hidden_size),
            acts: Acts::new(1, widest, mode),
            counters: (0..config.num_layers * PHASES + 2)
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
    pub fn begin(&mut self, tokens: usize, config: &ModelConfig) {
        self.counters.iter().for_each(Counter::reset);
        if tokens <= self.tokens {
            return;
        }
        self.tokens = tokens;
        for grid in [
            &mut self.x,
            &mut self.qkv,
            &mut self.attended,
            &mut self.inner,
            &mut self.angles,
        ] {
            grid.reserve(tokens);
        }
        if config.norms_behind {
            self.behind.reserve(tokens);
        }
        self.acts = Acts::new(tokens, self.widest, self.mode);
        if let (Some(experts), Some(moe)) = (&mut self.experts, &config.moe) {
            experts.reserve(tokens, config, moe, self.mode);
        }
    }

    /// A thread's own part.
    pub fn own(&self) -> Own {
        let mut row = Grid::new(self.widest);
        row.reserve(1);
        Own {
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
