//! Kernels for AVX2 with FMA and F16C, and for AVX-VNNI: a panel's 16 rows are the lanes of two vectors.
//!
//! Invariants: every lane runs the operations of `scalar`, in the same order.

#![allow(clippy::needless_range_loop)] // over registers: how many is known when it is compiled

mod bytes;
mod exact;
mod int8;
mod many;
mod small;

use std::arch::x86_64::*;

use super::place::{Place, block_bytes, by_kind, cell, layout, like, table};
use super::scalar::{cell16, input_sums, offsets, scaled_sum};
use super::{ActsPtr, Mode, Product, Table};
use crate::Kind;
use crate::panels::{BLOCK, PANEL};

pub(super) static TABLE: Table = Table {
    prepare: small::prepare,
    matmul: matmul::<false>,
    rms_norm: small::rms_norm,
    silu_mul: small::silu_mul,
    gelu_mul: small::gelu_mul,
    add: small::add,
    rotate: small::rotate,
    argmax: small::argmax,
    finite: small::finite,
};

/// Function table that uses the AVX-VNNI instruction.
pub(super) static VNNI: Table = Table {
    matmul: matmul::<true>,
    ..TABLE
};

/// Kind ids as constants, by which functions are specialized.
const Q4: u8 = Kind::Q4_1 as u8;
const Q8: u8 = Kind::Q8_0 as u8;
const F16: u8 = Kind::F16 as u8;
const BF16: u8 = Kind::BF16 as u8;
const F32: u8 = Kind::F32 as u8;
const Q4_K: u8 = Kind::Q4_K as u8;
const Q5_K: u8 = Kind::Q5_K as u8;
const Q6_K: u8 = Kind::Q6_K as u8;
const Q2_K: u8 = Kind::Q2_K as u8;
const Q3_K: u8 = Kind::Q3_K as u8;
const IQ4_XS: u8 = Kind::IQ4_XS as u8;
const MXFP4: u8 = Kind::MXFP4 as u8;
const NVFP4: u8 = Kind::NVFP4 as u8;

/// Prefetch distance of weights in bytes.
const AHEAD: usize = 4096;

/// Sixteen f32 lanes, one for each row of a panel.
type Pair = [__m256; 2];

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn matmul<const VNNI: bool>(p: &Product<'_>) {
    // SAFETY: the caller guarantees activations are prepared in the mode that the kind needs, `out` has room.
    unsafe {
        by_kind!(
            p.w.kind(),
            KIND,
            match p.acts.mode.has_int8() {
                true => int8::matmul::<KIND, { bytes::like_int8(KIND) }, VNNI>(p),
                false => exact::matmul::<KIND, { like(KIND) }>(p),
            },
            exact::matmul::<KIND, { like(KIND) }>(p)
        );
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn zero() -> Pair {
    [_mm256_setzero_ps(); 2]
}

/// Converts 16 f16 values to f32.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn halves(at: *const u8) -> Pair {
    // SAFETY: the caller guarantees 32 bytes.
    unsafe {
        [
            _mm256_cvtph_ps(_mm_loadu_si128(at.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(at.add(16).cast())),
        ]
    }
}

/// Sixteen i32 lanes, one for each row of a panel.
type Whole = [__m256i; 2];

/// Loads 16 bytes, one into each lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn bytes<const SIGNED: bool>(at: *const u8) -> Whole {
    // SAFETY: the caller guarantees 16 bytes.
    both!([0, 8], |i| unsafe {
        let v = _mm_loadl_epi64(at.add(i).cast());
        if SIGNED {
            _mm256_cvtepi8_epi32(v)
        } else {
            _mm256_cvtepu8_epi32(v)
        }
    })
}

/// Extracts 16 fields of `bits` bits, which begin at bit `from` of 16 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fields(at: *const u8, from: usize, bits: u32) -> Whole {
    let (by, mask) = (_mm_cvtsi32_si128(from as i32), _mm256_set1_epi32((1 << bits) - 1));
    // SAFETY: the caller guarantees 16 bytes.
    both!(unsafe { bytes::<false>(at) }, |v| _mm256_and_si256(
        _mm256_srl_epi32(v, by),
        mask
    ))
}

/// Returns the scales of a block's 16 rows for sub-block `sub` of its inputs (`weights::Block::scale`).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scale<const KIND: u8>(block: Place, sub: usize) -> Pair {
    // SAFETY: the caller guarantees a whole head.
    unsafe {
        let (head, at) = (block.head, block.at);
        let codes = match KIND {
            Q4_K | Q5_K => bytes::<false>(head.add(64 + 32 * at)),
            Q6_K => bytes::<true>(head.add(32 + 32 * at + 16 * sub)),
            Q2_K => fields(head.add(64 + 32 * at + 16 * sub), 0, 4),
            Q3_K => {
                let low = fields(head.add(32 + 16 * at), 4 * sub, 4);
                let high = fields(head.add(160 + at / 2 * 16), at % 2 * 4 + 2 * sub, 2);
                both!([0, 1], |i| {
                    let code = _mm256_or_si256(low[i], _mm256_slli_epi32::<4>(high[i]));
                    _mm256_sub_epi32(code, _mm256_set1_epi32(32))
                })
            }
            IQ4_XS => bytes::<true>(head.add(32 + 16 * at)),
            MXFP4 => return both!(bytes::<false>(head), |e| half_of_e8m0(e)),
            NVFP4 => return both!(bytes::<false>(head.add(32 * at + 16 * sub)), |bits| half_of_e4m3(bits)),
            _ => return halves(head),
        };
        product(halves(head), both!(codes, |code| _mm256_cvtepi32_ps(code)))
    }
}

/// Converts e8m0 exponents to f32, halved (`blocks::half_of_e8m0` by lane).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn half_of_e8m0(e: __m256i) -> __m256 {
    let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
    let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
    let below = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
    _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, below))
}

/// Converts e4m3 floats to f32, halved (`blocks::half_of_e4m3` by lane), avoiding slow subnormal values.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn half_of_e4m3(bits: __m256i) -> __m256 {
    let (zero, eight) = (_mm256_setzero_si256(), _mm256_set1_epi32(8));
    let nan = _mm256_cmpeq_epi32(bits, _mm256_set1_epi32(0x7f));
    let exponent = _mm256_and_si256(_mm256_srli_epi32::<3>(bits), _mm256_set1_epi32(15));
    let low = _mm256_and_si256(bits, _mm256_set1_epi32(7));
    let implied = _mm256_andnot_si256(_mm256_cmpeq_epi32(exponent, zero), eight);
    let mantissa = _mm256_cvtepi32_ps(_mm256_add_epi32(low, implied));
    let by = _mm256_max_epi32(exponent, _mm256_set1_epi32(1));
    let by = _mm256_slli_epi32::<23>(_mm256_add_epi32(by, _mm256_set1_epi32(127 - 11)));
    let number = _mm256_mul_ps(mantissa, _mm256_castsi256_ps(by));
    _mm256_castsi256_ps(_mm256_andnot_si256(nan, _mm256_castps_si256(number)))
}

/// Returns the minima of a block's 16 rows for sub-block `sub` of its inputs (`weights::Block::min`).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn min<const KIND: u8>(block: Place, sub: usize) -> Pair {
    // SAFETY: the caller guarantees a whole head.
    unsafe {
        let (head, at) = (block.head, block.at);
        let codes = match KIND {
            Q4_K | Q5_K => bytes::<false>(head.add(64 + 32 * at + 16)),
            Q2_K => fields(head.add(64 + 32 * at + 16 * sub), 4, 4),
            _ => return halves(head.add(32)),
        };
        product(halves(head.add(32)), both!(codes, |code| _mm256_cvtepi32_ps(code)))
    }
}

/// Returns `a + b`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum(a: Pair, b: Pair) -> Pair {
    [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
}

/// Returns `a b`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn product(a: Pair, b: Pair) -> Pair {
    [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
}

/// Loads 64 bytes: 4 of each of 16 rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn vectors(at: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller guarantees 64 bytes.
    unsafe { [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32).cast())] }
}

/// Loads 16 f32.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load(at: *const f32) -> Pair {
    // SAFETY: the caller guarantees 16 elements.
    unsafe { [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))] }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store(at: *mut f32, v: Pair) {
    // SAFETY: the caller guarantees room for 16 elements.
    unsafe {
        _mm256_storeu_ps(at, v[0]);
        _mm256_storeu_ps(at.add(8), v[1]);
    }
}

/// Returns `a x + s`, fused.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fma(a: Pair, x: __m256, s: Pair) -> Pair {
    [_mm256_fmadd_ps(a[0], x, s[0]), _mm256_fmadd_ps(a[1], x, s[1])]
}

/// Returns `a b + s`, fused.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fma2(a: Pair, b: Pair, s: Pair) -> Pair {
    [_mm256_fmadd_ps(a[0], b[0], s[0]), _mm256_fmadd_ps(a[1], b[1], s[1])]
}

/// Writes a panel's 16 sums for a row to the output, or adds them if `p.add` is set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put(p: &Product<'_>, panel: usize, row: usize, mut sums: Pair) {
    // SAFETY: the caller guarantees `out` has room for every row and panel of the product.
    unsafe {
        let at = (row - p.rows.start) * p.stride + (panel - p.panels.start) * PANEL;
        let out = p.out.add(at);
        if p.add {
            sums = sum(load(out), sums);
        }
        store(out, sums);
    }
}
