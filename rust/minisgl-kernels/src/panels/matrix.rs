//! A weight matrix in panels, and how to read a row back.
//!
//! Invariants: every block of every panel is there; rows and inputs beyond the tensor's are zero.

use std::ops::Range;
use std::sync::Arc;

use super::layout::{BLOCK, Block, PANEL};
use crate::Kind;
use crate::blocks::{bf16_to_f32, f16_to_f32};
use crate::memory::Zeroed;

/// How large a matrix is and what its numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// How its numbers are held.
    pub kind: Kind,
    /// Rows.
    pub n: usize,
    /// Panels, which cover the rows.
    pub panels: usize,
    /// Inputs.
    pub k: usize,
}

impl Shape {
    /// Bytes of a panel.
    #[must_use]
    pub fn panel_bytes(&self) -> usize {
        let layout = self.kind.layout();
        self.k.div_ceil(BLOCK * layout.unit) * layout.unit_bytes()
    }

    /// Bytes of all panels.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.panels * self.panel_bytes()
    }
}

/// Where panels are. A clone is the same bytes.
#[derive(Clone)]
pub enum Panels {
    /// In memory of this process.
    Own(Arc<Zeroed>),
    /// In a range of bytes that another crate holds: a file that is mapped.
    Mapped(Arc<dyn AsRef<[u8]> + Send + Sync>, Range<usize>),
}

impl Panels {
    /// All panels, one after the other.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Own(memory) => memory.as_slice(),
            Self::Mapped(file, bytes) => &(**file).as_ref()[bytes.clone()],
        }
    }
}

/// A weight matrix, `n` outputs by `k` inputs.
pub struct Matrix {
    shape: Shape,
    panels: Panels,
}

impl Matrix {
    /// A matrix of panels that are there already: as many bytes as `shape` needs.
    #[must_use]
    pub fn new(shape: Shape, panels: Panels) -> Self {
        Self { shape, panels }
    }

    /// Rows, with those that pad the parts of an interleaved matrix, without those that pad the last panel.
    #[must_use]
    pub fn n(&self) -> usize {
        self.shape.n
    }

    /// Inputs.
    #[must_use]
    pub fn k(&self) -> usize {
        self.shape.k
    }

    /// Blocks of a panel.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.shape.k.div_ceil(BLOCK)
    }

    /// Panels: their rows cover `n`.
    #[must_use]
    pub fn panels(&self) -> usize {
        self.shape.panels
    }

    /// How its numbers are held.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.shape.kind
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shape.bytes()
    }

    /// Bytes of a panel.
    #[must_use]
    pub fn panel_bytes(&self) -> usize {
        self.shape.panel_bytes()
    }

    /// All panels, one after the other.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        self.panels.as_slice()
    }

    /// Panel `p`.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn panel(&self, p: usize) -> &[u8] {
        &self.data()[p * self.panel_bytes()..][..self.panel_bytes()]
    }

    /// Row `r` as numbers; what `out` has beyond `k` is zeroed.
    ///
    /// # Panics
    /// If there is no such row, or `out` is shorter than `k`.
    pub fn row(&self, r: usize, out: &mut [f32]) {
        let Shape { kind, panels, k, .. } = self.shape;
        assert!(r < panels * PANEL && out.len() >= k, "row {r}");
        let (panel, lane) = (self.panel(r / PANEL), r % PANEL);
        for (b, out) in out[..k].chunks_mut(BLOCK).enumerate() {
            let block = Block::new(kind, panel, b);
            for (i, out) in out.iter_mut().enumerate() {
                *out = number(kind, block, lane, i);
            }
        }
        out[k..].fill(0.0);
    }

    /// Block `b` of panel `p`.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn block(&self, p: usize, b: usize) -> Block<'_> {
        Block::new(self.shape.kind, self.panel(p), b)
    }
}

/// Input `i` of row `lane` of a block: ggml's own number.
fn number(kind: Kind, block: Block<'_>, lane: usize, i: usize) -> f32 {
    if !kind.is_quantized() {
        return plain(kind, block.codes(), lane, i);
    }
    let layout = kind.layout();
    let sub = i / (BLOCK / layout.subs);
    let number = block.scale(lane, sub) * block.value(lane, i) as f32;
    if layout.min {
        number + block.min(lane, sub)
    } else {
        number
    }
}

/// Input `i` of row `lane` of a block of numbers.
pub(crate) fn plain(kind: Kind, block: &[u8], lane: usize, i: usize) -> f32 {
    let u16_at = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
    match kind {
        Kind::BF16 => bf16_to_f32(u16_at(i / 2 * 64 + lane * 4 + i % 2 * 2)),
        Kind::F16 => f16_to_f32(u16_at(i * 32 + lane * 2)),
        _ => {
            let at = i * 64 + lane * 4;
            f32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
        }
    }
}
