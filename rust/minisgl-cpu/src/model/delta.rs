//! The weights of a gated delta net between a layer's products, and where its parts lie.
//!
//! A layer's state is the convolution's last inputs, then the blocks of each head's matrix. Columns of what goes in are
//! queries, keys, values, the gate, then two numbers of each head of values.

use std::ops::Range;

use minisgl_kernels::convolution::Convolution;

use crate::model::config::DeltaNet;

/// What is between the products.
pub struct Delta {
    /// The layer, whose state it is.
    pub layer: usize,
    /// Its sizes.
    pub net: DeltaNet,
    /// Of queries, keys and values.
    pub convolution: Convolution,
    /// Of queries, which are scaled, too, and of keys: they become as long as that.
    pub lengths: [Vec<f32>; 2],
    /// By head of values: how fast its matrix fades, below 0.
    pub fading: Vec<f32>,
    /// What is added to each head's step.
    pub step_bias: Vec<f32>,
    /// Of what is read of a head.
    pub norm: Vec<f32>,
    /// Of that norm.
    pub eps: f32,
    /// Heads of values that share one of keys lie as far from each other as there are heads of keys.
    pub tiled: bool,
}

impl Delta {
    /// The channels of a head of queries, of keys or of values, in this order.
    pub fn channels(&self, head: usize) -> Range<usize> {
        let (of_keys, key, value) = (2 * self.net.key_heads, self.net.key_dim, self.net.value_dim);
        if head < of_keys {
            return head * key..(head + 1) * key;
        }
        let start = of_keys * key + (head - of_keys) * value;
        start..start + value
    }

    /// What queries and keys are multiplied by once their root mean square is 1.
    pub fn lengths(&self, head: usize) -> Option<&[f32]> {
        self.lengths.get(head / self.net.key_heads).map(Vec::as_slice)
    }

    /// The head of keys that a head of values has.
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

    /// Columns of the gate, of how much heads learn, of their steps.
    pub fn columns(&self) -> [usize; 3] {
        let (gate, inner) = (self.net.channels(), self.net.inner());
        [gate, gate + inner, gate + inner + self.net.value_heads]
    }
}

/// Files that have parts of so many rows in all, and of each head of keys, put a head's rows of all of them together: the
/// file's row of one of ours.
pub fn by_head(parts: &[(usize, usize)], mut row: usize) -> usize {
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
