//! Short convolutions between two gates (LFM2): out(gate * convolved(other gate * numbers)).

#![allow(unsafe_code)]

use crate::model::buffers::Phase;
use crate::model::weights::Convolving;
use crate::model::worker::Worker;

impl Worker<'_, '_> {
    pub(super) fn convolve(&mut self, index: usize, conv: &Convolving) {
        let shared = self.shared;
        let (buffers, hidden) = (shared.buffers, shared.config.hidden_size);
        let Some(states) = &shared.tokens.states else {
            return;
        };
        self.each_row(index, Phase::Mix, conv.convolution.pieces(), |row, tokens, piece| {
            let channels = conv.convolution.channels(piece);
            let (start, count) = (channels.start, channels.len());
            let own = conv.convolution.of_tail(&channels);
            let one = |token: usize, part: usize| {
                // SAFETY: its piece: these channels of this row's tokens.
                unsafe { std::slice::from_raw_parts_mut(buffers.qkv.at(token, part * hidden + start), count) }
            };
            let slot = shared.rows.slots[row] as usize;
            // SAFETY: its piece: these channels of this row; what goes in was written before a barrier.
            unsafe {
                states.advance(index, (row, slot), tokens, &own, |tail, token| {
                    let [before, behind, numbers] = [0, 1, 2].map(|part| one(token, part));
                    if let Some(bias) = &conv.bias {
                        for (part, numbers) in [&mut *before, &mut *behind, &mut *numbers].into_iter().enumerate() {
                            add(numbers, &bias[part * hidden + start..]);
                        }
                    }
                    multiply(numbers, before);
                    conv.convolution
                        .pass(shared.kernels.isa(), channels.clone(), tail, numbers);
                    multiply(numbers, behind);
                    let to = buffers.attended.at(token, start);
                    to.copy_from_nonoverlapping(numbers.as_ptr(), count);
                });
            }
        });
    }
}

fn add(numbers: &mut [f32], others: &[f32]) {
    numbers
        .iter_mut()
        .zip(others)
        .for_each(|(number, other)| *number += other);
}

fn multiply(numbers: &mut [f32], others: &[f32]) {
    numbers
        .iter_mut()
        .zip(others)
        .for_each(|(number, other)| *number *= other);
}
