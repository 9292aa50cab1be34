//! Parameters of a gated delta net, and the layout of its state and projection.
//!
//! A layer's state is the convolution's last inputs, then the blocks of each head's matrix. The projected columns are
//! queries, keys, values, the gate, then two values per value head: beta and step.

use std::ops::Range;

use minisgl_kernels::convolution::Convolution;

use crate::model::config::DeltaNet;

/// Gated delta net of one layer, without its input and output projections.
pub struct Delta {
    /// Layer index, which selects the state.
    pub layer: usize,
    /// Sizes of the delta net.
    pub net: DeltaNet,
    /// Convolution of queries, keys and values.
    pub convolution: Convolution,
    /// Scales that normalized queries (with the attention scale) and keys are multiplied by.
    pub scales: [Vec<f32>; 2],
    /// Decay rate of the state matrix by value head, below 0.
    pub decay_rates: Vec<f32>,
    /// Bias of each head's step size.
    pub step_bias: Vec<f32>,
    /// Weight of the norm of a head's output.
    pub norm: Vec<f32>,
    /// Epsilon of the output norm.
    pub eps: f32,
    /// True if value head i uses key head i % key_heads; false if consecutive value heads share one.
    pub tiled: bool,
}

impl Delta {
    /// Returns the channels of head `head`, counted over query heads, key heads, then value heads.
    pub fn channels(&self, head: usize) -> Range<usize> {
        let (of_keys, key, value) = (2 * self.net.key_heads, self.net.key_dim, self.net.value_dim);
        if head < of_keys {
            return head * key..(head + 1) * key;
        }
        let start = of_keys * key + (head - of_keys) * value;
        start..start + value
    }

    /// Returns the scale of a head after its RMS normalization, `None` for value heads.
    pub fn scales(&self, head: usize) -> Option<&[f32]> {
        self.scales.get(head / self.net.key_heads).map(Vec::as_slice)
    }

    /// Returns the key head that value head `head` uses.
    pub fn key_head(&self, head: usize) -> usize {
        let DeltaNet {
            key_heads, value_heads, ..
        } = self.net;
        if self.tiled {
            head % key_heads
        } else {
            head / (value_heads / key_heads)
        }
    }

    /// Returns the first columns of the gate, of beta and of the step sizes.
    pub fn columns(&self) -> [usize; 3] {
        let (gate, inner) = (self.net.channels(), self.net.inner());
        [gate, gate + inner, gate + inner + self.net.value_heads]
    }
}

/// Returns the file's row for our `row` where a file interleaves parts, (rows, rows per key head), by key head.
pub fn grouped_row(parts: &[(usize, usize)], mut row: usize) -> usize {
    let whole: usize = parts.iter().map(|(_, of_head)| of_head).sum();
    let mut before = 0;
    for (all, of_head) in parts {
        if row < *all {
            return row / of_head * whole + before + row % of_head;
        }
        row -= all;
        before += of_head;
    }
    row
}
