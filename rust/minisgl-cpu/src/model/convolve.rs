//! Short convolutions between two gates (LFM2): out_proj(gate_2 * conv(gate_1 * x)).

#![allow(unsafe_code)]

use crate::model::operation::Convolve;
use crate::model::worker::Worker;

impl Worker<'_, '_> {
    pub(super) fn convolve(&mut self, convolve: &Convolve) {
        let shared = self.shared;
        let (buffers, size, convolution) = (shared.buffers, convolve.size, &convolve.convolution);
        let Some(states) = &shared.tokens.states else {
            return;
        };
        let counter = self.counter();
        shared.each_row(counter, convolution.pieces(), |row, tokens, piece| {
            let channels = convolution.channels(piece);
            let (start, count) = (channels.start, channels.len());
            let own = convolution.of_tail(&channels);
            let one = |token: usize, part: usize| {
                // SAFETY: this thread's work item: these channels of this row's tokens.
                unsafe { std::slice::from_raw_parts_mut(buffers.qkv.at(token, part * size + start), count) }
            };
            let slot = shared.rows.slots[row] as usize;
            // SAFETY: this thread's work item: these channels of this row; the input was written before a barrier.
            unsafe {
                states.advance(convolve.layer, (row, slot), tokens, &own, |tail, token| {
                    let [before, behind, numbers] = [0, 1, 2].map(|part| one(token, part));
                    multiply(numbers, before);
                    convolution.pass(shared.kernels.isa(), channels.clone(), tail, numbers);
                    multiply(numbers, behind);
                    let to = buffers.attended.at(token, start);
                    to.copy_from_nonoverlapping(numbers.as_ptr(), count);
                });
            }
        });
        self.barrier.wait();
    }
}

fn multiply(numbers: &mut [f32], others: &[f32]) {
    numbers
        .iter_mut()
        .zip(others)
        .for_each(|(number, other)| *number *= other);
}
