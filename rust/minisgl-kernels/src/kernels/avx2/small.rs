//! Elementwise kernels and reductions between matmuls (AVX2). A tail that fills no vector is read masked, with zeros.
//!
//! Invariants: results equal those of `scalar`, lane by lane, with the same reduction trees.

use std::ops::Range;

use super::super::scalar::{EXP_BOUNDS, EXP_TERMS, GELU, INFINITE, LN2, TINY, inverse_rms};
use super::*;

/// Source of masks of 8 lanes: a load at an offset gives the mask.
static MASKS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

/// Returns a mask of the first `left` lanes (all 8 if `left` is larger).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn lanes(left: usize) -> __m256i {
    // SAFETY: 8 integers from one of the first 9 on.
    unsafe { _mm256_loadu_si256(MASKS.as_ptr().add(8 - left.min(8)).cast()) }
}

/// Loads up to 8 elements, with zeros after them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn read(x: *const f32, left: usize) -> __m256 {
    // SAFETY: the caller guarantees `left` elements, or 8.
    unsafe {
        if left >= 8 {
            _mm256_loadu_ps(x)
        } else {
            _mm256_maskload_ps(x, lanes(left))
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn write(x: *mut f32, left: usize, v: __m256) {
    // SAFETY: the caller guarantees room for `left` elements, or 8.
    unsafe {
        if left >= 8 {
            _mm256_storeu_ps(x, v);
        } else {
            _mm256_maskstore_ps(x, lanes(left), v);
        }
    }
}

/// Returns the tree sum of 16 lanes (`scalar::tree`).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn tree(low: __m256, high: __m256) -> f32 {
    let v = _mm256_add_ps(low, high);
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn prepare(x: *const f32, acts: ActsPtr, row: usize, blocks: Range<usize>) {
    for b in blocks {
        let (left, cell) = (acts.k - b * BLOCK, cell(&acts, b, row));
        // SAFETY: the caller guarantees `k` elements and the row's cells.
        unsafe {
            let mut v = [_mm256_setzero_ps(); 4];
            for i in 0..4 {
                v[i] = read(x.wrapping_add(b * BLOCK + 8 * i), left.saturating_sub(8 * i));
            }
            if acts.mode == Mode::Bf16 {
                for v in &mut v {
                    *v = to_bf16(*v);
                }
            }
            if acts.mode.has_f32() {
                for i in 0..4 {
                    _mm256_storeu_ps(acts.x.add(cell * BLOCK + 8 * i), v[i]);
                }
            }
            if acts.mode.has_sums() {
                *acts.sum.add(cell) = tree(_mm256_add_ps(v[0], v[2]), _mm256_add_ps(v[1], v[3]));
                for sub in 0..2 {
                    *acts.sum16.add(cell16(&acts, b, sub, row)) = tree(v[2 * sub], v[2 * sub + 1]);
                }
            }
            if acts.mode.has_int8() {
                quantize(v, acts, b, row);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn to_bf16(x: __m256) -> __m256 {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    let near = _mm256_and_si256(up, _mm256_set1_epi32(0xffff_0000_u32 as i32));
    let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x);
    _mm256_blendv_ps(_mm256_castsi256_ps(near), x, nan)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quantize(v: [__m256; 4], acts: ActsPtr, b: usize, row: usize) {
    let cell = cell(&acts, b, row);
    let positive = _mm256_set1_epi32(i32::MAX);
    let mut most = _mm256_setzero_si256();
    for v in v {
        most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(v), positive));
    }
    let most = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256::<1>(most));
    let most = _mm_max_epi32(most, _mm_shuffle_epi32::<0b0100_1110>(most));
    let most = _mm_max_epi32(most, _mm_shuffle_epi32::<0b1011_0001>(most));
    let bits = _mm_cvtsi128_si32(most) as u32;
    let max = f32::from_bits(bits);
    let (inverse, d) = if bits >= INFINITE {
        (0.0, f32::NAN)
    } else if bits < TINY {
        (0.0, 0.0)
    } else {
        (127.0 / max, max / 127.0)
    };
    // 0 for a block with an element that is not finite.
    let keep = _mm256_set1_epi32(if bits >= INFINITE { 0 } else { -1 });
    let by = _mm256_set1_ps(inverse);
    let mut q = [_mm256_setzero_si256(); 4];
    for i in 0..4 {
        q[i] = _mm256_and_si256(_mm256_cvtps_epi32(_mm256_mul_ps(v[i], by)), keep);
    }
    let sum16 = both!([0, 2], |half| {
        let sum = _mm256_add_epi32(q[half], q[half + 1]);
        let sum = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
        let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b0100_1110>(sum));
        _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32::<0b1011_0001>(sum)))
    });
    let sum = sum16[0] + sum16[1];
    let q = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    let q = _mm256_permutevar8x32_epi32(q, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    // SAFETY: the caller guarantees the cell.
    unsafe {
        _mm256_storeu_si256(acts.q.add(cell * BLOCK).cast(), q);
        *acts.d.add(cell) = d;
        *acts.ds.add(cell) = d * sum as f32;
        *acts.offset.add(cell) = -128 * sum;
        for sub in 0..2 {
            *acts.offset16.add(cell16(&acts, b, sub, row)) = -128 * sum16[sub];
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn rms_norm(x: *const f32, w: *const f32, n: usize, eps: f32, out: *mut f32) {
    let mut s = [_mm256_setzero_ps(); 4];
    for (at, i) in (0..n).step_by(8).zip([0, 1, 2, 3].into_iter().cycle()) {
        // SAFETY: the caller guarantees `n` elements.
        let x = unsafe { read(x.add(at), n - at) };
        s[i] = _mm256_fmadd_ps(x, x, s[i]);
    }
    let sum = tree(_mm256_add_ps(s[0], s[2]), _mm256_add_ps(s[1], s[3]));
    let by = _mm256_set1_ps(inverse_rms(sum, n, eps));
    for at in (0..n).step_by(8) {
        // SAFETY: as above.
        unsafe {
            let (x, w) = (read(x.add(at), n - at), read(w.add(at), n - at));
            write(out.add(at), n - at, _mm256_mul_ps(_mm256_mul_ps(x, by), w));
        }
    }
}

/// Returns e^x by lane (`scalar::exp`). Bounds come first in `min` and `max`, which return the second if one is NaN.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn exp(x: __m256) -> __m256 {
    let x = _mm256_min_ps(_mm256_set1_ps(EXP_BOUNDS.1), x);
    let x = _mm256_max_ps(_mm256_set1_ps(EXP_BOUNDS.0), x);
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        x,
        _mm256_set1_ps(std::f32::consts::LOG2_E),
    ));
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2.0), x);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2.1), r);
    let [first, rest @ ..] = EXP_TERMS;
    let mut p = _mm256_set1_ps(first);
    for term in rest {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(term));
    }
    let p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0)));
    let power = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(power)))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn silu_mul(gate: *const f32, up: *const f32, next: usize, n: usize, out: *mut f32) {
    // SAFETY: upheld by the caller.
    unsafe { gate_mul::<false>(gate, up, next, n, out) }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn gelu_mul(gate: *const f32, up: *const f32, next: usize, n: usize, out: *mut f32) {
    // SAFETY: upheld by the caller.
    unsafe { gate_mul::<true>(gate, up, next, n, out) }
}

/// Computes `out = act(gate) * up` for SiLU or (`IS_GELU`) tanh GELU: g * sigmoid(h), h being g or GELU's polynomial.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn gate_mul<const IS_GELU: bool>(gate: *const f32, up: *const f32, next: usize, n: usize, out: *mut f32) {
    let (one, sign) = (_mm256_set1_ps(1.0), _mm256_set1_ps(-0.0));
    for at in (0..n).step_by(8) {
        let from = at / PANEL * next + at % PANEL;
        // SAFETY: the caller guarantees `n` elements.
        unsafe {
            let g = read(gate.add(from), n - at);
            let t = if IS_GELU {
                let square = _mm256_mul_ps(_mm256_mul_ps(g, g), _mm256_set1_ps(GELU.1));
                _mm256_mul_ps(_mm256_fmadd_ps(square, g, g), _mm256_set1_ps(GELU.0))
            } else {
                g
            };
            let gated = _mm256_div_ps(g, _mm256_add_ps(one, exp(_mm256_xor_ps(t, sign))));
            let up = read(up.add(from), n - at);
            write(out.add(at), n - at, _mm256_mul_ps(gated, up));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn add(x: *mut f32, y: *const f32, n: usize) {
    for at in (0..n).step_by(8) {
        // SAFETY: the caller guarantees `n` elements.
        unsafe {
            let sum = _mm256_add_ps(read(x.add(at), n - at), read(y.add(at), n - at));
            write(x.add(at), n - at, sum);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn rotate(x: *mut f32, cos: *const f32, sin: *const f32, half: usize) {
    for at in (0..half).step_by(8) {
        let left = half - at;
        // SAFETY: the caller guarantees `2 half` and `half` elements.
        unsafe {
            let (low, high) = (x.add(at), x.add(half + at));
            let (a, b) = (read(low, left), read(high, left));
            let (c, s) = (read(cos.add(at), left), read(sin.add(at), left));
            write(low, left, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)));
            write(high, left, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)));
        }
    }
}

/// Returns the index of the largest element: finds the maximum, then its first position.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn argmax(x: *const f32, n: usize) -> usize {
    let least = _mm256_set1_ps(f32::NEG_INFINITY);
    let mut best = [least; 4];
    let whole = n / 8 * 8;
    for (at, i) in (0..whole).step_by(8).zip([0, 1, 2, 3].into_iter().cycle()) {
        // SAFETY: the caller guarantees `n` elements.
        let x = unsafe { _mm256_loadu_ps(x.add(at)) };
        best[i] = _mm256_max_ps(x, best[i]); // returns the second operand if one is NaN
    }
    let best = _mm256_max_ps(_mm256_max_ps(best[0], best[1]), _mm256_max_ps(best[2], best[3]));
    let mut lanes = [0.0f32; 8];
    // SAFETY: room for 8 elements.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), best) };
    // SAFETY: the caller guarantees `n` elements.
    let end = (whole..n).map(|i| unsafe { *x.add(i) });
    let best = lanes
        .into_iter()
        .chain(end)
        .fold(f32::NEG_INFINITY, |best, x| if x > best { x } else { best });
    let best8 = _mm256_set1_ps(best);
    for at in (0..whole).step_by(8) {
        // SAFETY: as above.
        let same = unsafe { _mm256_cmp_ps::<_CMP_EQ_OQ>(_mm256_loadu_ps(x.add(at)), best8) };
        let same = _mm256_movemask_ps(same);
        if same != 0 {
            return at + same.trailing_zeros() as usize;
        }
    }
    // SAFETY: as above.
    (whole..n).find(|&i| unsafe { *x.add(i) } == best).unwrap_or(0)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn finite(x: *const f32, n: usize) -> bool {
    let (infinite, sign) = (_mm256_set1_ps(f32::INFINITY), _mm256_set1_ps(-0.0));
    let mut bad = _mm256_setzero_ps();
    for at in (0..n).step_by(8) {
        // SAFETY: the caller guarantees `n` elements.
        let x = unsafe { read(x.add(at), n - at) };
        bad = _mm256_or_ps(bad, _mm256_cmp_ps::<_CMP_NLT_UQ>(_mm256_andnot_ps(sign, x), infinite));
    }
    _mm256_movemask_ps(bad) == 0
}
