//! Kernels for AVX-512 with VNNI: a panel's 16 rows are the lanes of one vector.
//!
//! Invariants: the operations of `scalar`, in its order, in every lane.

#![allow(clippy::needless_range_loop)] // over registers: how many is known when it is compiled

pub(super) mod bf16;
mod exact;
mod int8;
pub(super) mod small;
pub(super) mod unpack;

use std::arch::x86_64::*;

use super::{ActsPtr, Mode, Product, Table};
use crate::weights::{BLOCK, Form, PANEL};

pub(super) static TABLE: Table = Table {
    prepare: small::prepare,
    matmul,
    rms_norm: small::rms_norm,
    silu_mul: small::silu_mul,
    gelu_mul: small::gelu_mul,
    add: small::add,
    rotate: small::rotate,
    argmax: small::argmax,
    finite: small::finite,
};

/// `Form` as a constant that functions are compiled for.
pub(super) const Q4: u8 = 0;
pub(super) const Q8: u8 = 1;
pub(super) const F16: u8 = 2;
pub(super) const BF16: u8 = 3;
pub(super) const F32: u8 = 4;

/// The bytes of a block of a form.
pub(super) const fn block_bytes(form: u8) -> usize {
    match form {
        Q4 => Form::Q4.block_bytes(),
        Q8 => Form::Q8.block_bytes(),
        F16 => Form::F16.block_bytes(),
        BF16 => Form::Bf16.block_bytes(),
        _ => Form::F32.block_bytes(),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn matmul(p: &Product<'_>) {
    // SAFETY: the caller's: activations are prepared in the mode that the form needs, `out` has room.
    unsafe {
        match (p.w.form(), p.acts.mode.int8_with(p.w.form())) {
            (Form::Q4, true) => int8::matmul::<Q4>(p),
            (Form::Q8, true) => int8::matmul::<Q8>(p),
            (Form::Q4, false) => exact::matmul::<Q4>(p),
            (Form::Q8, false) => exact::matmul::<Q8>(p),
            (Form::F16, _) => exact::matmul::<F16>(p),
            (Form::Bf16, _) => exact::matmul::<BF16>(p),
            (Form::F32, _) => exact::matmul::<F32>(p),
        }
    }
}

/// A block's 16 scales or minima.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: the caller's: 32 bytes.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// Puts (or adds) a panel's 16 sums to where they go.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn put(p: &Product<'_>, panel: usize, row: usize, sums: __m512) {
    // SAFETY: the caller's: `out` has room for every row and panel of the product.
    unsafe {
        let at = (row - p.rows.start) * p.stride + (panel - p.panels.start) * PANEL;
        let out = p.out.add(at);
        let sums = if p.add {
            _mm512_add_ps(_mm512_loadu_ps(out), sums)
        } else {
            sums
        };
        _mm512_storeu_ps(out, sums);
    }
}

/// Where row `row` of block `b` is among the activations' cells.
#[inline]
fn cell(acts: &ActsPtr, b: usize, row: usize) -> usize {
    b * acts.rows + row
}
