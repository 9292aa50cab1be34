//! Causal depthwise convolution over the last tokens, token by token.
//!
//! Invariants: sums run from the oldest token to the newest, then the bias, without fused operations.

use std::ops::Range;

use super::Isa;
use crate::lanes::{LANES, Lanes, OnLanes, on_lanes};

/// Causal depthwise convolution: weights by channel. The state (tail) holds the inputs of the previous tokens, [length
/// - 1, channels].
pub struct Convolution {
    weights: Vec<f32>, // [length, channels], the oldest first
    bias: Option<Vec<f32>>,
    length: usize,
    channels: usize,
}

/// Channels in a work item.
pub const CHANNELS: usize = 128;

impl Convolution {
    /// Creates a convolution from `by_channel`, [channels, length] (the layout of model files), and an optional bias.
    pub fn new(by_channel: &[f32], bias: Option<Vec<f32>>, (length, channels): (usize, usize)) -> Self {
        let at = |i: usize| by_channel[i % channels * length + i / channels];
        Self {
            weights: (0..length * channels).map(at).collect(),
            bias,
            length,
            channels,
        }
    }

    /// Multiplies the weights of `channels` by `by`; the bias is unchanged.
    pub fn scale(&mut self, channels: Range<usize>, by: f32) {
        for taps in self.weights.chunks_exact_mut(self.channels) {
            taps[channels.clone()].iter_mut().for_each(|weight| *weight *= by);
        }
    }

    /// Returns the number of work items, each up to [`CHANNELS`] channels.
    pub fn pieces(&self) -> usize {
        self.channels.div_ceil(CHANNELS)
    }

    /// Returns the channels of a work item.
    pub fn channels(&self, piece: usize) -> Range<usize> {
        piece * CHANNELS..((piece + 1) * CHANNELS).min(self.channels)
    }

    /// Returns the ranges of the tail that hold `channels`, one for each token.
    pub fn of_tail(&self, channels: &Range<usize>) -> Vec<Range<usize>> {
        let of = |tap: usize| tap * self.channels + channels.start..tap * self.channels + channels.end;
        (0..self.length - 1).map(of).collect()
    }

    /// Convolves the next token of some channels: replaces inputs in `numbers` by outputs and shifts the tail.
    ///
    /// # Safety
    /// The caller has exclusive use of these channels of the tail.
    pub unsafe fn pass(&self, isa: Isa, channels: Range<usize>, tail: *mut f32, numbers: &mut [f32]) {
        assert_eq!(numbers.len(), channels.len());
        let bias = self.bias.as_ref().map(|bias| bias[channels.clone()].as_ptr());
        let job = Pass {
            weights: self.weights[channels.start..].as_ptr(),
            bias,
            tail: tail.wrapping_add(channels.start),
            numbers: numbers.as_mut_ptr(),
            count: channels.len(),
            taps: (self.length, self.channels),
        };
        // SAFETY: upheld by the caller; the weights are as long as `new` makes them.
        unsafe { on_lanes(isa, job) };
    }
}

/// Convolution of one token over adjacent channels.
struct Pass {
    weights: *const f32,
    bias: Option<*const f32>,
    tail: *mut f32,
    numbers: *mut f32,
    count: usize,
    taps: (usize, usize), // number of taps, and elements from one to the next
}

impl OnLanes for Pass {
    /// Computes all channels, vectors first, then the rest one by one.
    ///
    /// # Safety
    /// The pointers have these sizes, and nothing else uses tail and numbers.
    #[inline(always)]
    unsafe fn on<V: Lanes>(self) {
        let whole = self.count / LANES * LANES;
        // SAFETY: upheld by the caller.
        unsafe {
            for at in (0..whole).step_by(LANES) {
                self.pass_vector::<V>(at);
            }
            (whole..self.count).for_each(|at| self.pass_channel(at));
        }
    }
}

impl Pass {
    /// Computes a vector of channels from `at` on, under the conditions of `on`.
    #[inline(always)]
    unsafe fn pass_vector<V: Lanes>(&self, at: usize) {
        let (length, stride) = self.taps;
        // SAFETY: upheld by the caller.
        unsafe {
            let (number, mut sum) = (V::load(self.numbers.add(at)), V::splat(0.0));
            for tap in 0..length {
                let place = tap * stride + at;
                let kept = if tap + 1 < length {
                    V::load(self.tail.add(place))
                } else {
                    number
                };
                sum = sum.add(V::load(self.weights.add(place)).mul(kept));
                if tap > 0 {
                    kept.store(self.tail.add(place - stride));
                }
            }
            if let Some(bias) = self.bias {
                sum = sum.add(V::load(bias.add(at)));
            }
            sum.store(self.numbers.add(at));
        }
    }

    /// Computes one channel that fills no whole vector, under the conditions of `on`.
    unsafe fn pass_channel(&self, at: usize) {
        let (length, stride) = self.taps;
        // SAFETY: upheld by the caller.
        unsafe {
            let (number, mut sum) = (*self.numbers.add(at), 0.0_f32);
            for tap in 0..length {
                let place = tap * stride + at;
                let kept = if tap + 1 < length {
                    *self.tail.add(place)
                } else {
                    number
                };
                sum += *self.weights.add(place) * kept;
                if tap > 0 {
                    *self.tail.add(place - stride) = kept;
                }
            }
            if let Some(bias) = self.bias {
                sum += *bias.add(at);
            }
            *self.numbers.add(at) = sum;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::undocumented_unsafe_blocks)] // the tail is a vector of its own

    use super::*;

    #[test]
    fn every_instruction_set_gives_the_sums_of_the_last_tokens() {
        let (length, channels, tokens) = (4, 52, 7);
        let number = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 64.0;
        let by_channel: Vec<f32> = (0..channels * length).map(number).collect();
        let bias: Vec<f32> = (0..channels).map(|i| number(i + 9)).collect();
        let convolution = Convolution::new(&by_channel, Some(bias.clone()), (length, channels));
        let inputs: Vec<Vec<f32>> = (0..tokens)
            .map(|t| (0..channels).map(|c| number(t * 53 + c)).collect())
            .collect();
        for isa in Isa::here() {
            let mut tail = vec![0.0_f32; (length - 1) * channels];
            for (token, input) in inputs.iter().enumerate() {
                let mut found = input.clone();
                for part in [0..33, 33..channels] {
                    unsafe { convolution.pass(isa, part.clone(), tail.as_mut_ptr(), &mut found[part]) };
                }
                for channel in 0..channels {
                    let taps = (0..length).filter(|tap| token + tap + 1 >= length);
                    let products =
                        taps.map(|tap| by_channel[channel * length + tap] * inputs[token + tap + 1 - length][channel]);
                    assert_eq!(
                        found[channel],
                        products.fold(0.0, |sum, one| sum + one) + bias[channel],
                        "{isa:?}"
                    );
                }
            }
        }
    }
}
