//! Convolutions over the last tokens, token by token.
//!
//! Invariants: sums go from the oldest token to the newest, then the bias, without fused operations.

#![allow(unsafe_code)]

use std::ops::Range;

/// A convolution over the last tokens, channel by channel: what keeps their inputs is the tail, [length - 1, channels].
pub struct Convolution {
    weights: Vec<f32>, // [length, channels], the oldest first
    bias: Option<Vec<f32>>,
    length: usize,
    channels: usize,
}

/// Channels of a piece of work.
pub const CHANNELS: usize = 128;

impl Convolution {
    /// `by_channel`: [channels, length], as files have it.
    pub fn new(by_channel: &[f32], bias: Option<Vec<f32>>, (length, channels): (usize, usize)) -> Self {
        let at = |i: usize| by_channel[i % channels * length + i / channels];
        Self {
            weights: (0..length * channels).map(at).collect(),
            bias,
            length,
            channels,
        }
    }

    /// What some channels give is multiplied by it, their bias aside.
    pub fn scale(&mut self, channels: Range<usize>, by: f32) {
        for taps in self.weights.chunks_exact_mut(self.channels) {
            taps[channels.clone()].iter_mut().for_each(|weight| *weight *= by);
        }
    }

    /// Pieces of channels.
    pub fn pieces(&self) -> usize {
        self.channels.div_ceil(CHANNELS)
    }

    /// The channels of a piece.
    pub fn channels(&self, piece: usize) -> Range<usize> {
        piece * CHANNELS..((piece + 1) * CHANNELS).min(self.channels)
    }

    /// Where the tail has some channels.
    pub fn of_tail(&self, channels: &Range<usize>) -> Vec<Range<usize>> {
        let of = |tap: usize| tap * self.channels + channels.start..tap * self.channels + channels.end;
        (0..self.length - 1).map(of).collect()
    }

    /// The next token of some channels, at most `CHANNELS` of them: `numbers` go in and out.
    ///
    /// # Safety
    /// These channels of the tail are the caller's.
    pub unsafe fn pass(&self, channels: Range<usize>, tail: *mut f32, numbers: &mut [f32]) {
        let count = channels.len();
        let mut sums = [0.0_f32; CHANNELS];
        let sums = &mut sums[..count];
        for tap in 0..self.length {
            let weights = &self.weights[tap * self.channels + channels.start..][..count];
            if tap + 1 == self.length {
                add_products(sums, weights, numbers);
                continue;
            }
            // SAFETY: the caller's.
            let kept = unsafe { std::slice::from_raw_parts_mut(tail.add(tap * self.channels + channels.start), count) };
            add_products(sums, weights, kept);
            if tap + 2 == self.length {
                kept.copy_from_slice(numbers);
            } else {
                // SAFETY: as above, another part.
                let next = unsafe { tail.add((tap + 1) * self.channels + channels.start) };
                // SAFETY: as above.
                kept.copy_from_slice(unsafe { std::slice::from_raw_parts(next, count) });
            }
        }
        if let Some(bias) = &self.bias {
            sums.iter_mut()
                .zip(&bias[channels])
                .for_each(|(sum, bias)| *sum += bias);
        }
        numbers.copy_from_slice(sums);
    }
}

fn add_products(sums: &mut [f32], ones: &[f32], others: &[f32]) {
    for ((sum, one), other) in sums.iter_mut().zip(ones).zip(others) {
        *sum += one * other;
    }
}
