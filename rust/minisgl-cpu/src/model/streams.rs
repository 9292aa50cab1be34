//! Several residual streams (AltUp, arXiv 2301.13310): a layer sees the first, before it each is predicted from all,
//! after it all are corrected. A low-rank residual (Laurel, arXiv 2411.07501) runs alongside attention.
//!
//! Invariants: the mixing depends on one token's hidden states only, and sums run in one order.

#![allow(unsafe_code)]

use std::f32::consts::FRAC_1_SQRT_2;
use std::slice::{from_raw_parts, from_raw_parts_mut};

use minisgl_kernels::plain;

use crate::model::buffers::Buffers;
use crate::model::config::MAX_STREAMS;
use crate::model::held::Norm;
use crate::model::operation::Mixing;
use crate::model::worker::{ITEM_TOKENS, Worker, each};

/// Lower bound of a stream's mean square when it is scaled to the first one's.
const MIN_MEAN_SQUARE: f32 = 1e-5;

fn mean_square(row: &[f32]) -> f32 {
    plain::dot(row, row) / row.len() as f32
}

/// Scales `row` so that its RMS equals that of `like`.
fn match_rms(row: &mut [f32], like: &[f32]) {
    let (target, current) = (mean_square(like).sqrt(), mean_square(row).max(MIN_MEAN_SQUARE).sqrt());
    row.iter_mut().for_each(|number| *number = *number * target / current);
}

/// Returns the dot product of `weights` and `mix_weights`.
fn weighted(weights: &[f32], mix_weights: &[f32]) -> f32 {
    weights
        .iter()
        .zip(mix_weights)
        .fold(0.0, |sum, (weight, share)| sum + weight * share)
}

impl Worker<'_, '_> {
    /// Scales all streams after the first to its RMS.
    pub(super) fn scale_streams(&mut self) {
        let (shared, size) = (self.shared, self.shared.hidden);
        let buffers = shared.buffers;
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            // SAFETY: this thread's work item: the rows of this token, written before a barrier.
            unsafe {
                let first = from_raw_parts(buffers.x.at(token, 0), size);
                for stream in &buffers.streams {
                    match_rms(from_raw_parts_mut(stream.at(token, 0), size), first);
                }
            }
        });
        self.barrier.wait();
    }

    /// Adds a stream's projection, scaled to the first one's RMS, to the sum. After the last, the first is their mean.
    pub(super) fn sum_streams(&mut self, stream: usize, last: usize) {
        let (shared, size) = (self.shared, self.shared.hidden);
        let buffers = shared.buffers;
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            // SAFETY: this thread's work item: the rows of this token, written before a barrier.
            unsafe {
                let [x, sum, row] = [&buffers.x, &buffers.predicted, &buffers.laurel].map(|grid| grid.at(token, 0));
                let (x, sum) = (from_raw_parts_mut(x, size), from_raw_parts_mut(sum, size));
                let row = from_raw_parts_mut(row, size);
                match_rms(row, x);
                if stream == 0 {
                    sum.copy_from_slice(x);
                }
                sum.iter_mut().zip(&*row).for_each(|(sum, number)| *sum += *number);
                if stream + 1 == last {
                    x.iter_mut()
                        .zip(&*sum)
                        .for_each(|(x, sum)| *x = *sum / (last + 1) as f32);
                }
            }
        });
        self.barrier.wait();
    }

    /// Predicts each stream from all streams, and saves the first one's prediction.
    pub(super) fn predict(&mut self, part: &Mixing) {
        let shared = self.shared;
        let (buffers, size) = (shared.buffers, shared.hidden);
        let counter = self.counter();
        each(counter, shared.count(), ITEM_TOKENS, |token| {
            let (mix_weights, count) = (self.mix_weights(part, token), buffers.streams.len() + 1);
            let mix_weights = &mix_weights[..count];
            let mut mix = [[0.0; MAX_STREAMS]; MAX_STREAMS];
            for (row, weights) in part.predict.chunks_exact(count).enumerate() {
                mix[row / count][row % count] = weighted(weights, mix_weights);
            }
            let rows = rows(buffers, token);
            for at in 0..size {
                // SAFETY: this thread's work item: the rows of this token, written before a barrier.
                unsafe {
                    let mut old = [0.0; MAX_STREAMS];
                    for (old, row) in old.iter_mut().zip(&rows[..count]) {
                        *old = *row.add(at);
                    }
                    for (to, row) in rows[..count].iter().enumerate() {
                        *row.add(at) = weighted(&mix[to][..count], &old[..count]) + old[to];
                    }
                    *buffers.predicted.at(token, 0).add(at) = *rows[0].add(at);
                }
            }
        });
        self.barrier.wait();
    }

    /// Corrects all streams by the layer's change of the first, which is then the per-layer gate's input, scaled.
    pub(super) fn correct(&mut self, part: &Mixing) {
        let shared = self.shared;
        let (buffers, size) = (shared.buffers, shared.hidden);
        let counter = self.counter();
        each(counter, shared.count(), ITEM_TOKENS, |token| {
            let (mix_weights, count) = (self.mix_weights(part, token), buffers.streams.len() + 1);
            let mut factor = [0.0; MAX_STREAMS];
            for (factor, weights) in factor.iter_mut().zip(part.correct.chunks_exact(count)) {
                *factor = weighted(weights, &mix_weights[..count]) + 1.0;
            }
            let rows = rows(buffers, token);
            for at in 0..size {
                // SAFETY: this thread's work item: the rows of this token, written before a barrier.
                unsafe {
                    let predicted = *buffers.predicted.at(token, 0).add(at);
                    let new = *rows[0].add(at) - predicted;
                    *rows[0].add(at) = predicted;
                    for (row, factor) in rows[..count].iter().zip(&factor) {
                        *row.add(at) += new * factor;
                    }
                    *buffers.side.at(token, 0).add(at) = *rows[0].add(at) * part.scale[at];
                }
            }
        });
        self.barrier.wait();
    }

    /// Normalizes the low-rank residual and adds attention's input to it.
    pub(super) fn laurel(&mut self, before: Option<&Norm>, norm: &Norm) {
        let (shared, size) = (self.shared, self.shared.hidden);
        let scratch = self.own.row.at(0, 0);
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            let row = shared.buffers.laurel.at(token, 0);
            // SAFETY: this thread's work item: the row of this token, written before a barrier; `scratch` is this
            // thread's.
            unsafe {
                norm.apply(&shared.kernels, row, (0, size), row);
                shared.kernels.add(row, shared.normed(before, token, scratch), size);
            }
        });
        self.barrier.wait();
    }

    /// Merges hidden states and low-rank residual: (hidden + residual) / sqrt 2.
    pub(super) fn add_laurel(&mut self) {
        let shared = self.shared;
        let (buffers, size) = (shared.buffers, shared.hidden);
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            // SAFETY: this thread's work item: the rows of this token, written before a barrier.
            unsafe {
                let x = from_raw_parts_mut(buffers.x.at(token, 0), size);
                let beside = from_raw_parts(buffers.laurel.at(token, 0), size);
                x.iter_mut()
                    .zip(beside)
                    .for_each(|(x, beside)| *x = (*x + beside) * FRAC_1_SQRT_2);
            }
        });
        self.barrier.wait();
    }

    /// Normalizes the side buffer and adds it to all streams but the first.
    pub(super) fn add_to_streams(&mut self, norm: &Norm) {
        let shared = self.shared;
        let (buffers, size) = (shared.buffers, shared.hidden);
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            let row = buffers.side.at(token, 0);
            // SAFETY: this thread's work item: the rows of this token, written before a barrier.
            unsafe {
                norm.apply(&shared.kernels, row, (0, size), row);
                for stream in &buffers.streams {
                    shared.kernels.add(stream.at(token, 0), row, size);
                }
            }
        });
        self.barrier.wait();
    }

    /// Returns the router's output for a token: one mixing weight per stream, from the first stream.
    fn mix_weights(&self, part: &Mixing, token: usize) -> [f32; MAX_STREAMS] {
        let (shared, size) = (self.shared, self.shared.hidden);
        // SAFETY: the row belongs to this thread; no other thread writes to the token's rows.
        let normed = unsafe {
            let normalized = shared.normed(Some(&part.norm), token, self.own.row.at(0, 0));
            from_raw_parts(normalized, size)
        };
        let mut mix_weights = [0.0; MAX_STREAMS];
        for (share, router) in mix_weights.iter_mut().zip(part.router.chunks_exact(size)) {
            *share = plain::tanh(plain::dot(normed, router));
        }
        mix_weights
    }
}

/// Returns the addresses of a token's rows in all streams; null after the last.
fn rows(buffers: &Buffers, token: usize) -> [*mut f32; MAX_STREAMS] {
    let mut rows = [std::ptr::null_mut(); MAX_STREAMS];
    let all = [&buffers.x].into_iter().chain(&buffers.streams);
    rows.iter_mut()
        .zip(all)
        .for_each(|(row, grid)| *row = grid.at(token, 0));
    rows
}
