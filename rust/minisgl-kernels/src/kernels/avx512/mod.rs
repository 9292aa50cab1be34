//! Kernels for AVX-512 with VNNI: a panel's 16 rows are the lanes of one vector.
//!
//! Invariants: every lane runs the operations of `scalar`, in the same order.

#![allow(clippy::needless_range_loop)] // over registers: how many is known when it is compiled

pub(super) mod bf16;
mod exact;
mod int8;
mod many;
mod quantize;
pub(super) mod small;
pub(super) mod unpack;

use std::arch::x86_64::*;

use super::place::{Place, block_bytes, by_kind, cell, layout, like, table};
use super::scalar::{cell16, input_sums, offsets, scaled_sum};
use super::{ActsPtr, Mode, Product, Table};
use crate::Kind;
use crate::panels::{BLOCK, PANEL};

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

/// Kind ids as constants, by which functions are specialized.
pub(super) const Q4: u8 = Kind::Q4_1 as u8;
pub(super) const F16: u8 = Kind::F16 as u8;
pub(super) const BF16: u8 = Kind::BF16 as u8;
pub(super) const F32: u8 = Kind::F32 as u8;
pub(super) const Q4_K: u8 = Kind::Q4_K as u8;
pub(super) const Q5_K: u8 = Kind::Q5_K as u8;
pub(super) const Q6_K: u8 = Kind::Q6_K as u8;
const Q2_K: u8 = Kind::Q2_K as u8;
const Q3_K: u8 = Kind::Q3_K as u8;
const IQ4_XS: u8 = Kind::IQ4_XS as u8;
const MXFP4: u8 = Kind::MXFP4 as u8;
const NVFP4: u8 = Kind::NVFP4 as u8;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn matmul(p: &Product<'_>) {
    // SAFETY: the caller guarantees activations are prepared in the mode that the kind needs, `out` has room.
    unsafe {
        by_kind!(
            p.w.kind(),
            KIND,
            match p.acts.mode.has_int8() {
                true => int8::matmul::<KIND, { many::like_int8(KIND) }>(p),
                false => exact::matmul::<KIND, { like(KIND) }>(p),
            },
            exact::matmul::<KIND, { like(KIND) }>(p)
        );
    }
}

/// Converts 16 f16 values to f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: the caller guarantees 32 bytes.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// Broadcasts four int8 activations to every lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn four(q: *const i8) -> __m512i {
    // SAFETY: the caller guarantees 4 bytes.
    unsafe { _mm512_set1_epi32(q.cast::<i32>().read_unaligned()) }
}

/// Loads 16 bytes, one into each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn bytes<const SIGNED: bool>(at: *const u8) -> __m512i {
    // SAFETY: the caller guarantees 16 bytes.
    let v = unsafe { _mm_loadu_si128(at.cast()) };
    if SIGNED {
        _mm512_cvtepi8_epi32(v)
    } else {
        _mm512_cvtepu8_epi32(v)
    }
}

/// Extracts 16 fields of `bits` bits, which begin at bit `from` of 16 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn fields(at: *const u8, from: usize, bits: u32) -> __m512i {
    // SAFETY: the caller guarantees 16 bytes.
    let v = unsafe { bytes::<false>(at) };
    let v = _mm512_srl_epi32(v, _mm_cvtsi32_si128(from as i32));
    _mm512_and_si512(v, _mm512_set1_epi32((1 << bits) - 1))
}

/// Returns the scales of a block's 16 rows for sub-block `sub` of its inputs (`weights::Block::scale`).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn scale<const KIND: u8>(block: Place, sub: usize) -> __m512 {
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
                let code = _mm512_or_si512(low, _mm512_slli_epi32::<4>(high));
                _mm512_sub_epi32(code, _mm512_set1_epi32(32))
            }
            IQ4_XS => bytes::<true>(head.add(32 + 16 * at)),
            MXFP4 => return half_of_e8m0(bytes::<false>(head)),
            NVFP4 => return half_of_e4m3(bytes::<false>(head.add(32 * at + 16 * sub))),
            _ => return halves(head),
        };
        _mm512_mul_ps(halves(head), _mm512_cvtepi32_ps(codes))
    }
}

/// Converts e8m0 exponents to f32, halved (`blocks::half_of_e8m0` by lane).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn half_of_e8m0(e: __m512i) -> __m512 {
    let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
    let small = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
    let below = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
    _mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, below, small))
}

/// Converts e4m3 floats to f32, halved (`blocks::half_of_e4m3` by lane), avoiding slow subnormal values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn half_of_e4m3(bits: __m512i) -> __m512 {
    let (one, eight) = (_mm512_set1_epi32(1), _mm512_set1_epi32(8));
    let nan = _mm512_cmpeq_epi32_mask(bits, _mm512_set1_epi32(0x7f));
    let exponent = _mm512_and_si512(_mm512_srli_epi32::<3>(bits), _mm512_set1_epi32(15));
    let low = _mm512_and_si512(bits, _mm512_set1_epi32(7));
    let mantissa = _mm512_mask_add_epi32(low, _mm512_test_epi32_mask(exponent, exponent), low, eight);
    let by = _mm512_add_epi32(_mm512_max_epi32(exponent, one), _mm512_set1_epi32(127 - 11));
    let by = _mm512_castsi512_ps(_mm512_slli_epi32::<23>(by));
    _mm512_maskz_mul_ps(!nan, _mm512_cvtepi32_ps(mantissa), by)
}

/// Returns the minima of a block's 16 rows for sub-block `sub` of its inputs (`weights::Block::min`).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn min<const KIND: u8>(block: Place, sub: usize) -> __m512 {
    // SAFETY: the caller guarantees a whole head.
    unsafe {
        let (head, at) = (block.head, block.at);
        let codes = match KIND {
            Q4_K | Q5_K => bytes::<false>(head.add(64 + 32 * at + 16)),
            Q2_K => fields(head.add(64 + 32 * at + 16 * sub), 4, 4),
            _ => return halves(head.add(32)),
        };
        _mm512_mul_ps(halves(head.add(32)), _mm512_cvtepi32_ps(codes))
    }
}

/// Writes a panel's 16 sums for a row to the output, or adds them if `p.add` is set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn put(p: &Product<'_>, panel: usize, row: usize, sums: __m512) {
    // SAFETY: the caller guarantees `out` has room for every row and panel of the product.
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
