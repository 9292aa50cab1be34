//! Forward pass on all threads: from token ids to hidden states, operation by operation.
//!
//! An operation deals out work items through its own counters, so each item belongs to one thread; other threads read
//! its output only after the next barrier. Every `unsafe` block that says "this thread's work item" relies on this.
//!
//! Invariants: a token's result depends only on the tokens that it may attend to, not on the distribution of work to
//! threads, nor on other rows of the step.

#![allow(unsafe_code)]

use std::ops::Range;
use std::time::Instant;

use minisgl_kernels::attention::Scratch;

use crate::model::buffers::{COUNTERS, ThreadBuffers};
use crate::model::held::Norm;
use crate::model::operation::{Angles, Embed, Operation, SumPerLayer};
use crate::model::worker::{Forward, ITEM_TOKENS, Times, Worker, each};
use crate::threads::Barrier;

impl Forward<'_> {
    /// Runs the `operations`, by number, as one thread of the pool. `own`, `scratch` and `times` belong to this thread.
    pub fn run(
        &self,
        operations: &Range<usize>,
        thread: usize,
        barrier: &Barrier,
        own: &mut ThreadBuffers,
        scratch: &mut Scratch,
        times: Option<&mut Times>,
    ) {
        let mut unused = Times::default();
        let clock = (times.is_some() && thread == 0).then(Instant::now);
        let mut worker = Worker {
            shared: self,
            barrier,
            thread,
            next: 0,
            end: 0,
            own,
            scratch,
            clock,
            times: times.unwrap_or(&mut unused),
        };
        let chosen = self.weights.operations().enumerate().take(operations.end);
        for (number, operation) in chosen.skip(operations.start) {
            (worker.next, worker.end) = (number * COUNTERS, (number + 1) * COUNTERS);
            worker.run(operation);
            worker.lap(operation.part());
        }
    }
}

impl Forward<'_> {
    /// Writes the cosines and sines of a token's position.
    ///
    /// # Safety
    /// No other thread may use the token's row of angles meanwhile.
    pub(super) unsafe fn write_angles(&self, angles: &Angles, token: usize) {
        let axes = self.tokens.axes.get(token).filter(|_| !angles.axes.is_empty());
        let (position, mut first) = (self.tokens.positions[token] as f32, 0);
        for (frequencies, scale) in &angles.tables {
            let half = frequencies.len();
            for (i, frequency) in frequencies.iter().enumerate() {
                let position = axes.map_or(position, |axes| axes[angles.axes[i]] as f32);
                let (sin, cos) = (position * frequency).sin_cos();
                let at = first + i;
                // SAFETY: guaranteed by the caller; `angles` has columns for cosines and sines of each table.
                unsafe {
                    *self.buffers.angles.at(token, at) = cos * scale;
                    *self.buffers.angles.at(token, half + at) = sin * scale;
                }
            }
            first += 2 * half;
        }
    }
}

impl Worker<'_, '_> {
    fn run(&mut self, operation: &Operation) {
        match operation {
            Operation::Embed(embed) => self.embed(embed),
            Operation::Patches(embed) => self.patches(embed),
            Operation::Tap(index) => self.tap(*index),
            Operation::AddFeatures(layer) => self.add_features(*layer),
            Operation::Project(project) => self.project(project),
            Operation::EachToken(steps) => self.each_token(steps),
            Operation::PerHead(per_head) => self.per_head(per_head),
            Operation::Attend(attend) => self.attend(attend),
            Operation::Gate(count) => self.gate(*count),
            Operation::Convolve(convolve) => self.convolve(convolve),
            Operation::Delta(delta) => self.delta(delta),
            Operation::Mamba(mamba) => self.mamba(mamba),
            Operation::GateUp(mlp) => self.gate_up(mlp),
            Operation::Route(route) => self.route(route),
            Operation::Experts(experts) => self.experts(experts),
            Operation::Combine(combine) => self.combine(combine),
            Operation::Add(add) => self.add(add),
            Operation::Norm(norm) => self.normalise(norm),
            Operation::SumPerLayer(sum) => self.sum_per_layer(sum),
            Operation::GatePerLayer(activation, size, at) => self.gate_per_layer(*activation, *size, *at),
            Operation::AddToStreams(norm) => self.add_to_streams(norm),
            Operation::ScaleStreams => self.scale_streams(),
            Operation::Predict(mixing) => self.predict(mixing),
            Operation::Laurel { before, norm } => self.laurel(before.as_deref(), norm),
            Operation::AddLaurel => self.add_laurel(),
            Operation::Correct(mixing) => self.correct(mixing),
            Operation::SumStreams(stream, count) => self.sum_streams(*stream, *count),
            Operation::JoinNext(embedding, hidden) => self.join_next(embedding, hidden),
            Operation::Check => self.check(),
        }
    }

    /// Writes each token's embedding, and the RoPE angles of its position.
    fn embed(&mut self, embed: &Embed) {
        let shared = self.shared;
        let table = embed.table.as_ref().unwrap_or(&shared.weights.head);
        let buffers = shared.buffers;
        let width = buffers.x.stride();
        // SAFETY: a row of this thread, at least as wide as a hidden state.
        let learned = unsafe { std::slice::from_raw_parts_mut(self.own.row.at(0, 0), width) };
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            // SAFETY: this thread's work item: the rows of its tokens.
            let row = unsafe { std::slice::from_raw_parts_mut(buffers.x.at(token, 0), width) };
            let id = (shared.tokens.ids[token] as usize).min(table.n() - 1);
            table.row(id, row);
            if embed.scale != 1.0 {
                row.iter_mut().for_each(|number| *number *= embed.scale);
            }
            if let Some(features) = shared.tokens.features.get(token).copied().flatten() {
                row[..shared.hidden].copy_from_slice(&features[..shared.hidden]);
            }
            let position = shared.tokens.positions[token];
            let kind = shared.tokens.types.get(token).copied().unwrap_or_default();
            let added = [
                (&embed.token_types, kind as usize),
                (&embed.positions, position as usize + embed.first_position),
            ];
            for (table, at) in added {
                let Some(table) = table else { continue };
                table.row(at, learned);
                row.iter_mut()
                    .zip(&*learned)
                    .for_each(|(number, learned)| *number += *learned);
            }
            if let Some(norm) = &embed.norm {
                let at = row.as_mut_ptr();
                // SAFETY: the row has `hidden` elements.
                unsafe { norm.apply(&shared.kernels, at, (0, shared.hidden), at) };
            }
            // SAFETY: this thread's work item: the rows of its tokens.
            unsafe { shared.write_angles(&embed.angles, token) };
        });
        self.barrier.wait();
    }

    /// Computes the per-layer inputs of each token: half from its embedding, half from its id.
    fn sum_per_layer(&mut self, sum: &SumPerLayer) {
        let (shared, buffers) = (self.shared, self.shared.buffers);
        let size = sum.size;
        let (of_model, of_id) = ((shared.hidden as f32).sqrt().recip(), (size as f32).sqrt());
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            let mut embedding = vec![0.0_f32; buffers.per_layer.stride()];
            // like transformers: an id beyond the table counts as 0
            let id = Some(shared.tokens.ids[token] as usize).filter(|id| *id < sum.embedding.n());
            sum.embedding.row(id.unwrap_or(0), &mut embedding);
            // SAFETY: this thread's work item: the row of this token, written before a barrier.
            let row = unsafe { std::slice::from_raw_parts_mut(buffers.per_layer.at(token, 0), sum.layers * size) };
            row.iter_mut().for_each(|number| *number *= of_model);
            for (part, embedding) in row.chunks_mut(size).zip(embedding.chunks(size)) {
                let at = part.as_mut_ptr();
                // SAFETY: the part has `size` elements, like the norm.
                unsafe { sum.norm.apply(&shared.kernels, at, (0, size), at) };
                for (number, embedding) in part.iter_mut().zip(embedding) {
                    *number = (*number + embedding * of_id) * std::f32::consts::FRAC_1_SQRT_2;
                }
            }
        });
        self.barrier.wait();
    }

    /// Writes the input of the MTP layer: each token's normalized embedding and hidden state. Ids are those of the next
    /// tokens.
    fn join_next(&mut self, embedding: &Norm, hidden: &Norm) {
        let (shared, size) = (self.shared, self.shared.hidden);
        let (table, scale) = shared.weights.embedding();
        let own = self.own.row.at(0, 0);
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            let id = (shared.tokens.ids[token] as usize).min(table.n() - 1);
            let out = &shared.buffers.inner;
            // SAFETY: `own` is this thread's, and as wide as a hidden state; the row of `out` is this thread's work
            // item, and twice as wide; hidden states were written before a barrier.
            unsafe {
                let row = std::slice::from_raw_parts_mut(own, size);
                table.row(id, row);
                row.iter_mut().for_each(|number| *number *= scale);
                embedding.apply(&shared.kernels, own, (0, size), out.at(token, 0));
                let last = shared.normed(shared.weights.norm.as_ref(), token, own);
                hidden.apply(&shared.kernels, last, (0, size), out.at(token, size));
            }
        });
        self.barrier.wait();
    }

    /// Records the tokens whose hidden states are not finite.
    fn check(&mut self) {
        let shared = self.shared;
        let x = &shared.buffers.x;
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            // SAFETY: written before a barrier; no thread writes now.
            if !unsafe { shared.kernels.finite(x.at(token, 0), shared.hidden) } {
                let mut not_finite = shared.not_finite.lock().unwrap_or_else(|e| e.into_inner());
                not_finite.push(token);
            }
        });
    }
}
