//! Attention and its surroundings: norms, RoPE and storage of queries, keys and values, per-head matmuls, gates.
//!
//! Invariants: keys and values of a step are in their pages before any of its rows reads them.

#![allow(unsafe_code)]

use std::ops::Range;
use std::slice::{from_raw_parts, from_raw_parts_mut, from_ref};

use minisgl_kernels::attention::Call;
use minisgl_kernels::{Kernels, plain};

use crate::model::operation::{Attend, Heads, PerHead, TokenStep};
use crate::model::worker::{Forward, ITEM_TOKENS, Worker, each};

impl Worker<'_, '_> {
    pub(super) fn attend(&mut self, attend: &Attend) {
        let (shared, layer) = (self.shared, attend.layer);
        let (queries, column) = (shared.buffers.grid(attend.queries.0), attend.queries.1);
        let attended = shared.buffers.grid(attend.to);
        let call = Call {
            rows: shared.rows,
            kv: shared.kv,
            layer,
            kv_layer: attend.kv_of.1,
            queries: queries.at(0, column),
            query_stride: queries.stride(),
            out: attended.at(0, 0),
            out_stride: attended.stride(),
            sinks: attend.sinks.as_deref(),
            distances: shared.weights.distances.as_ref(),
        };
        let (attention, plan) = shared.attention.for_layer(layer);
        let counter = self.counter();
        while let Some(unit) = counter.claim(plan.units(layer)) {
            // SAFETY: this thread's work item; keys and values of this layer are written before the barrier.
            unsafe { attention.run_unit(plan, unit, &call, self.scratch) };
        }
        self.barrier.wait();
        if plan.merges(layer) > 0 {
            let counter = self.counter();
            while let Some(unit) = counter.claim(plan.merges(layer)) {
                // SAFETY: this thread's work item; partial results are written before the barrier.
                unsafe { attention.merge(plan, unit, &call) };
            }
            self.barrier.wait();
        }
    }

    pub(super) fn each_token(&mut self, steps: &[TokenStep]) {
        let shared = self.shared;
        each(self.counter(), shared.count(), shared.store_item_tokens(), |token| {
            for step in steps {
                // SAFETY: this thread's work item: the row of this token; angles were written before a barrier.
                unsafe { shared.token_step(step, token) };
            }
        });
        self.barrier.wait();
    }

    pub(super) fn gate(&mut self, count: usize) {
        let (shared, buffers) = (self.shared, self.shared.buffers);
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            let [gates, attended] = [&buffers.qkv, &buffers.attended].map(|grid| grid.at(token, 0));
            // SAFETY: this thread's work item: this token's rows, written before a barrier.
            unsafe { plain::open(from_raw_parts_mut(attended, count), from_raw_parts(gates, count)) };
        });
        self.barrier.wait();
    }

    /// Runs the matmuls of each head. Work items are (head, block of tokens).
    pub(super) fn per_head(&mut self, per_head: &PerHead) {
        let (shared, heads) = (self.shared, per_head.matrices.len());
        let counter = self.counter();
        while let Some(piece) = counter.claim(shared.blocks() * heads) {
            let (rows, kernels) = shared.block(piece / heads);
            // SAFETY: this thread's work item: this head of these rows; inputs were written before a barrier.
            unsafe { self.one_head(per_head, piece % heads, rows, kernels) };
        }
        self.barrier.wait();
    }

    /// Multiplies the columns of one head for `rows`, and copies (and rotates) the RoPE columns next to the output.
    ///
    /// # Safety
    /// No other thread may write to the inputs or use the outputs meanwhile.
    unsafe fn one_head(&self, per_head: &PerHead, head: usize, rows: Range<usize>, kernels: Kernels) {
        let (shared, matrix) = (self.shared, &per_head.matrices[head]);
        let [from, to] = [per_head.from, per_head.to].map(|(rows, size)| (shared.buffers.grid(rows), head * size));
        let (count, mode) = (rows.len(), shared.mode.with(matrix));
        let acts = self.own.of_head.writer_as(count, matrix.k(), mode);
        let (beside, rotation) = per_head.beside;
        // SAFETY: guaranteed by the caller; `acts` belongs to this thread.
        unsafe {
            for (row, token) in rows.clone().enumerate() {
                kernels.prepare(from.0.at(token, from.1), acts, row);
            }
            let out = to.0.at(rows.start, to.1);
            kernels.matmul(matrix, 0..matrix.panels(), acts, 0..count, out, to.0.stride(), false);
            for token in rows.filter(|_| beside > 0) {
                let numbers = to.0.at(token, to.1 + matrix.n());
                numbers.copy_from_nonoverlapping(from.0.at(token, from.1 + matrix.k()), beside);
                if let Some(by) = rotation {
                    let (cos, sin) = shared.angles(by, token);
                    shared.kernels.rotate(numbers, cos, sin, by.half);
                }
            }
        }
    }
}

impl Forward<'_> {
    /// Runs one operation on the projected row of one token (copy, norm, RoPE, scale or KV store).
    ///
    /// # Safety
    /// No other thread may use the token's row meanwhile.
    unsafe fn token_step(&self, step: &TokenStep, token: usize) {
        let kernels = &self.kernels;
        let column = |at: usize| self.buffers.qkv.at(token, at);
        // SAFETY: guaranteed by the caller: columns of the row.
        let multiply = |heads: Heads, by: f32| unsafe {
            let numbers = from_raw_parts_mut(column(heads.at), heads.count * heads.size);
            numbers.iter_mut().for_each(|number| *number *= by);
        };
        match step {
            TokenStep::Copy(heads, to) => {
                // SAFETY: guaranteed by the caller.
                unsafe { column(*to).copy_from_nonoverlapping(column(heads.at), heads.count * heads.size) };
            }
            TokenStep::Norm(norm, heads, step) => {
                let first = column(heads.at);
                for head in 0..heads.count {
                    // SAFETY: guaranteed by the caller: columns of the row.
                    unsafe {
                        let numbers = first.add(head * heads.size);
                        norm.apply(kernels, numbers, (head * step, heads.size), numbers);
                    }
                }
            }
            TokenStep::Rotate(heads, by) => {
                let ((cos, sin), first) = (self.angles(*by, token), column(heads.at));
                for head in 0..heads.count {
                    // SAFETY: guaranteed by the caller: columns of the row; angles were written before a barrier.
                    unsafe { kernels.rotate(first.add(head * heads.size), cos, sin, by.half) };
                }
            }
            TokenStep::Scale(heads, by) => multiply(*heads, *by),
            TokenStep::Grow(queries, by) => {
                let turns = ((self.tokens.positions[token] + by.first) / by.every) as f32;
                multiply(*queries, by.beta.mul_add(turns.ln_1p(), 1.0));
            }
            TokenStep::Store { layer, keys, values } => {
                let slot = from_ref(&self.tokens.slots[token]);
                // SAFETY: guaranteed by the caller.
                unsafe { self.kv.store(*layer, slot, column(*keys), column(*values), 0) };
            }
        }
    }
}
