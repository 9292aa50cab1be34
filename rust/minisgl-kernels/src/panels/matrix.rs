//! Weight matrix in panels, and the way to read a row back.
//!
//! Invariants: every block of every panel is present; rows and inputs beyond the tensor's are zero.

use std::ops::Range;
use std::sync::Arc;

use super::layout::{BLOCK, Block, PANEL};
use crate::Kind;
use crate::blocks::{bf16_to_f32, f16_to_f32};
use crate::memory::Zeroed;

/// Size and storage kind of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Storage kind of its weights.
    pub kind: Kind,
    /// Rows (outputs).
    pub n: usize,
    /// Panels that cover the rows.
    pub panels: usize,
    /// Inputs (columns).
    pub k: usize,
}

impl Shape {
    /// Returns the bytes of a panel.
    #[must_use]
    pub fn panel_bytes(&self) -> usize {
        let layout = self.kind.layout();
        self.k.div_ceil(BLOCK * layout.unit) * layout.unit_bytes()
    }

    /// Returns the bytes of all panels.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.panels * self.panel_bytes()
    }
}

/// Memory of a matrix's panels. A clone refers to the same bytes.
#[derive(Clone)]
pub enum Panels {
    /// Memory of this process.
    Own(Arc<Zeroed>),
    /// Range of bytes that another crate holds, such as a mapped file.
    Mapped(Arc<dyn AsRef<[u8]> + Send + Sync>, Range<usize>),
}

impl Panels {
    /// Returns all panels, one after the other.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Own(memory) => memory.as_slice(),
            Self::Mapped(file, bytes) => &(**file).as_ref()[bytes.clone()],
        }
    }
}

/// Weight matrix with `n` outputs and `k` inputs.
pub struct Matrix {
    shape: Shape,
    panels: Panels,
}

impl Matrix {
    /// Creates a matrix from existing panels, which must have as many bytes as `shape` needs.
    #[must_use]
    pub fn new(shape: Shape, panels: Panels) -> Self {
        Self { shape, panels }
    }

    /// Returns the rows, including the padding of an interleaved matrix's parts, without that of the last panel.
    #[must_use]
    pub fn n(&self) -> usize {
        self.shape.n
    }

    /// Returns the inputs (columns).
    #[must_use]
    pub fn k(&self) -> usize {
        self.shape.k
    }

    /// Returns the blocks in a panel.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.shape.k.div_ceil(BLOCK)
    }

    /// Returns the number of panels, whose rows cover `n`.
    #[must_use]
    pub fn panels(&self) -> usize {
        self.shape.panels
    }

    /// Returns the storage kind.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.shape.kind
    }

    /// Returns the bytes of all panels.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shape.bytes()
    }

    /// Returns the bytes of a panel.
    #[must_use]
    pub fn panel_bytes(&self) -> usize {
        self.shape.panel_bytes()
    }

    /// Returns all panels, one after the other.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        self.panels.as_slice()
    }

    /// Returns panel `p`.
    ///
    /// # Panics
    /// If `p` is out of range.
    #[must_use]
    pub fn panel(&self, p: usize) -> &[u8] {
        &self.data()[p * self.panel_bytes()..][..self.panel_bytes()]
    }

    /// Decodes row `r` to f32 and zeroes `out` beyond `k`.
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

    /// Returns block `b` of panel `p`.
    ///
    /// # Panics
    /// If an index is out of range.
    #[must_use]
    pub fn block(&self, p: usize, b: usize) -> Block<'_> {
        Block::new(self.shape.kind, self.panel(p), b)
    }
}

/// Returns the weight of input `i` of row `lane` of a block, exactly as ggml decodes it.
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

/// Returns input `i` of row `lane` of a block of floats.
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
