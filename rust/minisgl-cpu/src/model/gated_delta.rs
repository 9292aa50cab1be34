//! Gated delta net (arXiv 2412.06464) between its projections: convolution, recurrence of each head's state, norm,
//! gate.

#![allow(unsafe_code)]

use std::ops::Range;

use minisgl_kernels::convolution::CHANNELS;
use minisgl_kernels::delta_rule::{BLOCK, Recurrence, decay};
use minisgl_kernels::plain;

use crate::model::delta::Delta;
use crate::model::worker::{ITEM_TOKENS, Worker, each};

/// Epsilon of the query and key normalization, added to the sum of squares. It does not depend on the model's norm_eps.
const EPS: f32 = 1e-6;
static ONES: [f32; CHANNELS] = [1.0; CHANNELS];

impl Worker<'_, '_> {
    pub(super) fn delta(&mut self, delta: &Delta) {
        let (shared, index) = (self.shared, delta.layer);
        let (net, buffers, slots) = (&delta.net, shared.buffers, shared.rows.slots);
        let Some(states) = &shared.tokens.states else {
            return;
        };
        let heads = 2 * net.key_heads + net.value_heads;
        let counter = self.counter();
        shared.each_row(counter, heads + 1, |row, tokens, head| {
            if head == heads {
                // SAFETY: this thread's work item: these columns of this row's tokens, written before a barrier.
                tokens.for_each(|token| unsafe { self.decays_and_rates(delta, token) });
                return;
            }
            let channels = delta.channels(head);
            let own = delta.convolution.of_tail(&channels);
            let (count, scales) = (channels.len(), delta.scales(head));
            // SAFETY: this thread's work item: these channels of this row; the input was written before a barrier.
            unsafe {
                states.advance(index, (row, slots[row] as usize), tokens, &own, |tail, token| {
                    let at = buffers.qkv.at(token, channels.start);
                    let numbers = std::slice::from_raw_parts_mut(at, count);
                    delta
                        .convolution
                        .pass(shared.kernels.isa(), channels.clone(), tail, numbers);
                    shared.kernels.silu_mul(at, ONES.as_ptr(), count, at);
                    if let Some(scales) = scales {
                        let eps = EPS / count as f32;
                        shared.kernels.rms_norm(at, scales.as_ptr(), count, eps, at);
                    }
                });
            }
        });
        self.barrier.wait();
        let (counter, blocks) = (self.counter(), net.value_heads * net.blocks());
        shared.each_row(counter, blocks, |row, tokens, piece| {
            let first = net.first_block() + piece * net.block();
            // SAFETY: this thread's work item: this block of this row; inputs were written before a barrier.
            unsafe {
                let (own, of) = (first..first + net.block(), (row, slots[row] as usize));
                states.advance_runs(index, of, tokens, &[own], |state, tokens| {
                    let job = self.recurrence(delta, state.add(first), tokens, piece);
                    job.run(shared.kernels.isa());
                });
            }
        });
        self.barrier.wait();
        self.gate_heads(delta);
    }

    /// Normalizes and gates the output of each value head.
    fn gate_heads(&mut self, delta: &Delta) {
        let (shared, net, buffers) = (self.shared, &delta.net, self.shared.buffers);
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            for head in 0..net.value_heads {
                let (size, [gate, ..]) = (net.value_dim, delta.columns());
                // SAFETY: this thread's work item: this token's rows, written before a barrier.
                unsafe {
                    let read = buffers.attended.at(token, head * size);
                    let gate = buffers.qkv.at(token, gate + head * size);
                    shared
                        .kernels
                        .rms_norm(read, delta.norm.as_ptr(), size, delta.eps, read);
                    shared.kernels.silu_mul(gate, read, size, read);
                }
            }
        });
        self.barrier.wait();
    }

    /// Turns one token's projected beta and step columns into each head's learning rate and decay factor, in place.
    ///
    /// # Safety
    /// No other thread may use these columns meanwhile.
    unsafe fn decays_and_rates(&self, delta: &Delta, token: usize) {
        let [_, rates, steps] = delta.columns();
        for (head, (rate_of_decay, bias)) in delta.decay_rates.iter().zip(&delta.step_bias).enumerate() {
            let [rate, step] = [rates, steps].map(|column| self.shared.buffers.qkv.at(token, column + head));
            // SAFETY: guaranteed by the caller.
            unsafe {
                *rate = plain::sigmoid(*rate);
                *step = decay(*rate_of_decay, *step + bias);
            }
        }
    }

    /// Returns the recurrence over one column block of a head's state matrix through `tokens`.
    fn recurrence(&self, delta: &Delta, state: *mut f32, tokens: Range<usize>, piece: usize) -> Recurrence {
        let (net, buffers, token) = (&delta.net, self.shared.buffers, tokens.start);
        let (head, column) = (piece / net.blocks(), piece % net.blocks() * BLOCK);
        let key = delta.key_head(head);
        let of = |head: usize| buffers.qkv.at(token, delta.channels(head).start).cast_const();
        let [_, rates, steps] = delta.columns();
        Recurrence {
            state,
            keys: net.key_dim,
            columns: BLOCK.min(net.value_dim - column),
            count: tokens.len(),
            query: of(key),
            key: of(net.key_heads + key),
            value: of(2 * net.key_heads + head).wrapping_add(column),
            decay: buffers.qkv.at(token, steps + head),
            rate: buffers.qkv.at(token, rates + head),
            stride: buffers.qkv.stride(),
            out: (
                buffers.attended.at(token, head * net.value_dim + column),
                buffers.attended.stride(),
            ),
        }
    }
}
