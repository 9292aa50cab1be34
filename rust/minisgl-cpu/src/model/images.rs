//! Images in the forward pass: patches as input of a vision tower, and its features as input of the text model.
//!
//! Invariants: a step without images computes the same bits as a model that has no vision tower.

#![allow(unsafe_code)]

use std::slice::from_raw_parts_mut;

use crate::model::operation::PatchEmbed;
use crate::model::worker::{ITEM_TOKENS, Worker, each};

/// Returns the two learned positions that enclose position `at` of `count`, and the weight of the second.
fn resampled(at: usize, count: usize, side: usize) -> ([usize; 2], f32) {
    let exact = at as f32 * (side - 1) as f32 / (count.max(2) - 1) as f32;
    let first = exact as usize;
    ([first.min(side - 1), (first + 1).min(side - 1)], exact - first as f32)
}

impl Worker<'_, '_> {
    /// Writes the pixel values, the learned position and the RoPE angles of each patch.
    pub(super) fn patches(&mut self, embed: &PatchEmbed) {
        let (shared, buffers, hidden) = (self.shared, self.shared.buffers, self.shared.hidden);
        let (patches, values) = (&embed.patches, embed.patches.values());
        let Some(image) = shared.tokens.image else { return };
        let table = |[row, column]: [usize; 2]| &embed.positions[(row * patches.side + column) * hidden..][..hidden];
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            // SAFETY: this thread's work item: the rows of its patches.
            let (pixels, row) = unsafe {
                shared.write_angles(&embed.angles, token);
                let [inner, x] = [&buffers.inner, &buffers.x].map(|grid| grid.at(token, 0));
                (from_raw_parts_mut(inner, values), from_raw_parts_mut(x, hidden))
            };
            let bytes = &image.pixels[token * values..][..values];
            for ((to, from), table) in (pixels.chunks_mut(values / 3).zip(bytes.chunks(values / 3))).zip(image.table) {
                to.iter_mut()
                    .zip(from)
                    .for_each(|(to, from)| *to = table[usize::from(*from)]);
            }
            let [at, column] = patches.place(token, image.grid[1]);
            let (rows, down) = resampled(at, image.grid[0], patches.side);
            let (columns, right) = resampled(column, image.grid[1], patches.side);
            row.fill(0.0);
            for (at, down) in rows.into_iter().zip([1.0 - down, down]) {
                for (column, right) in columns.into_iter().zip([1.0 - right, right]) {
                    let weight = down * right;
                    row.iter_mut()
                        .zip(table([at, column]))
                        .for_each(|(sum, x)| *sum += weight * x);
                }
            }
        });
        self.barrier.wait();
    }

    /// Copies the hidden states.
    pub(super) fn tap(&mut self, index: usize) {
        let (shared, buffers) = (self.shared, self.shared.buffers);
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            let (from, to) = (buffers.x.at(token, 0), buffers.taps[index].at(token, 0));
            // SAFETY: this thread's work item: the rows of this token, written before a barrier.
            unsafe { to.copy_from_nonoverlapping(from, shared.hidden) };
        });
        self.barrier.wait();
    }

    /// Adds the features of images that follow layer `layer` to the hidden states.
    pub(super) fn add_features(&mut self, layer: usize) {
        let (shared, hidden) = (self.shared, self.shared.hidden);
        let features = shared.tokens.features;
        if features.is_empty() {
            return;
        }
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            if let Some(features) = features[token] {
                let added = &features[(1 + layer) * hidden..][..hidden];
                // SAFETY: this thread's work item: the row of this token, written before a barrier.
                unsafe {
                    shared
                        .kernels
                        .add(shared.buffers.x.at(token, 0), added.as_ptr(), hidden)
                };
            }
        });
        self.barrier.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::Patches;

    #[test]
    fn patches_of_a_block_are_adjacent() {
        let patches = Patches {
            size: 2,
            frames: 2,
            merge: 2,
            side: 3,
            taps: Vec::new(),
        };
        let places: Vec<_> = (0..12).map(|at| patches.place(at, 6)).collect();
        let first = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]];
        assert_eq!(places[..8], first);
        assert_eq!(places[11], [1, 5]);
        assert_eq!(patches.place(12, 6), [2, 0]);
        assert_eq!(patches.values(), 12);
    }

    #[test]
    fn resampled_positions_begin_and_end_with_those_of_the_table() {
        assert_eq!(resampled(0, 5, 3), ([0, 1], 0.0));
        assert_eq!(resampled(1, 5, 3), ([0, 1], 0.5));
        assert_eq!(resampled(4, 5, 3), ([2, 2], 0.0));
        assert_eq!(resampled(0, 1, 3), ([0, 1], 0.0));
        assert_eq!(resampled(7, 8, 1), ([0, 0], 0.0));
    }
}
