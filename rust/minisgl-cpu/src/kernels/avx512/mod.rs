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

use super::place::{Place, block_bytes, cell, layout, like, sums};
use super::scalar::cell16;
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
pub(super) const Q4: u8 = Form::Q4 as u8;
pub(super) const Q8: u8 = Form::Q8 as u8;
pub(super) const F16: u8 = Form::F16 as u8;
pub(super) const BF16: u8 = Form::Bf16 as u8;
pub(super) const F32: u8 = Form::F32 as u8;
pub(super) const Q4_K: u8 = Form::Q4_K as u8;
pub(super) const Q5_K: u8 = Form::Q5_K as u8;
pub(super) const Q6_K: u8 = Form::Q6_K as u8;
const Q2_K: u8 = Form::Q2_K as u8;
const Q3_K: u8 = Form::Q3_K as u8;
const IQ4_XS: u8 = Form::IQ4_XS as u8;
const MXFP4: u8 = Form::MXFP4 as u8;
const NVFP4: u8 = Form::NVFP4 as u8;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn matmul(p: &Product<'_>) {
    macro_rules! exact {
        ($form:ident) => {
            exact::matmul::<{ Form::$form as u8 }, { like(Form::$form as u8) }>(p)
        };
    }
    macro_rules! either {
        ($form:ident) => {
            match p.acts.mode.int8_with(p.w.form()) {
                true => int8::matmul::<{ Form::$form as u8 }>(p),
                false => exact!($form),
            }
        };
    }
    // SAFETY: the caller's: activations are prepared in the mode that the form needs, `out` has room.
    unsafe {
        match p.w.form() {
            Form::F16 => exact!(F16),
            Form::Bf16 => exact!(Bf16),
            Form::F32 => exact!(F32),
            Form::Q4 => either!(Q4),
            Form::Q8 => either!(Q8),
            Form::Q4_0 => either!(Q4_0),
            Form::Q5_0 => either!(Q5_0),
            Form::Q5_1 => either!(Q5_1),
            Form::Q4_K => either!(Q4_K),
            Form::Q5_K => either!(Q5_K),
            Form::Q6_K => either!(Q6_K),
            Form::Q2_K => either!(Q2_K),
            Form::Q3_K => either!(Q3_K),
            Form::IQ4_NL => either!(IQ4_NL),
            Form::IQ4_XS => either!(IQ4_XS),
            Form::MXFP4 => either!(MXFP4),
            Form::NVFP4 => either!(NVFP4),
            Form::TQ2_0 => either!(TQ2_0),
            Form::Q1_0 => either!(Q1_0),
            Form::Q2_0 => either!(Q2_0),
        }
    }
}

/// 16 numbers of 16 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: the caller's: 32 bytes.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// 16 bytes, each in a lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn bytes<const SIGNED: bool>(at: *const u8) -> __m512i {
    // SAFETY: the caller's: 16 bytes.
    let v = unsafe { _mm_loadu_si128(at.cast()) };
    if SIGNED {
        _mm512_cvtepi8_epi32(v)
    } else {
        _mm512_cvtepu8_epi32(v)
    }
}

/// 16 fields of `bits` bits, which begin at bit `from` of 16 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn fields(at: *const u8, from: usize, bits: u32) -> __m512i {
    // SAFETY: the caller's: 16 bytes.
    let v = unsafe { bytes::<false>(at) };
    let v = _mm512_srl_epi32(v, _mm_cvtsi32_si128(from as i32));
    _mm512_and_si512(v, _mm512_set1_epi32((1 << bits) - 1))
}

/// A block's 16 scales, for share `sub` of its inputs (`weights::Block::scale`).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn scale<const FORM: u8>(block: Place, sub: usize) -> __m512 {
    // SAFETY: the caller's: a whole head.
    unsafe {
        let (head, at) = (block.head, block.at);
        let codes = match FORM {
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

/// As `files::blocks::half_of_e8m0`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn half_of_e8m0(e: __m512i) -> __m512 {
    let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
    let small = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
    let below = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
    _mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, below, small))
}

/// As `files::blocks::half_of_e4m3`: where f32 has its exponent and mantissa, times what the exponents differ by.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn half_of_e4m3(bits: __m512i) -> __m512 {
    let nan = _mm512_cmpeq_epi32_mask(bits, _mm512_set1_epi32(0x7f));
    let at = _mm512_slli_epi32::<20>(_mm512_and_si512(bits, _mm512_set1_epi32(0x7f)));
    let by = _mm512_set1_ps(f32::from_bits((127 + 119) << 23));
    _mm512_maskz_mul_ps(!nan, _mm512_castsi512_ps(at), by)
}

/// Its minima, likewise (`weights::Block::min`).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn min<const FORM: u8>(block: Place, sub: usize) -> __m512 {
    // SAFETY: the caller's: a whole head.
    unsafe {
        let (head, at) = (block.head, block.at);
        let codes = match FORM {
            Q4_K | Q5_K => bytes::<false>(head.add(64 + 32 * at + 16)),
            Q2_K => fields(head.add(64 + 32 * at + 16 * sub), 4, 4),
            _ => return halves(head.add(32)),
        };
        _mm512_mul_ps(halves(head.add(32)), _mm512_cvtepi32_ps(codes))
    }
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
