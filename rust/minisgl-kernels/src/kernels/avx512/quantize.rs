//! Rounding of activations to int8 (AVX-512), 16 blocks at a time: maxima and sums of all of them come out of one tree.
//!
//! Invariants: results equal those of `scalar`.

use std::ops::Range;

use super::super::scalar::{INFINITE, TINY};
use super::small::lanes;
use super::*;

/// Blocks whose maxima are the lanes of one vector.
const MANY: usize = 16;

/// Reduces each 128-bit lane of four vectors by `$op`: element 4i + j of the result comes from lane i of vector j.
macro_rules! within_lanes {
    ($four:expr, $op:ident) => {{
        let [a, b, c, d] = $four;
        let ab = $op(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let cd = $op(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        $op(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
    }};
}

/// Prepares some blocks of row `row` of `acts` in int8 from the row's elements at `x`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn row(x: *const f32, acts: ActsPtr, row: usize, blocks: Range<usize>) {
    for first in blocks.clone().step_by(MANY) {
        // SAFETY: the caller guarantees `k` elements and the row's cells.
        unsafe {
            let count = blocks.end - first;
            if count >= MANY && acts.k - first * BLOCK >= MANY * BLOCK {
                some::<true>(x, acts, first, MANY, row);
            } else {
                some::<false>(x, acts, first, count.min(MANY), row);
            }
        }
    }
}

/// Prepares `count` blocks from block `first` on; all of `MANY` and their inputs are there (`WHOLE`), or not.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn some<const WHOLE: bool>(x: *const f32, acts: ActsPtr, first: usize, count: usize, row: usize) {
    let (x, left) = (x.wrapping_add(first * BLOCK), acts.k - first * BLOCK);
    let count = if WHOLE { MANY } else { count };
    // SAFETY: upheld by the caller.
    unsafe {
        let load = |at: usize| match WHOLE {
            true => _mm512_loadu_ps(x.add(at)),
            false => _mm512_maskz_loadu_ps(lanes(left.saturating_sub(at)), x.wrapping_add(at)),
        };
        let mut most = [_mm512_setzero_si512(); MANY];
        for i in 0..MANY {
            let [a, b] = [load(BLOCK * i), load(BLOCK * i + 16)];
            most[i] = _mm512_max_epu32(bits_of(a), bits_of(b));
        }
        let (inverse, d) = scales(maxima(&most));
        let ones = _mm512_set1_epi8(1);
        let mut sums = [_mm512_setzero_si512(); MANY / 2];
        for pair in 0..MANY / 2 {
            let mut both = [_mm256_setzero_si256(); 2];
            for (i, q) in (2 * pair..).zip(&mut both) {
                let by = _mm512_set1_ps(inverse[i]);
                *q = bytes_of(
                    _mm512_mul_ps(load(BLOCK * i), by),
                    _mm512_mul_ps(load(BLOCK * i + 16), by),
                );
                if i < count {
                    _mm256_storeu_si256(acts.q.add(cell(&acts, first + i, row) * BLOCK).cast(), *q);
                }
            }
            let q = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(both[0]), both[1]);
            sums[pair] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, q);
        }
        // Sums of 16 elements, by block as [pairs of 4][block of the pair][half][pair].
        let mut sum16 = [[[[0_i32; 4]; 2]; 2]; 2];
        for half in 0..2 {
            let four = [
                sums[4 * half],
                sums[4 * half + 1],
                sums[4 * half + 2],
                sums[4 * half + 3],
            ];
            let to = (&raw mut sum16[half]).cast();
            _mm512_storeu_si512(to, within_lanes!(four, _mm512_add_epi32));
        }
        for i in 0..count {
            let (halves, pair) = (&sum16[i / 8][i % 2], i / 2 % 4);
            let (low, high) = (halves[0][pair], halves[1][pair]);
            let (b, sum) = (first + i, low + high);
            let cell = cell(&acts, b, row);
            *acts.d.add(cell) = d[i];
            *acts.ds.add(cell) = d[i] * sum as f32;
            *acts.offset.add(cell) = -128 * sum;
            *acts.offset16.add(cell16(&acts, b, 0, row)) = -128 * low;
            *acts.offset16.add(cell16(&acts, b, 1, row)) = -128 * high;
        }
    }
}

/// Returns the bits of the absolute values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn bits_of(v: __m512) -> __m512i {
    _mm512_castps_si512(_mm512_abs_ps(v))
}

/// Returns the largest element of each vector, in the vectors' order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn maxima(v: &[__m512i; MANY]) -> __m512i {
    let mut four = [_mm512_setzero_si512(); 4];
    for i in 0..4 {
        four[i] = within_lanes!([v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]], _mm512_max_epu32);
    }
    let two = both!([0, 2], |i| _mm512_max_epu32(
        _mm512_shuffle_i32x4::<0x88>(four[i], four[i + 1]),
        _mm512_shuffle_i32x4::<0xdd>(four[i], four[i + 1]),
    ));
    _mm512_max_epu32(
        _mm512_shuffle_i32x4::<0x88>(two[0], two[1]),
        _mm512_shuffle_i32x4::<0xdd>(two[0], two[1]),
    )
}

/// Returns the inverse scales and the scales of blocks with these maxima.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn scales(bits: __m512i) -> ([f32; MANY], [f32; MANY]) {
    let infinite = _mm512_cmpge_epu32_mask(bits, _mm512_set1_epi32(INFINITE as i32));
    let tiny = _mm512_cmplt_epu32_mask(bits, _mm512_set1_epi32(TINY as i32));
    let (max, most) = (_mm512_castsi512_ps(bits), _mm512_set1_ps(127.0));
    let inverse = _mm512_maskz_div_ps(!(infinite | tiny), most, max);
    let d = _mm512_maskz_div_ps(!(infinite | tiny), max, most);
    let d = _mm512_mask_mov_ps(d, infinite, _mm512_set1_ps(f32::NAN));
    let mut out = ([0.0; MANY], [0.0; MANY]);
    // SAFETY: both arrays have 16 elements.
    unsafe {
        _mm512_storeu_ps(out.0.as_mut_ptr(), inverse);
        _mm512_storeu_ps(out.1.as_mut_ptr(), d);
    }
    out
}

/// Rounds 32 elements to integers of 8 bits. NaN, as infinity times zero gives it, becomes 0, the low byte of the
/// integer that it is converted to.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn bytes_of(low: __m512, high: __m512) -> __m256i {
    let (low, high) = (_mm512_cvtps_epi32(low), _mm512_cvtps_epi32(high));
    _mm256_set_m128i(_mm512_cvtepi32_epi8(high), _mm512_cvtepi32_epi8(low))
}
