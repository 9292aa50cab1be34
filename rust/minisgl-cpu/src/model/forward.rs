//! One forward on all threads: from token ids to hidden numbers, layer by layer.
//!
//! Each phase deals out pieces through a counter of its own, so each piece has one thread; what a phase writes is read
//! after the next barrier only. This is the reason behind every `unsafe` block here that says "its piece".
//!
//! Keeps true: what a token's numbers become depends on the tokens before it only, not on how pieces fall to threads
//! nor on what else is in the step.
//! Doesn't know: requests, sampling.

#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::attention::{Attention, Call, Plan, Rows, Scratch};
use crate::kernels::{ActsPtr, Kernels, Mode};
use crate::kv::KvPool;
use crate::model::buffers::{Buffers, Own};
use crate::model::config::ModelConfig;
use crate::model::grid::Grid;
use crate::model::weights::{FeedForward, Layer, Linear, Mlp, Weights};
use crate::threads::{Barrier, Counter};
use crate::weights::{Matrix, PANEL};

/// Tokens whose prepared activations stay in a core's cache while panels pass.
const TOKENS: usize = 128;
/// Tokens of a piece of work that goes token by token.
const FEW: usize = 4;
/// Most panels of a piece of a product.
const PANELS: usize = 16;

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
}

pub(super) const PHASES: usize = 13;

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
    pub not_finite: AtomicBool,
    pub threads: usize,
}

/// One thread's view.
pub(super) struct Worker<'a, 'f> {
    pub shared: &'a Forward<'f>,
    pub barrier: &'a Barrier,
    pub thread: usize,
    pub own: &'a mut Own,
    scratch: &'a mut Scratch,
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
        let table = shared
            .weights
            .embedding
            .as_ref()
            .unwrap_or(&shared.weights.head);
        let half = shared.config.head_dim / 2;
        let buffers = shared.buffers;
        let counter = &buffers.counters[shared.weights.layers.len() * PHASES];
        each(counter, shared.count(), FEW, |token| {
            let width = buffers.x.stride();
            // SAFETY: its piece: the rows of its tokens.
            let row = unsafe { std::slice::from_raw_parts_mut(buffers.x.at(token, 0), width) };
            let id = (shared.tokens.ids[token] as usize).min(table.n() - 1);
            table.row(id, row);
            let position = shared.tokens.positions[token] as f32;
            for (i, frequency) in shared.config.inverse_frequencies.iter().enumerate() {
                let (sin, cos) = (position * frequency).sin_cos();
                // SAFETY: as above; `angles` has room for both halves.
                unsafe {
                    *buffers.angles.at(token, i) = cos * shared.config.rope_scale;
                    *buffers.angles.at(token, half + i) = sin * shared.config.rope_scale;
                }
            }
        });
        self.barrier.wait();
        self.lap(7);
    }

    fn attend(&mut self, index: usize, layer: &Layer) {
        let shared = self.shared;
        let (config, buffers) = (shared.config, shared.buffers);
        // one preparation serves all parts
        let whole = layer
            .qkv
            .iter()
            .all(|(_, part)| mode_for(shared.mode, part) == shared.mode);
        let mode = if whole { shared.mode } else { Mode::Exact };
        let acts = self.prepare(
            index,
            Phase::Prepare,
            &buffers.x,
            Some(&layer.attention_norm),
            config.hidden_size,
            mode,
        );
        self.project_all(index, Phase::Qkv, &layer.qkv, acts, &buffers.qkv);
        self.barrier.wait();
        self.lap(1);
        each(
            shared.counter(index, Phase::Rotate),
            shared.count(),
            FEW,
            |token| {
                self.rotate_and_store(index, layer, token);
            },
        );
        self.barrier.wait();
        self.lap(2);
        let call = Call {
            rows: shared.rows,
            kv: shared.kv,
            layer: index,
            queries: buffers.qkv.at(0, 0),
            query_stride: buffers.qkv.stride(),
            out: buffers.attended.at(0, 0),
            out_stride: buffers.attended.stride(),
        };
        let plan = shared.plan;
        while let Some(unit) = shared.counter(index, Phase::Attend).take(plan.units(index)) {
            // SAFETY: its piece; keys and values of this layer are written before the barrier.
            unsafe { shared.attention.run_unit(plan, unit, &call, self.scratch) };
        }
        self.barrier.wait();
        if plan.merges(index) > 0 {
            while let Some(unit) = shared.counter(index, Phase::Merge).take(plan.merges(index)) {
                // SAFETY: its piece; what units left is written before the barrier.
                unsafe { shared.attention.merge(plan, unit, &call) };
            }
            self.barrier.wait();
        }
        self.lap(3);
        let width = config.num_heads * config.head_dim;
        let acts = self.prepare(
            index,
            Phase::PrepareOut,
            &buffers.attended,
            None,
            width,
            mode_for(shared.mode, &layer.out.weight),
        );
        self.add_product(index, Phase::Out, &layer.out, acts);
        self.barrier.wait();
        self.lap(4);
    }

    /// Biases, head norms and rotation of one token, then its keys and values go into their page.
    fn rotate_and_store(&self, index: usize, layer: &Layer, token: usize) {
        let shared = self.shared;
        let (config, buffers, kernels) = (shared.config, shared.buffers, shared.kernels);
        let dim = config.head_dim;
        let (heads, kv_heads) = (config.num_heads, config.num_kv_heads);
        let row = buffers.qkv.at(token, 0);
        let (cos, sin) = (
            buffers.angles.at(token, 0),
            buffers.angles.at(token, dim / 2),
        );
        // SAFETY: its piece: the row of this token in `qkv`; `angles` was written before a barrier.
        unsafe {
            if let Some(bias) = &layer.qkv_bias {
                kernels.add(row, bias.as_ptr(), (heads + 2 * kv_heads) * dim);
            }
            for head in 0..heads + kv_heads {
                let at = row.add(head * dim);
                if let Some((of_queries, of_keys)) = &layer.head_norms {
                    let norm = if head < heads { of_queries } else { of_keys };
                    kernels.rms_norm(at, norm.as_ptr(), dim, config.rms_norm_eps, at);
                }
                kernels.rotate(at, cos, sin, dim / 2);
            }
            let keys = row.add(heads * dim);
            let slot = std::slice::from_ref(&shared.tokens.slots[token]);
            shared
                .kv
                .store(index, slot, keys, keys.add(kv_heads * dim), 0);
        }
    }

    fn dense(&mut self, index: usize, layer: &Layer, mlp: &Mlp) {
        let shared = self.shared;
        let buffers = shared.buffers;
        let acts = self.prepare(
            index,
            Phase::PrepareMlp,
            &buffers.x,
            Some(&layer.mlp_norm),
            shared.config.hidden_size,
            mode_for(shared.mode, &mlp.gate_up.weight),
        );
        let counter = shared.counter(index, Phase::GateUp);
        let groups = Groups::pairs(&mlp.gate_up.weight, shared.threads);
        let blocks = shared.count().div_ceil(TOKENS);
        while let Some(piece) = counter.take(blocks * groups.count) {
            let (block, group) = (piece / groups.count, piece % groups.count);
            let rows = block * TOKENS..((block + 1) * TOKENS).min(shared.count());
            self.gate_and_up(
                mlp,
                acts,
                groups.panels(group),
                rows.clone(),
                &buffers.inner,
                rows.start,
            );
        }
        self.barrier.wait();
        self.lap(5);
        let acts = self.prepare(
            index,
            Phase::PrepareDown,
            &buffers.inner,
            None,
            mlp.inner,
            mode_for(shared.mode, &mlp.down.weight),
        );
        self.add_product(index, Phase::Down, &mlp.down, acts);
        self.barrier.wait();
        self.lap(6);
    }

    /// silu(gate) * up of the rows `rows` of `acts`, into rows of `out` from `first` on, columns of the panel pairs.
    pub(super) fn gate_and_up(
        &mut self,
        mlp: &Mlp,
        acts: ActsPtr,
        panels: Range<usize>,
        rows: Range<usize>,
        out: &Grid,
        first: usize,
    ) {
        let kernels = self.shared.kernels;
        let width = panels.len() * PANEL;
        self.own.both.reserve(rows.len());
        let both = self.own.both.at(0, 0);
        // SAFETY: `both` is this thread's; `acts` was written before a barrier.
        unsafe {
            kernels.matmul(
                &mlp.gate_up.weight,
                panels.clone(),
                acts,
                rows.clone(),
                both,
                width,
                false,
            );
            for row in 0..rows.len() {
                let at = both.add(row * width);
                if let Some(bias) = &mlp.gate_up.bias {
                    kernels.add(at, bias[panels.start * PANEL..].as_ptr(), width);
                }
                for pair in 0..panels.len() / 2 {
                    let column = (panels.start / 2 + pair) * PANEL;
                    let gate = at.add(2 * pair * PANEL);
                    // SAFETY: its piece: these columns of these rows.
                    kernels.silu_mul(gate, gate.add(PANEL), PANEL, out.at(first + row, column));
                }
            }
        }
    }

    /// What a product reads: the rows of `from`, perhaps normalised. One row each thread prepares for itself, more rows
    /// are dealt out.
    fn prepare(
        &mut self,
        index: usize,
        phase: Phase,
        from: &Grid,
        norm: Option<&[f32]>,
        width: usize,
        mode: Mode,
    ) -> ActsPtr {
        let shared = self.shared;
        let alone = shared.count() == 1;
        let acts = if alone {
            self.own.acts.writer_as(1, width, mode)
        } else {
            shared.buffers.acts.writer_as(shared.count(), width, mode)
        };
        let normed = self.own.row.at(0, 0);
        let mut one = |token: usize| {
            let mut at = from.at(token, 0);
            // SAFETY: its piece: a row of `acts` (alone: of this thread's own); `from` was written before a barrier.
            unsafe {
                if let Some(norm) = norm {
                    shared.kernels.rms_norm(
                        at,
                        norm.as_ptr(),
                        width,
                        shared.config.rms_norm_eps,
                        normed,
                    );
                    at = normed;
                }
                shared.kernels.prepare(at, acts, token);
            }
        };
        if alone {
            one(0);
        } else {
            each(shared.counter(index, phase), shared.count(), FEW, &mut one);
            self.barrier.wait();
        }
        self.lap(0);
        acts
    }

    /// The products of several matrices with the same activations, side by side in `out`.
    fn project_all(
        &mut self,
        index: usize,
        phase: Phase,
        parts: &[(usize, Matrix)],
        acts: ActsPtr,
        out: &Grid,
    ) {
        let shared = self.shared;
        let blocks = shared.count().div_ceil(TOKENS);
        let groups: Vec<Groups> = parts
            .iter()
            .map(|(_, matrix)| Groups::of(matrix, shared.threads))
            .collect();
        let all: usize = groups.iter().map(|group| group.count).sum();
        while let Some(piece) = shared.counter(index, phase).take(blocks * all) {
            let (block, mut group) = (piece / all, piece % all);
            let rows = block * TOKENS..((block + 1) * TOKENS).min(shared.count());
            for ((column, matrix), groups) in parts.iter().zip(&groups) {
                if group < groups.count {
                    let panels = groups.panels(group);
                    let to = out.at(rows.start, column + panels.start * PANEL);
                    // SAFETY: its piece: these columns of these rows; `acts` was written before a barrier.
                    unsafe {
                        shared
                            .kernels
                            .matmul(matrix, panels, acts, rows, to, out.stride(), false)
                    };
                    break;
                }
                group -= groups.count;
            }
        }
    }

    /// Add a product to the hidden numbers.
    fn add_product(&mut self, index: usize, phase: Phase, linear: &Linear, acts: ActsPtr) {
        let shared = self.shared;
        let x = &shared.buffers.x;
        let groups = Groups::of(&linear.weight, shared.threads);
        let blocks = shared.count().div_ceil(TOKENS);
        while let Some(piece) = shared.counter(index, phase).take(blocks * groups.count) {
            let (block, group) = (piece / groups.count, piece % groups.count);
            let rows = block * TOKENS..((block + 1) * TOKENS).min(shared.count());
            let panels = groups.panels(group);
            let (column, width) = (panels.start * PANEL, panels.len() * PANEL);
            let to = x.at(rows.start, column);
            // SAFETY: its piece: these columns of these rows; `acts` was written before a barrier.
            unsafe {
                shared.kernels.matmul(
                    &linear.weight,
                    panels,
                    acts,
                    rows.clone(),
                    to,
                    x.stride(),
                    true,
                );
                if let Some(bias) = &linear.bias {
                    for row in rows {
                        shared
                            .kernels
                            .add(x.at(row, column), bias[column..].as_ptr(), width);
                    }
                }
            }
        }
    }

    /// Whether what came out is made of numbers.
    fn check(&mut self) {
        let shared = self.shared;
        let x = &shared.buffers.x;
        let counter = &shared.buffers.counters[shared.weights.layers.len() * PHASES + 1];
        each(counter, shared.count(), FEW, |token| {
            // SAFETY: written before a barrier; nobody writes now.
            let row =
                unsafe { std::slice::from_raw_parts(x.at(token, 0), shared.config.hidden_size) };
            if !row.iter().all(|number| number.is_finite()) {
                shared.not_finite.store(true, Ordering::Relaxed);
            }
        });
        self.lap(7);
    }
}

/// What a matrix is multiplied with where `mode` is asked for: only integers are multiplied with integers.
pub(super) fn mode_for(mode: Mode, matrix: &Matrix) -> Mode {
    if mode.serves(matrix.form()) {
        mode
    } else {
        Mode::Exact
    }
}

/// Call `work` with each of `0..total` that falls to this thread, `size` of them at a time.
pub(super) fn each(counter: &Counter, total: usize, size: usize, mut work: impl FnMut(usize)) {
    while let Some(piece) = counter.take(total.div_ceil(size)) {
        (piece * size..((piece + 1) * size).min(total)).for_each(&mut work);
    }
}

/// The panels of a matrix in pieces for `threads`: small enough to share evenly, large enough to be worth a call.
pub(super) struct Groups {
    size: usize,
    panels: usize,
    /// How many.
    pub count: usize,
}

impl Groups {
    /// Of single panels.
    pub fn of(matrix: &Matrix, threads: usize) -> Self {
        Self::sized(matrix.panels(), threads, 1)
    }

    /// Of pairs of panels.
    pub fn pairs(matrix: &Matrix, threads: usize) -> Self {
        Self::sized(matrix.panels(), threads, 2)
    }

    fn sized(panels: usize, threads: usize, unit: usize) -> Self {
        let size = (panels / (8 * threads))
            .clamp(2, PANELS)
            .next_multiple_of(unit);
        Self {
            size,
            panels,
            count: panels.div_ceil(size),
        }
    }

    /// Of piece `group`.
    pub fn panels(&self, group: usize) -> Range<usize> {
        group * self.size..((group + 1) * self.size).min(self.panels)
    }
}
