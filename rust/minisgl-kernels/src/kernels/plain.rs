//! Operations that few models need, in one form for all instruction sets: compilers vectorize it.
//!
//! Invariants: nothing is fused or reordered, so the bits are the same however it is compiled.

use super::Isa;
use crate::blocks::{f16_to_f32, f32_to_f16};

/// Parallel accumulators of a sum.
const LANES: usize = 16;
/// Rounding constant: adding and subtracting it rounds an f32 to the nearest integer, ties to even.
const ROUNDER: f32 = 12_582_912.0;

on_each_isa! {
    /// Applies layer norm in place, `x = (x - mean) / sqrt(variance + eps) * weight + bias`. Panics if lengths differ.
    layer_norm(x: &mut [f32], weight: &[f32], bias: Option<&[f32]>, eps: f32) as layer_norm_of
}

#[inline(always)]
fn layer_norm_of(x: &mut [f32], weight: &[f32], bias: Option<&[f32]>, eps: f32) {
    let n = weight.len();
    assert!(x.len() == n && bias.is_none_or(|bias| bias.len() == n));
    let at = x.as_ptr();
    // SAFETY: `n` elements; whether an index is one of them is no question that vectors could ask.
    let mean = total(n, |i| unsafe { *at.add(i) }) / n as f32;
    let squares = total(n, |i| {
        // SAFETY: as above.
        let away = unsafe { *at.add(i) } - mean;
        away * away
    });
    let by = 1.0 / (squares / n as f32 + eps).sqrt();
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = (*x - mean) * by * weight;
    }
    for (x, bias) in x.iter_mut().zip(bias.unwrap_or_default()) {
        *x += bias;
    }
}

/// Returns the sum of `n` elements: element i in lane i % 16, then lanes i and i + 8, i + 4, i + 2, i + 1.
#[inline(always)]
pub(super) fn total(n: usize, number: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = n / LANES * LANES;
    for first in (0..whole).step_by(LANES) {
        for (i, lane) in lanes.iter_mut().enumerate() {
            *lane += number(first + i);
        }
    }
    for i in whole..n {
        lanes[i % LANES] += number(i);
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

/// Returns the dot product, summed in the order of `total`.
#[inline]
pub fn dot(one: &[f32], other: &[f32]) -> f32 {
    total(one.len().min(other.len()), |i| one[i] * other[i])
}

/// Applies the orthonormal Hadamard transform, its own inverse, to each `size` elements (a power of two) in place.
#[inline(always)]
pub fn hadamard_transform(numbers: &mut [f32], size: usize) {
    if size < 2 {
        return;
    }
    let by = 1.0 / (size as f32).sqrt();
    for block in numbers.chunks_exact_mut(size) {
        let mut half = 1;
        while half < size {
            for both in block.chunks_exact_mut(2 * half) {
                let (low, high) = both.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        block.iter_mut().for_each(|x| *x *= by);
    }
}

/// Candidate divisors of the largest element for a 4-bit scale: the one with the least squared error wins.
const DIVISORS: [f32; 5] = [-8.0, -7.0, -7.5, -8.5, -9.0];

/// Quantizes 32 elements to 4 bits: returns an f16 scale, not finite if an element is not, and integers -8..=7 plus 8.
pub fn quantize_q4(x: &[f32; 32]) -> (u16, [u8; 32]) {
    let mut most = 0.0f32;
    for x in x {
        // NaN must stay NaN
        most = if x.abs() > most.abs() || x.is_nan() { *x } else { most };
    }
    let mut best = (0, [0.0; 32], f32::INFINITY);
    for divisor in DIVISORS {
        let scale = f32_to_f16(most / divisor);
        let by = f16_to_f32(scale);
        let inverse = if by == 0.0 { 0.0 } else { 1.0 / by };
        let codes = x.map(|x| ((x * inverse).clamp(-8.0, 7.0) + ROUNDER) - ROUNDER);
        let error = total(x.len(), |i| {
            let off = codes[i] * by - x[i];
            off * off
        });
        if divisor == DIVISORS[0] || error < best.2 {
            best = (scale, codes, error);
        }
    }
    (best.0, best.1.map(|code| (code + 8.0) as u8))
}

/// Soft-caps each element in place: cap tanh(x / cap).
#[inline(always)]
pub fn soft_cap(numbers: &mut [f32], cap: f32) {
    let by = 1.0 / cap;
    for x in numbers {
        *x = cap * tanh(*x * by);
    }
}

/// Returns tanh(x) to about 1e-7; NaN stays NaN.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    // beyond this bound tanh is 1 in f32
    let away = if x.abs() > 10.0 { 10.0 } else { x.abs() };
    let e = exp_below(-2.0 * away);
    ((1.0 - e) / (1.0 + e)).copysign(x)
}

/// Returns e^x for x in -88..=0; NaN stays NaN.
#[inline(always)]
pub(super) fn exp_below(x: f32) -> f32 {
    use super::scalar::{EXP_TERMS, LN2};
    let shifted = x * std::f32::consts::LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let r = (x - n * LN2.0) - n * LN2.1;
    let mut p = EXP_TERMS[0];
    for term in &EXP_TERMS[1..] {
        p = p * r + term;
    }
    let p = p * (r * r) + (r + 1.0);
    p * f32::from_bits(shifted.to_bits().wrapping_sub(ROUNDER.to_bits()).wrapping_add(127) << 23)
}

/// Computes `out = max(gate, 0)^2 * up`; `out` may be either input.
///
/// # Safety
/// The pointers have `n` elements each.
pub unsafe fn relu2_mul(gate: *const f32, up: *const f32, n: usize, out: *mut f32) {
    for i in 0..n {
        // SAFETY: upheld by the caller.
        unsafe {
            let g = *gate.add(i);
            let g = if g < 0.0 { 0.0 } else { g }; // NaN stays
            *out.add(i) = g * g * *up.add(i);
        }
    }
}

/// Computes `out = silu(by gate) * up * of_out`; `out` may be either input.
///
/// # Safety
/// The pointers have `n` elements each.
pub unsafe fn scaled_silu_mul(gate: *const f32, up: *const f32, n: usize, (by, of_out): (f32, f32), out: *mut f32) {
    for i in 0..n {
        // SAFETY: upheld by the caller.
        unsafe { *out.add(i) = silu(*gate.add(i) * by) * *up.add(i) * of_out };
    }
}

/// Sparsifies activations: `x = max(x - (mean + by * standard deviation), 0)`, over all of `x`; NaN stays NaN.
pub fn cut(x: &mut [f32], by: f32) {
    let n = x.len() as f32;
    let mean = total(x.len(), |i| x[i]) / n;
    let squares = total(x.len(), |i| (x[i] - mean) * (x[i] - mean));
    let least = mean + (squares / n).sqrt() * by;
    for number in x {
        let above = *number - least;
        *number = if above < 0.0 { 0.0 } else { above };
    }
}

/// Returns x sigmoid(x); NaN stays NaN.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// Computes `out = g sigmoid(alpha g) (u + 1)`, with g = min(gate, limit) and u = up clamped to -limit..=limit.
///
/// # Safety
/// The pointers have `n` elements each.
pub unsafe fn clamped_swiglu(gate: *const f32, up: *const f32, n: usize, (alpha, limit): (f32, f32), out: *mut f32) {
    for i in 0..n {
        // SAFETY: upheld by the caller.
        unsafe {
            let g = below(*gate.add(i), limit);
            let u = -below(-below(*up.add(i), limit), limit);
            *out.add(i) = g * sigmoid(alpha * g) * (u + 1.0);
        }
    }
}

/// Returns the minimum of `x` and `most`; NaN stays NaN.
#[inline(always)]
fn below(x: f32, most: f32) -> f32 {
    if x > most { most } else { x }
}

/// Returns 1 / (1 + e^-x); NaN stays NaN.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let e = exp_below(-below(x.abs(), 87.0));
    let share = if x < 0.0 { e } else { 1.0 };
    share / (1.0 + e)
}

/// Returns ln(1 + e^x), or x itself above 20 (torch's rule).
#[inline]
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Multiplies each element by the sigmoid of its gate in place.
#[inline]
pub fn open(x: &mut [f32], gates: &[f32]) {
    x.iter_mut().zip(gates).for_each(|(x, gate)| *x *= sigmoid(*gate));
}

on_each_isa! {
    /// Replaces each element x of `numbers` by gelu(x) times the element of `by`, with the exact (erf) GELU.
    gelu_erf_mul(numbers: &mut [f32], by: &[f32]) as gelu_erf_each
}

#[inline(always)]
fn gelu_erf_each(numbers: &mut [f32], by: &[f32]) {
    for (x, by) in numbers.iter_mut().zip(by) {
        *x = gelu_erf(*x) * by;
    }
}

/// Returns the exact GELU, x (1 + erf(x / sqrt 2)) / 2; NaN stays NaN.
#[inline(always)]
pub fn gelu_erf(x: f32) -> f32 {
    0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2))
}

/// Returns erf(x) to about 2e-7 (Abramowitz and Stegun 7.1.26); NaN stays NaN.
#[inline(always)]
fn erf(x: f32) -> f32 {
    // beyond this bound erf is 1 in f32
    let away = if x.abs() > 4.0 { 4.0 } else { x.abs() };
    let t = 1.0 / (1.0 + 0.327_591_1 * away);
    let mut sum = 1.061_405_4;
    for term in [-1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6] {
        sum = sum * t + term;
    }
    (1.0 - sum * t * exp_below(-away * away)).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_soft_cap_is_a_tanh() {
        for step in -4000..4000 {
            let x = step as f32 / 100.0;
            let mut found = [x, x * 1000.0];
            soft_cap(&mut found, 3.0);
            let wanted = 3.0 * (f64::from(x) / 3.0).tanh();
            assert!(
                (f64::from(found[0]) - wanted).abs() < 1e-6,
                "{x}: {} {wanted}",
                found[0]
            );
            assert!(found[1].abs() <= 3.0);
        }
        let mut odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        soft_cap(&mut odd, 2.0);
        assert!(odd[0].is_nan() && odd[1] == 2.0 && odd[2] == -2.0);
    }

    #[test]
    fn a_clamped_swiglu_is_clamped() {
        for step in -3000..3000i16 {
            let (gate, up) = (f32::from(step) / 100.0, f32::from(step * 7 % 2000) / 100.0);
            let mut found = 0.0;
            // SAFETY: one element each.
            unsafe { clamped_swiglu(&gate, &up, 1, (1.702, 7.0), &mut found) };
            let (g, u) = (f64::from(gate).min(7.0), f64::from(up).clamp(-7.0, 7.0));
            let wanted = g / (1.0 + (-1.702 * g).exp()) * (u + 1.0);
            assert!(
                (f64::from(found) - wanted).abs() < 1e-5,
                "{gate} {up}: {found} {wanted}"
            );
        }
        for (gate, up) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            let mut found = 0.0;
            // SAFETY: as above.
            unsafe { clamped_swiglu(&gate, &up, 1, (1.702, 7.0), &mut found) };
            assert!(found.is_nan());
        }
    }

    #[test]
    fn gelu_by_the_error_function() {
        // expected values of Python's math.erf
        let wanted = [
            (-5.0, -1.433_260_4e-6),
            (-1.5, -0.100_210_8),
            (-0.1, -0.046_017_22),
            (0.0, 0.0),
            (0.3, 0.185_373_4),
            (1.0, 0.841_344_8),
            (2.5, 2.484_475_8),
            (30.0, 30.0),
        ];
        for (x, gelu) in wanted {
            let mut found = [x];
            gelu_erf_mul(Isa::Scalar, &mut found, &[2.0]);
            assert!((found[0] - 2.0 * gelu).abs() < 2e-6, "{x}: {} {gelu}", found[0]);
        }
    }

    #[test]
    fn gelu_has_the_same_bits_on_all_instruction_sets() {
        let numbers: Vec<f32> = (-700..700i16)
            .map(|i| f32::from(i) / 97.0)
            .chain([f32::NAN, 1e9, -1e9])
            .collect();
        let by: Vec<f32> = numbers.iter().map(|x| x * 0.3 + 1.0).collect();
        let of = |isa| {
            let mut found = numbers.clone();
            gelu_erf_mul(isa, &mut found, &by);
            found.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        for isa in Isa::here() {
            assert_eq!(of(isa), of(Isa::Scalar), "{isa:?}");
        }
    }

    #[test]
    fn layer_norm_output_has_mean_0() {
        let x: Vec<f32> = (0..37u16).map(|i| f32::from(i * 37 % 19) + 5.0).collect();
        let normed = |isa| {
            let mut out = x.clone();
            layer_norm(isa, &mut out, &[2.0; 37], Some(&[0.5; 37]), 0.0);
            out
        };
        let out = normed(Isa::Scalar);
        for isa in Isa::here() {
            assert_eq!(normed(isa), out, "{isa:?}");
        }
        let mean = out.iter().sum::<f32>() / 37.0;
        let variance = out.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / 37.0;
        assert!(
            (mean - 0.5).abs() < 1e-5 && (variance - 4.0).abs() < 1e-4,
            "{mean} {variance}"
        );
    }
}
