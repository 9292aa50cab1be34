//! A weight matrix in panels: the layouts, and how to read a row back.
//!
//! Panel after panel of 16 rows, in it block after block of 32 inputs (numbers are little-endian):
//! * Q4, 320 bytes: d of 16 rows (f16), m of 16 rows (f16), 4 vectors of 64 bytes; vector j has 4 bytes of each row,
//!   byte i holds input 4j + i in its low half and input 16 + 4j + i in its high half: w = d q + m.
//! * Q8, 544 bytes: d of 16 rows (f16), 8 vectors of 64 bytes; vector j has inputs 4j..4j+4 of each row: w = d q.
//! * Bf16, 1024 bytes: 16 vectors of 64 bytes; vector j has inputs 2j and 2j + 1 of each row.
//! * F16, 1024 bytes: 32 vectors of 32 bytes; vector i has input i of each row.
//! * F32, 2048 bytes: 32 vectors of 64 bytes, as F16.
//!
//! Invariants: every block of every panel is there; rows and inputs beyond the tensor's are zero.

use super::memory::Zeroed;
use crate::files::blocks::{bf16_to_f32, f16_to_f32};

/// Rows (outputs) of a panel.
pub const PANEL: usize = 16;
/// Inputs of a block.
pub const BLOCK: usize = 32;

/// How numbers are held, and what it costs to get there from each stored kind.
///
/// | stored | held | lost |
/// |---|---|---|
/// | F32, F16, BF16 | F32, F16, Bf16 | nothing |
/// | Q4_0, Q4_1 | Q4 | nothing (Q4_0: m = -8 d) |
/// | Q8_0, Q5_0 | Q8 | nothing |
/// | Q4_K | Q4 | the products of super-scale and scale are rounded to f16: 2^-11 of each |
/// | Q5_1, Q5_K, Q6_K | Q8 | quantized once more per 32 numbers, d = max / 127: at most d / 2 |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// 4 bits with a scale and a minimum for 32.
    Q4,
    /// 8 bits with a scale for 32.
    Q8,
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    Bf16,
    /// IEEE single precision.
    F32,
}

impl Form {
    /// All there are.
    pub const ALL: [Self; 5] = [Self::Q4, Self::Q8, Self::F16, Self::Bf16, Self::F32];

    /// Bytes of a block of a panel.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Q4 => 64 + 256,
            Self::Q8 => 32 + 512,
            Self::F16 | Self::Bf16 => 1024,
            Self::F32 => 2048,
        }
    }

    /// Whether it is multiplied with int8 activations where those are asked for; others always take f32.
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        matches!(self, Self::Q4 | Self::Q8)
    }
}

/// A weight matrix, `n` outputs by `k` inputs.
pub struct Matrix {
    form: Form,
    n: usize,
    k: usize,
    panels: usize,
    data: Zeroed,
}

impl Matrix {
    /// All zero.
    #[must_use]
    pub(super) fn zeroed(form: Form, n: usize, panels: usize, k: usize) -> Self {
        let bytes = panels * k.div_ceil(BLOCK) * form.block_bytes();
        Self {
            form,
            n,
            k,
            panels,
            data: Zeroed::new(bytes),
        }
    }

    /// Rows, with those that pad the parts of an interleaved matrix, without those that pad the last panel.
    #[must_use]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    #[must_use]
    pub fn k(&self) -> usize {
        self.k
    }

    /// Blocks of a panel.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.k.div_ceil(BLOCK)
    }

    /// Panels: their rows cover `n`.
    #[must_use]
    pub fn panels(&self) -> usize {
        self.panels
    }

    /// How its numbers are held.
    #[must_use]
    pub fn form(&self) -> Form {
        self.form
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Bytes of a panel.
    #[must_use]
    pub fn panel_bytes(&self) -> usize {
        self.blocks() * self.form.block_bytes()
    }

    /// All panels, one after the other.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        self.data.as_slice()
    }

    /// Panel `p`.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn panel(&self, p: usize) -> &[u8] {
        &self.data()[p * self.panel_bytes()..][..self.panel_bytes()]
    }

    pub(super) fn panel_mut(&mut self, p: usize) -> &mut [u8] {
        let bytes = self.panel_bytes();
        &mut self.data.as_mut_slice()[p * bytes..][..bytes]
    }

    /// Row `r` as numbers; what `out` has beyond `k` is zeroed.
    ///
    /// # Panics
    /// If there is no such row, or `out` is shorter than `k`.
    pub fn row(&self, r: usize, out: &mut [f32]) {
        assert!(r < self.panels * PANEL && out.len() >= self.k, "row {r}");
        let (panel, lane) = (self.panel(r / PANEL), r % PANEL);
        for (block, out) in panel.chunks_exact(self.form.block_bytes()).zip(out.chunks_mut(BLOCK)) {
            for (i, out) in out.iter_mut().enumerate() {
                *out = number(self.form, block, lane, i);
            }
        }
        out[self.k..].fill(0.0);
    }
}

/// Input `i` of row `lane` of a block.
fn number(form: Form, block: &[u8], lane: usize, i: usize) -> f32 {
    let u16_at = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
    match form {
        Form::Q4 => {
            let (d, m) = (f16_to_f32(u16_at(2 * lane)), f16_to_f32(u16_at(32 + 2 * lane)));
            let byte = block[64 + (i % 16) / 4 * 64 + lane * 4 + i % 4];
            d * f32::from(byte >> (i / 16 * 4) & 15) + m
        }
        Form::Q8 => {
            let byte = block[32 + i / 4 * 64 + lane * 4 + i % 4];
            f16_to_f32(u16_at(2 * lane)) * f32::from(byte as i8)
        }
        Form::Bf16 => bf16_to_f32(u16_at(i / 2 * 64 + lane * 4 + i % 2 * 2)),
        Form::F16 => f16_to_f32(u16_at(i * 32 + lane * 2)),
        Form::F32 => {
            let at = i * 64 + lane * 4;
            f32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
        }
    }
}
