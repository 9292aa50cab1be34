//! Kernels for AVX2 with FMA and F16C: a panel's 16 rows are the lanes of two vectors.
//!
//! Invariants: the operations of `scalar`, in its order, in every lane.

#![allow(clippy::needless_range_loop)] // over registers: how many is known when it is compiled

mod exact;
mod int8;
mod many;
mod small;

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
const Q4: u8 = 0;
const Q8: u8 = 1;
const F16: u8 = 2;
const BF16: u8 = 3;
const F32: u8 = 4;

/// How far ahead weights are asked for.
const AHEAD: usize = 4096;

/// The bytes of a block of a form.
const fn block_bytes(form: u8) -> usize {
    match form {
        Q4 => Form::Q4.block_bytes(),
        Q8 => Form::Q8.block_bytes(),
        F16 => Form::F16.block_bytes(),
        BF16 => Form::Bf16.block_bytes(),
        _ => Form::F32.block_bytes(),
    }
}

/// A panel's 16 lanes.
type Pair = [__m256; 2];

#[target_feature(enable = "avx2,fma,f16c")]
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

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn zero() -> Pair {
    [_mm256_setzero_ps(); 2]
}

/// A block's 16 scales or minima (or 16 halves of any kind).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn halves(at: *const u8) -> Pair {
    // SAFETY: the caller's: 32 bytes.
    unsafe {
        [
            _mm256_cvtph_ps(_mm_loadu_si128(at.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(at.add(16).cast())),
        ]
    }
}

/// 64 bytes: some of each of 16 rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn vectors(at: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's: 64 bytes.
    unsafe { [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32).cast())] }
}

/// 16 numbers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load(at: *const f32) -> Pair {
    // SAFETY: the caller's: 16 numbers.
    unsafe { [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))] }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store(at: *mut f32, v: Pair) {
    // SAFETY: the caller's: room for 16 numbers.
    unsafe {
        _mm256_storeu_ps(at, v[0]);
        _mm256_storeu_ps(at.add(8), v[1]);
    }
}

/// `a x + s`, fused.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fma(a: Pair, x: __m256, s: Pair) -> Pair {
    [_mm256_fmadd_ps(a[0], x, s[0]), _mm256_fmadd_ps(a[1], x, s[1])]
}

/// `a b + s`, fused.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fma2(a: Pair, b: Pair, s: Pair) -> Pair {
    [_mm256_fmadd_ps(a[0], b[0], s[0]), _mm256_fmadd_ps(a[1], b[1], s[1])]
}

/// Puts (or adds) a panel's 16 sums to where they go.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put(p: &Product<'_>, panel: usize, row: usize, mut sums: Pair) {
    // SAFETY: the caller's: `out` has room for every row and panel of the product.
    unsafe {
        let at = (row - p.rows.start) * p.stride + (panel - p.panels.start) * PANEL;
        let out = p.out.add(at);
        if p.add {
            let there = load(out);
            sums = [_mm256_add_ps(there[0], sums[0]), _mm256_add_ps(there[1], sums[1])];
        }
        store(out, sums);
    }
}

/// Where row `row` of block `b` is among the activations' cells.
#[inline]
fn cell(acts: &ActsPtr, b: usize, row: usize) -> usize {
    b * acts.rows + row
}
