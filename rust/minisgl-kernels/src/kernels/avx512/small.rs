//! Elementwise kernels and reductions between matmuls (AVX-512). A tail shorter than a vector is read masked, with
//! zeros.
//!
//! Invariants: results equal those of `scalar`, lane by lane, with the same reduction trees.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::scalar::{EXP_BOUNDS, EXP_TERMS, GELU, LN2, inverse_rms};
use super::*;

/// Returns a mask of the first `left` lanes.
#[inline]
pub(super) fn lanes(left: usize) -> __mmask16 {
    if left >= 16 { !0 } else { (1 << left) - 1 }
}

/// Returns the tree sum of 16 lanes (`scalar::tree`).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn tree(v: __m512) -> f32 {
    let v = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn prepare(x: *const f32, acts: ActsPtr, row: usize, blocks: Range<usize>) {
    // SAFETY: upheld by the caller.
    unsafe { prepare_as::<true, false>(x, acts, row, blocks) }
}

/// Prepares a row of activations as f32 (`F32`), as bf16 parts (`PARTS`), or both; block sums either way.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(crate) unsafe fn prepare_as<const F32: bool, const PARTS: bool>(
    x: *const f32,
    acts: ActsPtr,
    row: usize,
    blocks: Range<usize>,
) {
    if acts.mode.has_int8() {
        // SAFETY: upheld by the caller.
        unsafe { quantize::row(x, acts, row, blocks.clone()) };
    }
    if !acts.mode.has_f32() {
        return;
    }
    for b in blocks {
        let left = acts.k - b * BLOCK;
        let cell = cell(&acts, b, row);
        // SAFETY: the caller guarantees `k` elements and the row's cells.
        unsafe {
            let mut v = [
                _mm512_maskz_loadu_ps(lanes(left), x.wrapping_add(b * BLOCK)),
                _mm512_maskz_loadu_ps(lanes(left.saturating_sub(16)), x.wrapping_add(b * BLOCK + 16)),
            ];
            if acts.mode == Mode::Bf16 {
                v = both!(v, |v| to_bf16(v));
            }
            if F32 {
                _mm512_store_ps(acts.x.add(cell * BLOCK), v[0]);
                _mm512_store_ps(acts.x.add(cell * BLOCK + 16), v[1]);
            }
            if acts.mode.has_sums() {
                *acts.sum.add(cell) = tree(_mm512_add_ps(v[0], v[1]));
                for sub in 0..2 {
                    *acts.sum16.add(cell16(&acts, b, sub, row)) = tree(v[sub]);
                }
            }
            if PARTS {
                split(v, acts, cell);
            }
        }
    }
}

/// Splits 32 values into three bf16 parts: the upper half of the f32, of the remainder, and of its remainder.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn split(v: [__m512; 2], acts: ActsPtr, cell: usize) {
    let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    let parts = acts.mode.parts();
    for (half, mut rest) in v.into_iter().enumerate() {
        for part in 0..parts {
            let bits = _mm512_and_si512(_mm512_castps_si512(rest), upper);
            rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(bits));
            let words = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(bits));
            // SAFETY: the caller guarantees the cell.
            unsafe {
                let to = acts.parts.add((cell * parts + part) * BLOCK + 16 * half);
                _mm256_storeu_si256(to.cast(), words);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn to_bf16(x: __m512) -> __m512 {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    let near = _mm512_and_si512(up, _mm512_set1_epi32(0xffff_0000_u32 as i32));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    _mm512_mask_mov_ps(_mm512_castsi512_ps(near), nan, x)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn rms_norm(x: *const f32, w: *const f32, n: usize, eps: f32, out: *mut f32) {
    let mut s = [_mm512_setzero_ps(); 2];
    for (at, i) in (0..n).step_by(16).zip([0, 1].into_iter().cycle()) {
        // SAFETY: the caller guarantees `n` elements.
        let x = unsafe { _mm512_maskz_loadu_ps(lanes(n - at), x.add(at)) };
        s[i] = _mm512_fmadd_ps(x, x, s[i]);
    }
    let by = _mm512_set1_ps(inverse_rms(tree(_mm512_add_ps(s[0], s[1])), n, eps));
    for at in (0..n).step_by(16) {
        let mask = lanes(n - at);
        // SAFETY: as above.
        unsafe {
            let (x, w) = (
                _mm512_maskz_loadu_ps(mask, x.add(at)),
                _mm512_maskz_loadu_ps(mask, w.add(at)),
            );
            _mm512_mask_storeu_ps(out.add(at), mask, _mm512_mul_ps(_mm512_mul_ps(x, by), w));
        }
    }
}

/// Returns e^x by lane (`scalar::exp`). Bounds come first in `min` and `max`, which return the second if one is NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn exp(x: __m512) -> __m512 {
    let x = _mm512_min_ps(_mm512_set1_ps(EXP_BOUNDS.1), x);
    let x = _mm512_max_ps(_mm512_set1_ps(EXP_BOUNDS.0), x);
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm512_mul_ps(
        x,
        _mm512_set1_ps(std::f32::consts::LOG2_E),
    ));
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2.0), x);
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2.1), r);
    let [first, rest @ ..] = EXP_TERMS;
    let mut p = _mm512_set1_ps(first);
    for term in rest {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(term));
    }
    let p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0)));
    let power = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    _mm512_mul_ps(p, _mm512_castsi512_ps(_mm512_slli_epi32::<23>(power)))
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn silu_mul(gate: *const f32, up: *const f32, next: usize, n: usize, out: *mut f32) {
    // SAFETY: upheld by the caller.
    unsafe { gate_mul::<false>(gate, up, next, n, out) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn gelu_mul(gate: *const f32, up: *const f32, next: usize, n: usize, out: *mut f32) {
    // SAFETY: upheld by the caller.
    unsafe { gate_mul::<true>(gate, up, next, n, out) }
}

/// Computes `out = act(gate) * up` for SiLU or (`IS_GELU`) tanh GELU: g * sigmoid(h), h being g or GELU's polynomial.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn gate_mul<const IS_GELU: bool>(gate: *const f32, up: *const f32, next: usize, n: usize, out: *mut f32) {
    let (one, sign) = (_mm512_set1_ps(1.0), _mm512_set1_ps(-0.0));
    for at in (0..n).step_by(16) {
        let (mask, from) = (lanes(n - at), at / PANEL * next);
        // SAFETY: the caller guarantees `n` elements.
        unsafe {
            let g = _mm512_maskz_loadu_ps(mask, gate.add(from));
            let t = if IS_GELU {
                let square = _mm512_mul_ps(_mm512_mul_ps(g, g), _mm512_set1_ps(GELU.1));
                _mm512_mul_ps(_mm512_fmadd_ps(square, g, g), _mm512_set1_ps(GELU.0))
            } else {
                g
            };
            let e = exp(_mm512_xor_ps(t, sign));
            let gated = _mm512_div_ps(g, _mm512_add_ps(one, e));
            let up = _mm512_maskz_loadu_ps(mask, up.add(from));
            _mm512_mask_storeu_ps(out.add(at), mask, _mm512_mul_ps(gated, up));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn add(x: *mut f32, y: *const f32, n: usize) {
    for at in (0..n).step_by(16) {
        let mask = lanes(n - at);
        // SAFETY: the caller guarantees `n` elements.
        unsafe {
            let y = _mm512_maskz_loadu_ps(mask, y.add(at));
            let sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, x.add(at)), y);
            _mm512_mask_storeu_ps(x.add(at), mask, sum);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn rotate(x: *mut f32, cos: *const f32, sin: *const f32, half: usize) {
    for at in (0..half).step_by(16) {
        let mask = lanes(half - at);
        // SAFETY: the caller guarantees `2 half` and `half` elements.
        unsafe {
            let (low, high) = (x.add(at), x.add(half + at));
            let (a, b) = (_mm512_maskz_loadu_ps(mask, low), _mm512_maskz_loadu_ps(mask, high));
            let (c, s) = (
                _mm512_maskz_loadu_ps(mask, cos.add(at)),
                _mm512_maskz_loadu_ps(mask, sin.add(at)),
            );
            _mm512_mask_storeu_ps(low, mask, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
            _mm512_mask_storeu_ps(high, mask, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
        }
    }
}

/// Returns the index of the largest element: finds the maximum, then its first position.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn argmax(x: *const f32, n: usize) -> usize {
    let least = _mm512_set1_ps(f32::NEG_INFINITY);
    let mut best = [least; 4];
    for (at, i) in (0..n).step_by(16).zip([0, 1, 2, 3].into_iter().cycle()) {
        // SAFETY: the caller guarantees `n` elements.
        let x = unsafe { _mm512_mask_loadu_ps(least, lanes(n - at), x.add(at)) };
        best[i] = _mm512_max_ps(x, best[i]); // returns the second operand if one is NaN
    }
    let best = _mm512_max_ps(_mm512_max_ps(best[0], best[1]), _mm512_max_ps(best[2], best[3]));
    let best = _mm512_set1_ps(_mm512_reduce_max_ps(best));
    for at in (0..n).step_by(16) {
        // SAFETY: as above.
        let x = unsafe { _mm512_maskz_loadu_ps(lanes(n - at), x.add(at)) };
        let same = _mm512_mask_cmp_ps_mask::<_CMP_EQ_OQ>(lanes(n - at), x, best);
        if same != 0 {
            return at + same.trailing_zeros() as usize;
        }
    }
    0
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn finite(x: *const f32, n: usize) -> bool {
    let infinite = _mm512_set1_ps(f32::INFINITY);
    let mut bad = 0;
    for at in (0..n).step_by(16) {
        // SAFETY: the caller guarantees `n` elements.
        let x = unsafe { _mm512_maskz_loadu_ps(lanes(n - at), x.add(at)) };
        bad |= _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(_mm512_abs_ps(x), infinite);
    }
    bad == 0
}
