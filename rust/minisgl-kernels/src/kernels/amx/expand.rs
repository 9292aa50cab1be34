//! Conversion of weight blocks to AMX tiles, in the element order of a tile product's second operand: row j of a byte
//! tile has inputs 4j..4j+4 of each output (Q8's layout), row j of a bf16 tile inputs 2j and 2j + 1 (Bf16's).

use std::arch::x86_64::*;

use crate::kernels::avx512::unpack::{biased, group, steps, weights};
use crate::kernels::avx512::{BF16, F16, min, scale};
use crate::kernels::place::{Place, layout};

/// Bytes of a block as a bf16 tile.
pub(super) const TILE: usize = 1024;
/// Mask of the upper 16 of 32 bits, which are the bf16 part of an f32.
const UPPER: i32 = 0xffff_0000_u32 as i32;

/// Writes a block's integers as 8 rows of bytes, the tiles of its sub-blocks one after the other.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn to_bytes<const KIND: u8>(codes: *const u8, to: *mut u8) {
    let bias = _mm512_set1_epi8(const { layout(KIND) }.bias as i8);
    for j in 0..8 {
        // SAFETY: the caller guarantees a block's codes, 512 aligned bytes at `to`.
        unsafe { _mm512_store_si512(to.add(64 * j).cast(), _mm512_sub_epi8(biased::<KIND>(codes, j), bias)) }
    }
}

/// Returns the number of bf16 parts that represent a weight exactly.
pub(super) const fn parts_of(kind: u8) -> usize {
    match kind {
        BF16 => 1,
        F16 => 2, // 11 bits of mantissa
        _ => 3,
    }
}

/// Writes a block as `PARTS` bf16 tiles whose sum is the block. With one part, weights are rounded to the nearest bf16;
/// integers of quantized weights before scaling (not `SCALED`) are exact in bf16 and need no rounding.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn to_bf16<const KIND: u8, const PARTS: usize, const SCALED: bool>(block: Place, to: *mut u8) {
    let layout = const { layout(KIND) };
    // SAFETY: the caller guarantees a block of that kind, `PARTS` aligned tiles at `to`.
    unsafe {
        for g in 0..4 {
            let sub = g / 2 * (layout.subs / 2);
            let v = group::<KIND>(block, g);
            let mut w = [_mm512_setzero_ps(); 8];
            steps!(|T| {
                let x = weights::<KIND, T>(block, g, v);
                w[T] = match (layout.subs, layout.min) {
                    (0, _) => x,
                    _ if !SCALED => x,
                    (_, true) => _mm512_fmadd_ps(x, scale::<KIND>(block, sub), min::<KIND>(block, sub)),
                    _ => _mm512_mul_ps(x, scale::<KIND>(block, sub)),
                };
            });
            // Which step of a group has which input: see `unpack::input`.
            if layout.by_halves() {
                for (i, row) in [2 * g, 8 + 2 * g].into_iter().enumerate() {
                    put::<PARTS>(w[i], w[i + 2], to.add(64 * row));
                    put::<PARTS>(w[i + 4], w[i + 6], to.add(64 * (row + 1)));
                }
            } else {
                for pair in 0..4 {
                    put::<PARTS>(w[2 * pair], w[2 * pair + 1], to.add(64 * (4 * g + pair)));
                }
            }
        }
    }
}

/// Shuffle that interleaves words n and 16 + n.
static ORDER: Words = Words({
    let mut order = [0; 32];
    let mut n = 0;
    while n < 16 {
        order[2 * n] = n as u16;
        order[2 * n + 1] = 16 + n as u16;
        n += 1;
    }
    order
});

#[repr(align(64))]
struct Words([u16; 32]);

/// Writes one row of the tiles: the inputs `even` and `odd` of each output.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn put<const PARTS: usize>(mut even: __m512, mut odd: __m512, to: *mut u8) {
    const ODD: __mmask32 = 0xaaaa_aaaa;
    // SAFETY: the caller guarantees a row of each of the tiles.
    unsafe {
        if PARTS == 1 {
            let both = _mm512_cvtne2ps_pbh(odd, even);
            // SAFETY: 32 words either way.
            let words = std::mem::transmute::<__m512bh, __m512i>(both);
            let order = _mm512_load_si512(ORDER.0.as_ptr().cast());
            _mm512_store_si512(to.cast(), _mm512_permutexvar_epi16(order, words));
            return;
        }
        let upper = _mm512_set1_epi32(UPPER);
        for part in 0..PARTS {
            let (first, second) = (
                _mm512_and_si512(_mm512_castps_si512(even), upper),
                _mm512_and_si512(_mm512_castps_si512(odd), upper),
            );
            let row = _mm512_mask_blend_epi16(ODD, _mm512_srli_epi32::<16>(first), second);
            _mm512_store_si512(to.add(TILE * part).cast(), row);
            even = _mm512_sub_ps(even, _mm512_castsi512_ps(first));
            odd = _mm512_sub_ps(odd, _mm512_castsi512_ps(second));
        }
    }
}
