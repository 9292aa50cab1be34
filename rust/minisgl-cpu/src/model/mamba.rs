//! Mamba-2 (arXiv 2405.21060), without its projections: a convolution, a decaying state matrix per head, and a gate.
//!
//! A layer's state is the convolution's last inputs, then each head's matrix, [size, head_dim].

#![allow(unsafe_code)]

use minisgl_kernels::mamba::{By, advance, leave, silu_all, step};

use crate::model::operation::Mamba;
use crate::model::worker::{ITEM_TOKENS, Worker, each};

impl Worker<'_, '_> {
    pub(super) fn mamba(&mut self, mamba: &Mamba) {
        let (shared, index) = (self.shared, mamba.layer);
        let (sizes, buffers, isa) = (&mamba.sizes, shared.buffers, shared.kernels.isa());
        let inner = sizes.inner();
        let Some(states) = &shared.tokens.states else {
            return;
        };
        let convolution = &mamba.convolution;
        let counter = self.counter();
        shared.each_row(counter, convolution.pieces(), |row, tokens, piece| {
            let channels = convolution.channels(piece);
            let (own, slot) = (convolution.of_tail(&channels), shared.rows.slots[row] as usize);
            // SAFETY: this thread's work item: these channels of this row; the input was written before a barrier.
            unsafe {
                states.advance(index, (row, slot), tokens, &own, |tail, token| {
                    let at = buffers.qkv.at(token, inner + channels.start);
                    let numbers = std::slice::from_raw_parts_mut(at, channels.len());
                    convolution.pass(isa, channels.clone(), tail, numbers);
                    silu_all(isa, numbers);
                });
            }
        });
        self.barrier.wait();
        let counter = self.counter();
        shared.each_row(counter, sizes.heads, |row, tokens, head| {
            let (first, count) = (sizes.head_offset(head), sizes.size * sizes.head_dim);
            let (own, slot) = (first..first + count, shared.rows.slots[row] as usize);
            // SAFETY: this thread's work item: this head of this row; inputs were written before a barrier.
            unsafe {
                states.advance(
                    index,
                    (row, slot),
                    tokens,
                    std::slice::from_ref(&own),
                    |state, token| {
                        let state = std::slice::from_raw_parts_mut(state.add(first), count);
                        self.scan_head(mamba, (head, token), state);
                    },
                );
            }
        });
        self.barrier.wait();
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            // SAFETY: this thread's work item: this token's rows, written before a barrier.
            let (gate, out) = unsafe {
                (
                    std::slice::from_raw_parts(buffers.qkv.at(token, 0), inner),
                    std::slice::from_raw_parts_mut(buffers.attended.at(token, 0), inner),
                )
            };
            leave(isa, mamba.gated_norm(), gate, out);
        });
        self.barrier.wait();
    }

    /// Advances one head by one token: updates `state` and writes the head's output.
    ///
    /// # Safety
    /// No thread may write to the token's inputs meanwhile, and no other thread may use this head's output.
    unsafe fn scan_head(&self, mamba: &Mamba, (head, token): (usize, usize), state: &mut [f32]) {
        let (sizes, buffers) = (&mamba.sizes, self.shared.buffers);
        let (inner, size, dim) = (sizes.inner(), sizes.size, sizes.head_dim);
        let group = head / (sizes.heads / sizes.groups);
        let of_b = 2 * inner + group * size;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let dt = *buffers.qkv.at(token, sizes.projected() - sizes.heads + head);
            let dt = step(dt * sizes.factors[4] + mamba.step_bias[head], sizes.steps());
            let by = By {
                dt,
                decay: (dt * mamba.decay_rates[head]).exp(),
                past: mamba.skip[head],
            };
            let x = buffers.attended.at(token, head * dim);
            x.copy_from_nonoverlapping(buffers.qkv.at(token, inner + head * dim), dim);
            let x = std::slice::from_raw_parts_mut(x, dim);
            let b = std::slice::from_raw_parts(buffers.qkv.at(token, of_b), size);
            let c = std::slice::from_raw_parts(buffers.qkv.at(token, of_b + sizes.groups * size), size);
            advance(self.shared.kernels.isa(), by, b, c, state, x);
        }
    }
}
