//! What is computed on numbers, for each instruction set: matrix products by panels and the small things between.
//!
//! Every output number comes from one fixed sequence of operations, which `scalar` defines; the other sets run that
//! sequence in the lanes of their vectors: one output row of the matrix a lane, inputs in the same order.
//!
//! Invariants: same bits on every instruction set, for every number of rows and cut of panels; `amx` alone has exact
//! products with bits of their own (`Isa::sums_as_scalar`), still the same for every number of rows and cut.

/// What becomes of each of two. A closure for `array::map` would be called for each vector, since code with the
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

/// Makes of `$body`, which is inlined, a function that runs it in the vectors of an instruction set.
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

/// The functions of one instruction set.
#[derive(Clone, Copy)]
pub struct Kernels {
    isa: Isa,
    table: &'static Table,
}

impl Kernels {
    /// The functions of `isa`, which has come from `Isa::detect`: others than the CPU's are undefined behaviour.
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
            #[allow(unreachable_patterns)] // where all are built
            _ => &scalar::TABLE,
        };
        Self { isa, table }
    }

    /// For rows that decode: AMX multiplies few rows more slowly than AVX-512 does, but for bytes and bf16 weights, and in
    /// another order. So what a row is chooses between the two, and never how many there are.
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

    /// Whose functions these are.
    #[must_use]
    #[inline]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Makes row `row` of `acts` from the `acts.k` numbers at `x`, for products by these very kernels.
    ///
    /// # Safety
    /// `x` has `acts.k` readable numbers, `row < acts.rows`, and nobody else uses that row of `acts` meanwhile.
    #[inline]
    pub unsafe fn prepare(&self, x: *const f32, acts: ActsPtr, row: usize) {
        debug_assert!(row < acts.rows);
        // SAFETY: the caller's.
        unsafe { (self.table.prepare)(x, acts, row) }
    }

    /// For each row and panel 16 numbers: `out[(row - rows.start) * stride + (panel - panels.start) * 16 ..]` are
    /// the products of the panel's rows with the row of activations, or (`add`) grow by them.
    /// Matrices that are not quantized need activations with f32, quantized ones take int8 where `acts` has it.
    ///
    /// # Safety
    /// The rows are prepared, and nobody writes to them meanwhile; `out` has room, which nobody else uses meanwhile.
    ///
    /// # Panics
    /// If panels, rows, `k` or mode do not fit.
    #[allow(clippy::too_many_arguments)] // a matrix product has as many
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
        // SAFETY: the caller's, and the shapes fit.
        unsafe { (self.table.matmul)(&product) }
    }

    /// Whether `matmul_bf16` is there.
    #[must_use]
    pub fn has_bf16(&self) -> bool {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        return matches!(self.isa, Isa::Avx512 | Isa::Amx) && avx512::bf16::is_here();
        #[allow(unreachable_code)] // where there are no such CPUs
        false
    }

    /// As `prepare`, for `matmul_bf16`: numbers are rounded to bf16.
    ///
    /// # Safety
    /// As of `prepare`, and `has_bf16`.
    ///
    /// # Panics
    /// If `acts` has another mode.
    pub unsafe fn prepare_bf16(&self, x: *const f32, acts: ActsPtr, row: usize) {
        assert!(acts.mode == Mode::Bf16 && self.has_bf16());
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: the caller's; the CPU has AVX-512.
        unsafe {
            avx512::small::prepare_as::<false, true>(x, acts, row);
        }
        let _ = (x, row);
    }

    /// As `matmul` without `add`, of a bf16 matrix and rows of bf16, with other bits in the last places: the same for
    /// every number of rows and cut of panels.
    ///
    /// # Safety
    /// As of `matmul`, with rows that `prepare_bf16` made.
    ///
    /// # Panics
    /// If panels, rows, `k`, kind or mode do not fit, or it is not there.
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
        // SAFETY: the caller's, and the shapes fit.
        unsafe {
            avx512::bf16::matmul(&product);
        }
        let _ = product;
    }

    /// `out = x / sqrt(mean of squares + eps) * w`, over `n` numbers; `out` may be `x`.
    ///
    /// # Safety
    /// The pointers have `n` numbers each.
    #[inline]
    pub unsafe fn rms_norm(&self, x: *const f32, w: *const f32, n: usize, eps: f32, out: *mut f32) {
        // SAFETY: the caller's.
        unsafe { (self.table.rms_norm)(x, w, n, eps, out) }
    }

    /// `out = gate / (1 + exp(-gate)) * up`; `out` may be either.
    ///
    /// # Safety
    /// The pointers have `n` numbers each.
    #[inline]
    pub unsafe fn silu_mul(&self, gate: *const f32, up: *const f32, n: usize, out: *mut f32) {
        // SAFETY: the caller's.
        unsafe { (self.table.silu_mul)(gate, up, n, out) }
    }

    /// `out = gelu(gate) * up`, GELU by its tanh approximation; `out` may be either.
    ///
    /// # Safety
    /// The pointers have `n` numbers each.
    #[inline]
    pub unsafe fn gelu_mul(&self, gate: *const f32, up: *const f32, n: usize, out: *mut f32) {
        // SAFETY: the caller's.
        unsafe { (self.table.gelu_mul)(gate, up, n, out) }
    }

    /// `x += y`.
    ///
    /// # Safety
    /// The pointers have `n` numbers each.
    #[inline]
    pub unsafe fn add(&self, x: *mut f32, y: *const f32, n: usize) {
        // SAFETY: the caller's.
        unsafe { (self.table.add)(x, y, n) }
    }

    /// Rotates number i and number `half + i` of `x` by the angle whose cosine and sine are at i.
    ///
    /// # Safety
    /// `x` has `2 * half` numbers, the others `half`.
    #[inline]
    pub unsafe fn rotate(&self, x: *mut f32, cos: *const f32, sin: *const f32, half: usize) {
        // SAFETY: the caller's.
        unsafe { (self.table.rotate)(x, cos, sin, half) }
    }

    /// Where the largest number is, the first of equal ones; NaN counts for nothing; 0 if there is none.
    ///
    /// # Safety
    /// `x` has `n` numbers.
    #[inline]
    pub unsafe fn argmax(&self, x: *const f32, n: usize) -> usize {
        // SAFETY: the caller's.
        unsafe { (self.table.argmax)(x, n) }
    }

    /// Whether no number is infinite or NaN.
    ///
    /// # Safety
    /// `x` has `n` numbers.
    #[inline]
    pub unsafe fn finite(&self, x: *const f32, n: usize) -> bool {
        // SAFETY: the caller's.
        unsafe { (self.table.finite)(x, n) }
    }
}

#[cfg(test)]
mod tests;
