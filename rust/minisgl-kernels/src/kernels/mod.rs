//! Kernels for each instruction set: matmul by panels, and elementwise operations between matmuls.
//!
//! Every output element comes from one fixed sequence of operations, which `scalar` defines; the other instruction sets
//! run that sequence in the lanes of their vectors: one output row of the matrix a lane, inputs in the same order.
//!
//! Invariants: same bits on every instruction set, for every number of rows and split of panels; `amx` alone has exact
//! matmuls with bits of their own (`Isa::sums_as_scalar`), still the same for every number of rows and split.

/// Maps an expression over two vectors. A closure for `array::map` would be called for each vector, since code with the
/// instructions of a set is not inlined into code without.
#[cfg(all(target_arch = "x86_64", not(miri)))]
macro_rules! both {
    ($two:expr, |$one:ident| $of:expr) => {{
        let [first, second] = $two;
        [
            {
                let $one = first;
                $of
            },
            {
                let $one = second;
                $of
            },
        ]
    }};
}

/// Defines a function that dispatches on the instruction set and runs `$body` inlined in each set's vectors.
macro_rules! on_each_isa {
    ($(#[$doc:meta])* $name:ident($($arg:ident: $of:ty),*) $(-> $found:ty)? as $body:ident) => {
        $(#[$doc])*
        pub fn $name(isa: Isa, $($arg: $of),*) $(-> $found)? {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            {
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $of),*) $(-> $found)? {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($arg: $of),*) $(-> $found)? {
                    $body($($arg),*)
                }
                match isa {
                    // SAFETY: an `Isa` of `detect` can run here.
                    Isa::Avx2 | Isa::AvxVnni => return unsafe { avx2($($arg),*) },
                    // SAFETY: as above.
                    Isa::Avx512 | Isa::Amx => return unsafe { avx512($($arg),*) },
                    Isa::Scalar | Isa::Neon => {}
                }
            }
            let _ = isa;
            $body($($arg),*)
        }
    };
}

mod acts;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod amx;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx2;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx512;
pub mod convolution;
pub mod delta_rule;
mod isa;
pub mod mamba;
#[cfg(any(target_arch = "aarch64", test))]
mod neon;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod place;
pub mod plain;
pub mod scalar;
pub mod softmax;

use std::ops::Range;

pub use acts::{Acts, ActsPtr, Mode};
pub(crate) use acts::{Product, Table};
pub use isa::Isa;

use crate::Kind;
use crate::panels::{Matrix, PANEL};

/// Blocks that are prepared of one row before the next one's turn.
const BLOCKS: usize = 16;

/// Kernel functions of one instruction set.
#[derive(Clone, Copy)]
pub struct Kernels {
    isa: Isa,
    table: &'static Table,
}

impl Kernels {
    /// Returns the functions of `isa`, which must come from `Isa::detect`: undefined behaviour otherwise.
    #[must_use]
    pub fn new(isa: Isa) -> Self {
        let table = match isa {
            Isa::Scalar => &scalar::TABLE,
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Isa::Amx => &amx::TABLE,
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Isa::Avx2 => &avx2::TABLE,
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Isa::AvxVnni => &avx2::VNNI,
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Isa::Avx512 => &avx512::TABLE,
            #[cfg(any(target_arch = "aarch64", test))]
            Isa::Neon => &neon::TABLE,
            #[allow(unreachable_patterns)] // on targets with every instruction set
            _ => &scalar::TABLE,
        };
        Self { isa, table }
    }

    /// Returns the functions for decode rows. AMX multiplies few rows more slowly than AVX-512, except with bytes and
    /// bf16 weights, and in another order of sums. So the kind of row decides, never the number of rows.
    #[must_use]
    #[inline]
    pub fn decoding(self) -> Self {
        let table = match self.isa {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Isa::Amx => &amx::DECODING,
            _ => self.table,
        };
        Self { table, ..self }
    }

    /// Returns the instruction set of these functions.
    #[must_use]
    #[inline]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Prepares row `row` of `acts` from the `acts.k` elements at `x`, for matmuls by the same `Kernels`.
    ///
    /// # Safety
    /// `x` has `acts.k` readable elements, `row < acts.rows`, and nothing else uses that row of `acts` meanwhile.
    #[inline]
    pub unsafe fn prepare(&self, x: *const f32, acts: ActsPtr, row: usize) {
        debug_assert!(row < acts.rows);
        // SAFETY: upheld by the caller.
        unsafe { (self.table.prepare)(x, acts, row, 0..acts.blocks()) }
    }

    /// Prepares several rows like [`Self::prepare`], `stride` elements apart. Some blocks of all rows come first, then
    /// the next ones: the rows' scales share cache lines.
    ///
    /// # Safety
    /// The conditions of [`Self::prepare`] hold for each row.
    pub unsafe fn prepare_rows(&self, x: *const f32, stride: usize, acts: ActsPtr, rows: Range<usize>) {
        debug_assert!(rows.end <= acts.rows);
        for first in (0..acts.blocks()).step_by(BLOCKS) {
            let blocks = first..(first + BLOCKS).min(acts.blocks());
            for (i, row) in rows.clone().enumerate() {
                // SAFETY: upheld by the caller.
                unsafe { (self.table.prepare)(x.add(i * stride), acts, row, blocks.clone()) }
            }
        }
    }

    /// Computes 16 outputs for each row and panel: `out[(row - rows.start) * stride + (panel - panels.start) * 16 ..]`
    /// is set to the products of the panel's rows with the row of activations, or (`add`) increased by them.
    /// Unquantized matrices need f32 activations; quantized ones use int8 where `acts` has it.
    ///
    /// # Safety
    /// The rows are prepared and not written meanwhile; `out` is large enough, and nothing else uses it meanwhile.
    ///
    /// # Panics
    /// If panels, rows, `k` or mode do not fit.
    #[allow(clippy::too_many_arguments)] // the parameters of a matmul
    #[inline]
    pub unsafe fn matmul(
        &self,
        w: &Matrix,
        panels: Range<usize>,
        acts: ActsPtr,
        rows: Range<usize>,
        out: *mut f32,
        stride: usize,
        add: bool,
    ) {
        assert!(panels.end <= w.panels() && rows.end <= acts.rows && w.k() == acts.k);
        assert!(acts.mode.serves(w.kind()), "{:?} with {:?}", w.kind(), acts.mode);
        assert!(rows.len() <= 1 || stride >= panels.len() * PANEL);
        let product = Product {
            w,
            panels,
            acts,
            rows,
            out,
            stride,
            add,
        };
        // SAFETY: upheld by the caller, and the shapes fit.
        unsafe { (self.table.matmul)(&product) }
    }

    /// Returns true if this CPU supports [`Self::matmul_bf16`].
    #[must_use]
    pub fn has_bf16(&self) -> bool {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        return matches!(self.isa, Isa::Avx512 | Isa::Amx) && avx512::bf16::is_here();
        #[allow(unreachable_code)] // where there are no such CPUs
        false
    }

    /// Prepares row `row` of `acts` for [`Self::matmul_bf16`], rounding the `acts.k` elements at `x` to bf16.
    ///
    /// # Safety
    /// The conditions of [`Self::prepare`] hold, and `has_bf16` is true.
    ///
    /// # Panics
    /// If `acts` has another mode.
    pub unsafe fn prepare_bf16(&self, x: *const f32, acts: ActsPtr, row: usize) {
        assert!(acts.mode == Mode::Bf16 && self.has_bf16());
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: upheld by the caller; the CPU has AVX-512.
        unsafe {
            avx512::small::prepare_as::<false, true>(x, acts, row, 0..acts.blocks());
        }
        let _ = (x, row);
    }

    /// Multiplies a bf16 matrix by rows of bf16, overwriting `out` in the layout of [`Self::matmul`]. The last bits
    /// differ from `matmul`, but are the same for every number of rows and split of panels.
    ///
    /// # Safety
    /// The conditions of [`Self::matmul`] hold, with rows from [`Self::prepare_bf16`].
    ///
    /// # Panics
    /// If panels, rows, `k`, kind or mode do not fit, or the CPU does not support it.
    pub unsafe fn matmul_bf16(
        &self,
        w: &Matrix,
        panels: Range<usize>,
        acts: ActsPtr,
        rows: Range<usize>,
        out: *mut f32,
        stride: usize,
    ) {
        assert!(panels.end <= w.panels() && rows.end <= acts.rows && w.k() == acts.k);
        assert!(w.kind() == Kind::BF16 && acts.mode == Mode::Bf16 && self.has_bf16());
        assert!(rows.len() <= 1 || stride >= panels.len() * PANEL);
        let product = Product {
            w,
            panels,
            acts,
            rows,
            out,
            stride,
            add: false,
        };
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: upheld by the caller, and the shapes fit.
        unsafe {
            avx512::bf16::matmul(&product);
        }
        let _ = product;
    }

    /// Computes the RMS norm `out = x / sqrt(mean of squares + eps) * w` over `n` elements; `out` may be `x`.
    ///
    /// # Safety
    /// The pointers have `n` elements each.
    #[inline]
    pub unsafe fn rms_norm(&self, x: *const f32, w: *const f32, n: usize, eps: f32, out: *mut f32) {
        // SAFETY: upheld by the caller.
        unsafe { (self.table.rms_norm)(x, w, n, eps, out) }
    }

    /// Computes `out = gate / (1 + exp(-gate)) * up` (SwiGLU) over `n` elements; `out` may be either input.
    ///
    /// # Safety
    /// The pointers have `n` elements each.
    #[inline]
    pub unsafe fn silu_mul(&self, gate: *const f32, up: *const f32, n: usize, out: *mut f32) {
        // SAFETY: upheld by the caller.
        unsafe { (self.table.silu_mul)(gate, up, PANEL, n, out) }
    }

    /// Computes [`Self::silu_mul`] of gates and ups whose panels of 16 take turns, gates first, into adjacent elements.
    ///
    /// # Safety
    /// `both` has `2 * n` elements, `out` has `n`, and they do not overlap.
    #[inline]
    pub unsafe fn silu_mul_of_panels(&self, both: *const f32, n: usize, out: *mut f32) {
        // SAFETY: upheld by the caller.
        unsafe { (self.table.silu_mul)(both, both.add(PANEL), 2 * PANEL, n, out) }
    }

    /// Computes `out = gelu(gate) * up` (tanh approximation) over `n` elements; `out` may be either input.
    ///
    /// # Safety
    /// The pointers have `n` elements each.
    #[inline]
    pub unsafe fn gelu_mul(&self, gate: *const f32, up: *const f32, n: usize, out: *mut f32) {
        // SAFETY: upheld by the caller.
        unsafe { (self.table.gelu_mul)(gate, up, PANEL, n, out) }
    }

    /// Computes [`Self::gelu_mul`] of gates and ups whose panels of 16 take turns, gates first, into adjacent elements.
    ///
    /// # Safety
    /// `both` has `2 * n` elements, `out` has `n`, and they do not overlap.
    #[inline]
    pub unsafe fn gelu_mul_of_panels(&self, both: *const f32, n: usize, out: *mut f32) {
        // SAFETY: upheld by the caller.
        unsafe { (self.table.gelu_mul)(both, both.add(PANEL), 2 * PANEL, n, out) }
    }

    /// Adds `y` to `x` over `n` elements.
    ///
    /// # Safety
    /// The pointers have `n` elements each.
    #[inline]
    pub unsafe fn add(&self, x: *mut f32, y: *const f32, n: usize) {
        // SAFETY: upheld by the caller.
        unsafe { (self.table.add)(x, y, n) }
    }

    /// Applies RoPE: rotates elements i and `half + i` of `x` by the angle with cosine `cos[i]` and sine `sin[i]`.
    ///
    /// # Safety
    /// `x` has `2 * half` elements, `cos` and `sin` have `half`.
    #[inline]
    pub unsafe fn rotate(&self, x: *mut f32, cos: *const f32, sin: *const f32, half: usize) {
        // SAFETY: upheld by the caller.
        unsafe { (self.table.rotate)(x, cos, sin, half) }
    }

    /// Returns the index of the largest element, the first of equal ones; NaN is ignored; 0 if all are NaN.
    ///
    /// # Safety
    /// `x` has `n` elements.
    #[inline]
    pub unsafe fn argmax(&self, x: *const f32, n: usize) -> usize {
        // SAFETY: upheld by the caller.
        unsafe { (self.table.argmax)(x, n) }
    }

    /// Returns true if no element is infinite or NaN.
    ///
    /// # Safety
    /// `x` has `n` elements.
    #[inline]
    pub unsafe fn finite(&self, x: *const f32, n: usize) -> bool {
        // SAFETY: upheld by the caller.
        unsafe { (self.table.finite)(x, n) }
    }
}

#[cfg(test)]
mod tests;
