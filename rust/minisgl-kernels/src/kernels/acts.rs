//! Activations prepared for the matmul kernels.
//!
//! Arrays are ordered by block of 32 inputs, then by row, so that the rows of a tile lie at fixed distances. f32:
//! [block][row][32] and each block's sum [block][row]; int8: [block][row][32] bytes, and [block][row] each of the scale
//! d, d times the sum, and the sum itself. Sums of each half of a block: [block][half][row]. Tile kernels (AMX) also
//! keep f32 as sums of bf16: [block][row][part][32].
//!
//! Invariants: inputs beyond k are zero in every prepared row.

use std::ops::Range;

use crate::Kind;
use crate::memory::{ALIGN, Zeroed};
use crate::panels::{BLOCK, Matrix};

/// Number format of prepared activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Unchanged f32, with sums of blocks.
    Exact,
    /// Unchanged f32 without sums, for matrices whose format has no minima.
    Plain,
    /// Values in f32, each rounded to the nearest bf16 (ties to even), as engines with bf16 tensors compute.
    Bf16,
    /// Int8 with one scale for 32 elements. Serves quantized matrices only.
    Int8,
    /// Int8 for quantized matrices, and f32 for the others.
    Both,
}

impl Mode {
    /// Returns true if f32 is prepared.
    #[must_use]
    pub const fn has_f32(self) -> bool {
        !matches!(self, Self::Int8)
    }

    /// Returns the number of bf16 values whose sum represents an f32.
    #[must_use]
    pub const fn parts(self) -> usize {
        if matches!(self, Self::Bf16) { 1 } else { 3 }
    }

    /// Returns true if int8 is prepared.
    #[must_use]
    pub const fn has_int8(self) -> bool {
        matches!(self, Self::Int8 | Self::Both)
    }

    /// Returns true if sums of blocks are prepared.
    #[must_use]
    pub const fn has_sums(self) -> bool {
        self.has_f32() && !matches!(self, Self::Plain)
    }

    /// Returns true if elements of several rows share a cache line.
    #[must_use]
    pub const fn mixes_rows(self) -> bool {
        self.has_sums() || self.has_int8()
    }

    /// Returns true if matrices of that format can be multiplied by these activations.
    #[must_use]
    pub const fn serves(self, kind: Kind) -> bool {
        match self {
            Self::Plain => !kind.layout().min,
            _ => self.has_f32() || kind.is_quantized(),
        }
    }

    /// Returns the mode for multiplying by `matrix` on this request: int8 only if quantized, sums only if needed.
    #[must_use]
    pub fn with(self, matrix: &Matrix) -> Self {
        let kind = matrix.kind();
        match self {
            Self::Int8 if !kind.is_quantized() => Self::Exact.with(matrix),
            Self::Exact if Self::Plain.serves(kind) => Self::Plain,
            _ => self,
        }
    }

    /// Returns the mode for several matrices that share the same activations.
    #[must_use]
    pub fn with_all<'a>(self, matrices: impl IntoIterator<Item = &'a Matrix>) -> Self {
        let modes = matrices.into_iter().map(|matrix| self.with(matrix));
        modes
            .reduce(|one, other| if one == other { one } else { Self::Exact })
            .unwrap_or(self)
    }

    /// Returns true if matrices of that format are multiplied in int8.
    #[must_use]
    pub const fn int8_with(self, kind: Kind) -> bool {
        self.has_int8() && kind.is_quantized()
    }
}

/// Buffer of prepared activations.
pub struct Acts {
    mode: Mode,
    rows: usize,
    k: usize,
    memory: Zeroed,
}

impl Acts {
    /// Allocates a buffer for up to `rows` rows of up to `k` elements each.
    #[must_use]
    pub fn new(rows: usize, k: usize, mode: Mode) -> Self {
        let (rows, k) = (spread(rows.max(1)), k.max(1));
        let bytes = ActsPtr::lay_out(std::ptr::null_mut(), rows, k, mode).1;
        Self {
            mode,
            rows,
            k,
            memory: Zeroed::new(bytes),
        }
    }

    /// Returns the bytes of the buffer.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Returns the number format of the buffer.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns a handle for `rows` rows of `k` elements; activations prepared through earlier handles become invalid.
    /// Threads may prepare different rows at once.
    ///
    /// # Panics
    /// If the buffer is too small.
    #[must_use]
    pub fn writer(&self, rows: usize, k: usize) -> ActsPtr {
        self.writer_as(rows, k, self.mode)
    }

    /// Returns a handle like [`Self::writer`], in another mode than the buffer was allocated for.
    ///
    /// # Panics
    /// If the buffer is too small.
    #[must_use]
    pub fn writer_as(&self, rows: usize, k: usize, mode: Mode) -> ActsPtr {
        let (ptr, bytes) = ActsPtr::lay_out(self.memory.as_ptr(), spread(rows), k, mode);
        let (most, most_k) = (self.rows, self.k);
        assert!(
            bytes <= self.memory.len(),
            "{rows} rows of {k} do not fit a buffer of {most} rows of {most_k}"
        );
        ptr
    }
}

/// Returns the number of rows to lay out for `rows`: with a power of two, all blocks of a tile would map to the same
/// few sets of a cache and evict each other.
fn spread(rows: usize) -> usize {
    if rows < 64 { rows } else { rows.next_multiple_of(16) + 8 }
}

/// Pointers to a step's activations. Valid as long as its `Acts`, and only until that is laid out anew.
#[derive(Clone, Copy, Debug)]
pub struct ActsPtr {
    /// Values: [block][row][32].
    pub(crate) x: *mut f32,
    /// Sums of 32 inputs: [block][row].
    pub(crate) sum: *mut f32,
    /// Sums of 16 inputs: [block][half][row].
    pub(crate) sum16: *mut f32,
    /// Values as sums of `Mode::parts` bf16 each: [block][row][part][32], for tile kernels.
    pub(crate) parts: *mut u16,
    /// Quantized values in -127..=127: [block][row][32].
    pub(crate) q: *mut i8,
    /// Scales: [block][row].
    pub(crate) d: *mut f32,
    /// Scale times the sum of the integers: [block][row].
    pub(crate) ds: *mut f32,
    /// Sum of the integers times -128: [block][row], for kernels that add 128 to the weights.
    pub(crate) offset: *mut i32,
    /// Sum of 16 integers times -128: [block][half][row].
    pub(crate) offset16: *mut i32,
    /// Number format, which decides which of these arrays exist.
    pub(crate) mode: Mode,
    /// Rows laid out, padding rows included.
    pub(crate) rows: usize,
    /// Inputs of a row, which are the columns of the matrix.
    pub(crate) k: usize,
}

// SAFETY: it is an address; every use of it is unsafe and says who may write.
unsafe impl Send for ActsPtr {}
// SAFETY: as above.
unsafe impl Sync for ActsPtr {}

impl ActsPtr {
    /// Returns the blocks in a row.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.k.div_ceil(BLOCK)
    }

    /// Lays out the arrays from `start` on, each at a cache line. Returns the pointers and the bytes they take.
    fn lay_out(start: *mut u8, rows: usize, k: usize, mode: Mode) -> (Self, usize) {
        let cells = rows * k.div_ceil(BLOCK);
        let mut at = 0;
        let mut take = |there: bool, bytes: usize| {
            let piece = start.wrapping_add(at);
            at += if there { bytes.next_multiple_of(ALIGN) } else { 0 };
            piece
        };
        let (f32s, sums, int8) = (mode.has_f32(), mode.has_sums(), mode.has_int8());
        let ptr = Self {
            x: take(f32s, cells * BLOCK * 4).cast(),
            sum: take(sums, cells * 4).cast(),
            sum16: take(sums, 2 * cells * 4).cast(),
            q: take(int8, cells * BLOCK).cast(),
            d: take(int8, cells * 4).cast(),
            ds: take(int8, cells * 4).cast(),
            offset: take(int8, cells * 4).cast(),
            // Tiles may read past the last row of these arrays. The parts come last, so that their memory is never
            // touched if no kernel uses them.
            offset16: take(int8, 2 * cells * 4 + 64).cast(),
            parts: take(f32s, cells * BLOCK * mode.parts() * 2 + 16 * 3 * 64).cast(),
            mode,
            rows,
            k,
        };
        (ptr, at)
    }
}

/// Inputs and output of one matmul call.
#[derive(Clone)]
pub(crate) struct Product<'a> {
    /// Weight matrix.
    pub w: &'a Matrix,
    /// Panels of the matrix to compute.
    pub panels: Range<usize>,
    /// Prepared activations.
    pub acts: ActsPtr,
    /// Rows of the activations to compute.
    pub rows: Range<usize>,
    /// Output, row after row at a distance of `stride` elements, panel after panel.
    pub out: *mut f32,
    /// Elements from one row of the output to the next.
    pub stride: usize,
    /// True to add to the output instead of overwriting it.
    pub add: bool,
}

/// Function table of one instruction set. `Kernels`' methods of the same names describe the functions.
pub(crate) struct Table {
    pub(crate) prepare: unsafe fn(*const f32, ActsPtr, usize, Range<usize>),
    pub(crate) matmul: unsafe fn(&Product<'_>),
    pub(crate) rms_norm: unsafe fn(*const f32, *const f32, usize, f32, *mut f32),
    pub(crate) silu_mul: unsafe fn(*const f32, *const f32, usize, usize, *mut f32),
    pub(crate) gelu_mul: unsafe fn(*const f32, *const f32, usize, usize, *mut f32),
    pub(crate) add: unsafe fn(*mut f32, *const f32, usize),
    pub(crate) rotate: unsafe fn(*mut f32, *const f32, *const f32, usize),
    pub(crate) argmax: unsafe fn(*const f32, usize) -> usize,
    pub(crate) finite: unsafe fn(*const f32, usize) -> bool,
}
