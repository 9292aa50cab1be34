//! One forward on all threads: from token ids to hidden numbers, layer by layer.
//!
//! Each phase deals out pieces through a counter of its own, so each piece has one thread; what a phase writes is read
//! after the next barrier only. This is the reason behind every `unsafe` block here that says "its piece".
//!
//! Invariants: what a token's numbers become depends on the tokens before it only, not on how pieces fall to threads
//! nor on what else is in the step.

#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Mutex;
use std::time::Instant;

use crate::attention::{Attention, Plan, Rows, Scratch};
use crate::kernels::{Kernels, Mode};
use crate::kv::KvPool;
use crate::model::adapter::Run;
use crate::model::buffers::{Buffers, Own};
use crate::model::config::ModelConfig;
use crate::model::products::{FEW, TOKENS, each};
use crate::model::weights::{FeedForward, Weights};
use crate::threads::{Barrier, Counter};

/// Phases of a layer, each with a counter.
#[derive(Clone, Copy)]
pub(super) enum Phase {
    Prepare,
    Qkv,
    Rotate,
    Attend,
    Merge,
    PrepareOut,
    Out,
    PrepareMlp,
    GateUp,
    PrepareDown,
    Down,
    Route,
    Combine,
    LowerQkv,
    LowerOut,
    LowerMlp,
    LowerDown,
    AddOut,
    AddDown,
}

pub(super) const PHASES: usize = 19;

/// Parts that time is told by.
pub const PARTS: [&str; 8] = [
    "prepare",
    "qkv",
    "rotate, store",
    "attention",
    "out",
    "gate, up",
    "down",
    "embed, check",
];
/// Seconds by part, of the calling thread.
pub type Times = [f64; PARTS.len()];

/// The tokens of a step.
pub struct Tokens<'a> {
    /// Ids, all of them known.
    pub ids: &'a [u32],
    /// Positions in their sequences.
    pub positions: &'a [u32],
    /// Where each one's keys and values go.
    pub slots: &'a [u32],
    /// How many of them, from the first on, are rows that decode.
    pub decode: usize,
    /// Those that have an adapter, in order; a run is of rows that decode or of others.
    pub runs: &'a [Run<'a>],
}

/// What all threads share in a forward.
pub(super) struct Forward<'a> {
    pub config: &'a ModelConfig,
    pub weights: &'a Weights,
    pub kernels: Kernels,
    pub mode: Mode,
    pub kv: &'a KvPool,
    pub rows: Rows<'a>,
    pub attention: &'a Attention,
    pub plan: &'a Plan,
    pub buffers: &'a Buffers,
    pub tokens: Tokens<'a>,
    pub not_finite: Mutex<Vec<usize>>, // tokens
    pub threads: usize,
}

/// One thread's view.
pub(super) struct Worker<'a, 'f> {
    pub shared: &'a Forward<'f>,
    pub barrier: &'a Barrier,
    pub thread: usize,
    pub own: &'a mut Own,
    pub scratch: &'a mut Scratch,
    clock: Option<Instant>,
    times: &'a mut Times,
}

impl Forward<'_> {
    /// What each thread does. `own`, `scratch`, `times` are this thread's.
    pub fn run(
        &self,
        thread: usize,
        barrier: &Barrier,
        own: &mut Own,
        scratch: &mut Scratch,
        times: Option<&mut Times>,
    ) {
        let mut unused = Times::default();
        let clock = (times.is_some() && thread == 0).then(Instant::now);
        let mut worker = Worker {
            shared: self,
            barrier,
            thread,
            own,
            scratch,
            clock,
            times: times.unwrap_or(&mut unused),
        };
        worker.embed();
        for (index, layer) in self.weights.layers.iter().enumerate() {
            worker.attend(index, layer);
            match &layer.feed_forward {
                FeedForward::Dense(mlp) => worker.dense(index, layer, mlp),
                FeedForward::Experts(experts) => worker.experts(index, layer, experts),
            }
        }
        worker.check();
    }

    pub(super) fn count(&self) -> usize {
        self.tokens.ids.len()
    }

    /// Pieces of the tokens that a product goes over, those that decode apart from those of prompts.
    pub(super) fn blocks(&self) -> usize {
        let decode = self.tokens.decode;
        decode.div_ceil(TOKENS) + (self.count() - decode).div_ceil(TOKENS)
    }

    /// The tokens of a piece, and what multiplies them.
    pub(super) fn block(&self, block: usize) -> (Range<usize>, Kernels) {
        let decode = self.tokens.decode;
        let decoding = decode.div_ceil(TOKENS);
        if block < decoding {
            let end = ((block + 1) * TOKENS).min(decode);
            return (block * TOKENS..end, self.kernels.decoding());
        }
        let start = decode + (block - decoding) * TOKENS;
        (start..(start + TOKENS).min(self.count()), self.kernels)
    }

    /// What multiplies a token.
    pub(super) fn kernels_of(&self, token: usize) -> Kernels {
        if token < self.tokens.decode {
            self.kernels.decoding()
        } else {
            self.kernels
        }
    }

    pub(super) fn counter(&self, layer: usize, phase: Phase) -> &Counter {
        &self.buffers.counters[layer * PHASES + phase as usize]
    }
}

impl Worker<'_, '_> {
    pub(super) fn lap(&mut self, part: usize) {
        if let Some(clock) = &mut self.clock {
            let now = Instant::now();
            self.times[part] += (now - *clock).as_secs_f64();
            *clock = now;
        }
    }

    /// Numbers of each token, and the angles of its position.
    fn embed(&mut self) {
        let shared = self.shared;
        let table = shared.weights.embedding.as_ref().unwrap_or(&shared.weights.head);
        let half = shared.config.head_dim / 2;
        let buffers = shared.buffers;
        let counter = &buffers.counters[shared.weights.layers.len() * PHASES];
        each(counter, shared.count(), FEW, |token| {
            let width = buffers.x.stride();
            // SAFETY: its piece: the rows of its tokens.
            let row = unsafe { std::slice::from_raw_parts_mut(buffers.x.at(token, 0), width) };
            let id = (shared.tokens.ids[token] as usize).min(table.n() - 1);
            table.row(id, row);
            if shared.config.embedding_scale != 1.0 {
                row.iter_mut()
                    .for_each(|number| *number *= shared.config.embedding_scale);
            }
            let position = shared.tokens.positions[token] as f32;
            for (table, frequencies) in shared.config.inverse_frequencies.iter().enumerate() {
                for (i, frequency) in frequencies.iter().enumerate() {
                    let (sin, cos) = (position * frequency).sin_cos();
                    let at = table * 2 * half + i;
                    // SAFETY: as above; `angles` has room for both halves of each table.
                    unsafe {
                        *buffers.angles.at(token, at) = cos * shared.config.rope_scale;
                        *buffers.angles.at(token, half + at) = sin * shared.config.rope_scale;
                    }
                }
            }
        });
        self.barrier.wait();
        self.lap(7);
    }

    /// Whether what came out is made of numbers.
    fn check(&mut self) {
        let shared = self.shared;
        let x = &shared.buffers.x;
        let counter = &shared.buffers.counters[shared.weights.layers.len() * PHASES + 1];
        each(counter, shared.count(), FEW, |token| {
            // SAFETY: written before a barrier; nobody writes now.
            let row = unsafe { std::slice::from_raw_parts(x.at(token, 0), shared.config.hidden_size) };
            if !row.iter().all(|number| number.is_finite()) {
                let mut found = shared.not_finite.lock().unwrap_or_else(|e| e.into_inner());
                found.push(token);
            }
        });
        self.lap(7);
    }
}
