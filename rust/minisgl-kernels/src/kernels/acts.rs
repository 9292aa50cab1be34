//! Activations as the matrix products want them.
//!
//! Block after block of 32 inputs, in it row after row, so that the rows of a tile lie at fixed distances:
//! f32: [block][row][32] and the block's sum [block][row]; int8: [block][row][32] bytes, and [block][row] each of d,
//! d times the sum, and the sum itself. Sums are there for each half of a block, too: [block][half][row]. Kernels on tiles also keep f32 as sums of bf16: [block][row][part][32].
//!
//! Invariants: inputs beyond k are zero in every prepared row.

use std::ops::Range;

use crate::Kind;
use crate::memory::{ALIGN, Zeroed};
use crate::panels::{BLOCK, Matrix};

/// Which numbers activations are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// As they come, in f32.
    Exact,
    /// The same without sums, for matrices that have no minima.
    Plain,
    /// In f32, each rounded to the nearest bf16 (to even): what an engine computes whose tensors are bf16.
    Bf16,
    /// 8 bits and a scale for 32 numbers. Serves quantized matrices only.
    Int8,
    /// Both: int8 for quantized matrices, f32 for the others.
    Both,
}

impl Mode {
    /// Whether f32 is there.
    #[must_use]
    pub const fn has_f32(self) -> bool {
        !matches!(self, Self::Int8)
    }

    /// How many bf16 a number is the sum of.
    #[must_use]
    pub const fn parts(self) -> usize {
        if matches!(self, Self::Bf16) { 1 } else { 3 }
    }

    /// Whether int8 is there.
    #[must_use]
    pub const fn has_int8(self) -> bool {
        matches!(self, Self::Int8 | Self::Both)
    }

    /// Whether sums of blocks are there.
    #[must_use]
    pub const fn has_sums(self) -> bool {
        self.has_f32() && !matches!(self, Self::Plain)
    }

    /// Whether numbers of several rows share a cache line.
    #[must_use]
    pub const fn mixes_rows(self) -> bool {
        self.has_sums() || self.has_int8()
    }

    /// Whether matrices of that kind can be multiplied with it.
    #[must_use]
    pub const fn serves(self, kind: Kind) -> bool {
        match self {
            Self::Plain => !kind.layout().min,
            _ => self.has_f32() || kind.is_quantized(),
        }
    }

    /// What a matrix is multiplied with where this is asked for: only integers are multiplied with integers, and sums are
    /// there for who reads them.
    #[must_use]
    pub fn with(self, matrix: &Matrix) -> Self {
        let kind = matrix.kind();
        match self {
            Self::Int8 if !kind.is_quantized() => Self::Exact.with(matrix),
            Self::Exact if Self::Plain.serves(kind) => Self::Plain,
            _ => self,
        }
    }

    /// What matrices are multiplied with that read the same.
    #[must_use]
    pub fn with_all<'a>(self, matrices: impl IntoIterator<Item = &'a Matrix>) -> Self {
        let modes = matrices.into_iter().map(|matrix| self.with(matrix));
        modes
            .reduce(|one, other| if one == other { one } else { Self::Exact })
            .unwrap_or(self)
    }

    /// Whether matrices of that kind are multiplied in int8.
    #[must_use]
    pub const fn int8_with(self, kind: Kind) -> bool {
        self.has_int8() && kind.is_quantized()
    }
}

/// Room for prepared activations.
pub struct Acts {
    mode: Mode,
    rows: usize,
    k: usize,
    memory: Zeroed,
}

impl Acts {
    /// Room for `rows` rows of `k` numbers each (or less, or fewer).
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

    /// Which numbers it holds.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// A handle for `rows` rows of `k` numbers; what was prepared through others is void. Threads may prepare
    /// different rows at once.
    ///
    /// # Panics
    /// If there is no room for so many.
    #[must_use]
    pub fn writer(&self, rows: usize, k: usize) -> ActsPtr {
        self.writer_as(rows, k, self.mode)
    }

    /// The same in another mode than they were made for.
    ///
    /// # Panics
    /// If there is no room for so many.
    #[must_use]
    pub fn writer_as(&self, rows: usize, k: usize, mode: Mode) -> ActsPtr {
        let (ptr, bytes) = ActsPtr::lay_out(self.memory.as_ptr(), spread(rows), k, mode);
        let (most, most_k) = (self.rows, self.k);
        assert!(
            bytes <= self.memory.len(),
            "{rows} rows of {k} where there is room for {most} of {most_k}"
        );
        ptr
    }
}

/// Rows laid out for that many: were their number a power of two, all blocks of a tile would fall into the same few
/// sets of a cache and drive each other out.
fn spread(rows: usize) -> usize {
    if rows < 64 { rows } else { rows.next_multiple_of(16) + 8 }
}

/// Where activations of a step are. A plain pointer: valid as long as its `Acts`, and only until that is laid out anew.
#[derive(Clone, Copy, Debug)]
pub struct ActsPtr {
    /// [block][row][32] numbers.
    pub(crate) x: *mut f32,
    /// [block][row] sums of 32 numbers.
    pub(crate) sum: *mut f32,
    /// [block][half][row] sums of 16 numbers.
    pub(crate) sum16: *mut f32,
    /// [block][row][part][32]: numbers as sums of `Mode::parts` of bf16, for kernels that want them so.
    pub(crate) parts: *mut u16,
    /// [block][row][32] integers of -127..=127.
    pub(crate) q: *mut i8,
    /// [block][row] scales.
    pub(crate) d: *mut f32,
    /// [block][row] scale times sum of integers.
    pub(crate) ds: *mut f32,
    /// [block][row] -128 times the sum of integers, for kernels that add 128 to the weights.
    pub(crate) offset: *mut i32,
    /// [block][half][row] the same for 16 of the integers.
    pub(crate) offset16: *mut i32,
    /// Which of these there are.
    pub(crate) mode: Mode,
    /// Rows, with those that are there only for the distance.
    pub(crate) rows: usize,
    /// Inputs.
    pub(crate) k: usize,
}

// SAFETY: it is an address; every use of it is unsafe and says who may write.
unsafe impl Send for ActsPtr {}
// SAFETY: as above.
unsafe impl Sync for ActsPtr {}

impl ActsPtr {
    /// Blocks of a row.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.k.div_ceil(BLOCK)
    }

    /// The arrays one after the other from `start`, each at a cache line; and how many bytes they take.
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
            // Tiles may read beyond the last row here, and of the parts, which are the last: nobody touches them where no kernel
            // wants them.
            offset16: take(int8, 2 * cells * 4 + 64).cast(),
            parts: take(f32s, cells * BLOCK * mode.parts() * 2 + 16 * 3 * 64).cast(),
            mode,
            rows,
            k,
        };
        (ptr, at)
    }
}

/// What a matrix product reads and writes.
#[derive(Clone)]
pub(crate) struct Product<'a> {
    /// The matrix.
    pub w: &'a Matrix,
    /// Panels of it.
    pub panels: Range<usize>,
    /// Prepared activations.
    pub acts: ActsPtr,
    /// Rows of them.
    pub rows: Range<usize>,
    /// Row after row, `stride` numbers apart, panel after panel.
    pub out: *mut f32,
    /// See `out`.
    pub stride: usize,
    /// Whether to add to what is there.
    pub add: bool,
}

/// One instruction set's functions; what they compute is said at `Kernels`' methods of the same names.
pub(crate) struct Table {
    pub(crate) prepare: unsafe fn(*const f32, ActsPtr, usize),
    pub(crate) matmul: unsafe fn(&Product<'_>),
    pub(crate) rms_norm: unsafe fn(*const f32, *const f32, usize, f32, *mut f32),
    pub(crate) silu_mul: unsafe fn(*const f32, *const f32, usize, *mut f32),
    pub(crate) gelu_mul: unsafe fn(*const f32, *const f32, usize, *mut f32),
    pub(crate) add: unsafe fn(*mut f32, *const f32, usize),
    pub(crate) rotate: unsafe fn(*mut f32, *const f32, *const f32, usize),
    pub(crate) argmax: unsafe fn(*const f32, usize) -> usize,
    pub(crate) finite: unsafe fn(*const f32, usize) -> bool,
}
