//! Softmax and log-sum-exp of a row of logits, in the vectors of an instruction set.
//!
//! Invariants: the same bits whatever the instruction set: no fused operations, sums in a fixed order. Unusual values
//! are not slower, and none makes a NaN: a masked or NaN logit has no probability.

use super::Isa;
use super::plain::exp_below;

/// Parallel accumulators of a sum.
const LANES: usize = 8;

/// Exponentials that are computed before they are summed: compilers vectorize a plain loop, but no chain of sums.
const BLOCK: usize = 32 * LANES;

/// Rounding constant 1.5 * 2^52: adding it leaves the nearest integer in the low bits of an f64.
const ROUND: f64 = 6_755_399_441_055_744.0;
/// Argument below which e^x is zero in f32.
const LOWEST: f32 = -110.0;
/// Distance from the largest logit at which a term is lost in the sum; its exponential is still a normal float.
const NEGLIGIBLE: f32 = -87.0;

/// Returns e^x in f64 for `x` at most 0, with a relative error of 1e-11.
#[inline(always)]
fn exp(x: f32) -> f64 {
    let x = f64::from(if x > LOWEST { x } else { LOWEST }); // a NaN, too, becomes the bound
    let rounded = x * std::f64::consts::LOG2_E + ROUND;
    let r = x - (rounded - ROUND) * std::f64::consts::LN_2;
    // the Taylor polynomial of degree 9, |r| <= ln 2 / 2, in pairs for a short chain
    let (r2, r4) = (r * r, (r * r) * (r * r));
    let low = (1.0 + r) + r2 * (1.0 / 2.0 + r * (1.0 / 6.0));
    let middle = (1.0 / 24.0 + r * (1.0 / 120.0)) + r2 * (1.0 / 720.0 + r * (1.0 / 5040.0));
    let high = 1.0 / 40_320.0 + r * (1.0 / 362_880.0);
    let value = low + r4 * (middle + r4 * high);
    value * f64::from_bits(rounded.to_bits().wrapping_add(1023) << 52)
}

/// Returns the largest element, ignoring NaN; minus infinity if there is none.
#[inline(always)]
pub fn max(numbers: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 4 * LANES];
    let chunks = numbers.chunks_exact(lanes.len());
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    let larger = |best: f32, &x: &f32| if x > best { x } else { best };
    rest.iter().fold(lanes.iter().fold(f32::NEG_INFINITY, larger), larger)
}

/// Writes unnormalized probabilities of `logits / temperature` to `to`. Returns their sum, not positive if all are 0.
#[inline(always)]
fn exponentials(logits: &[f32], temperature: f32, to: &mut [f32]) -> f32 {
    let top = max(logits) / temperature;
    for (from, to) in logits.iter().zip(to.iter_mut()) {
        *to = exp(from / temperature - top) as f32;
    }
    let mut sums = [0.0_f64; LANES];
    add(&mut sums, &to[..logits.len()]);
    total(&sums) as f32
}

on_each_isa! {
    /// Writes the probabilities of `logits` at `temperature` to `to`. Returns false, leaving garbage, if there are
    /// none.
    softmax(logits: &[f32], temperature: f32, to: &mut [f32]) -> bool as softmax_of
}

#[inline(always)]
fn softmax_of(logits: &[f32], temperature: f32, to: &mut [f32]) -> bool {
    let sum = exponentials(logits, temperature, to);
    let some = sum > 0.0 && sum.is_finite();
    if some {
        to.iter_mut().for_each(|p| *p /= sum);
    }
    some
}

on_each_isa! {
    /// Returns ln of the sum of the exponentials of `logits`: a logit minus this is its log probability. Exponentials
    /// are f32, like the logits, because a request for log probabilities pays for one with each token; the error of a
    /// vocabulary is not visible in the f64 sum.
    log_sum_exp(logits: &[f32]) -> f32 as log_sum_exp_of
}

#[inline(always)]
fn log_sum_exp_of(logits: &[f32]) -> f32 {
    let top = max(logits);
    let mut sums = [0.0_f64; LANES];
    let mut block = [0.0_f32; BLOCK];
    for from in logits.chunks(BLOCK) {
        let found = &mut block[..from.len()];
        for (found, x) in found.iter_mut().zip(from) {
            let x = x - top;
            *found = exp_below(if x > NEGLIGIBLE { x } else { NEGLIGIBLE }); // a NaN, too, becomes the bound
        }
        add(&mut sums, found);
    }
    (f64::from(top) + total(&sums).ln()) as f32
}

/// Adds element i of `numbers` to accumulator i % LANES.
#[inline(always)]
fn add<T: Copy + Into<f64>>(sums: &mut [f64; LANES], numbers: &[T]) {
    let chunks = numbers.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for i in 0..LANES {
            sums[i] += chunk[i].into();
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += (*x).into();
    }
}

#[inline(always)]
fn total(sums: &[f64; LANES]) -> f64 {
    let pair = |i: usize| sums[i] + sums[i + LANES / 2];
    (pair(0) + pair(2)) + (pair(1) + pair(3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_those_of_float64_rounded() {
        for i in 0..2_000_000 {
            let x = -(i as f32) * 5.2e-5;
            let (ours, exact) = (exp(x), f64::from(x).exp());
            assert!((ours - exact).abs() <= 1e-11 * exact, "{x}: {ours} {exact}");
        }
        assert_eq!(exp(f32::NEG_INFINITY) as f32, 0.0);
        assert_eq!(exp(f32::NAN) as f32, 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-104.5) as f32, 0.0);
    }

    #[test]
    fn probabilities_sum_to_one_at_any_length() {
        for len in [1_usize, 2, 7, 8, 9, 31, 33, 1000] {
            let logits: Vec<f32> = (0..len).map(|i| ((i * 37) % 11) as f32 - 5.0).collect();
            let mut to = vec![0.0; len];
            assert!(softmax(Isa::Scalar, &logits, 0.7, &mut to));
            assert!((to.iter().map(|&p| f64::from(p)).sum::<f64>() - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let odd = [f32::NAN, f32::NEG_INFINITY, -1e30, -0.0, 1e-40];
        for len in [1_usize, 7, 8, 9, 31, 33, 64, 1_000, 49_152] {
            let noise = |i: usize| (i as u32).wrapping_mul(0x9e37_79b9) >> 8;
            let logits: Vec<f32> = (0..len)
                .map(|i| match noise(i) % 97 {
                    0 => odd[i % odd.len()],
                    _ => noise(i) as f32 * 2e-6 - 12.0,
                })
                .collect();
            let of = |isa: Isa| {
                let mut to = vec![0.0; len];
                let some = softmax(isa, &logits, 0.7, &mut to);
                let bits: Vec<u32> = to.iter().map(|p| p.to_bits()).collect();
                (some, bits, log_sum_exp(isa, &logits).to_bits())
            };
            for isa in Isa::here() {
                assert!(of(isa) == of(Isa::Scalar), "{isa:?}, {len}");
            }
        }
    }

    #[test]
    fn log_sum_exp_has_the_recorded_bits() {
        let logits: Vec<f32> = (0..1000).map(|i| ((i * 37) % 101) as f32 * 0.25 - 20.0).collect();
        let exact = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
        let found = log_sum_exp(Isa::Scalar, &logits);
        assert!((f64::from(found) - exact).abs() < 1e-6, "{found} {exact}");
        // receipts contain these bits: raise NUMERICS of engine/page_store.py when they change
        assert_eq!(found.to_bits(), 0x410c_f091);
    }

    #[test]
    fn softmax_without_a_probable_token_returns_false() {
        let mut to = [0.0; 3];
        assert!(!softmax(Isa::Scalar, &[f32::NEG_INFINITY; 3], 1.0, &mut to));
        assert!(!softmax(Isa::Scalar, &[f32::NAN; 3], 1.0, &mut to));
        assert!(!softmax(Isa::Scalar, &[1.0, f32::INFINITY, 2.0], 1.0, &mut to));
        assert!(!softmax(Isa::Scalar, &[1.0, 3.0, 2.0], 1e-40, &mut to));
        assert!(softmax(Isa::Scalar, &[1.0, f32::NAN, f32::NEG_INFINITY], 1.0, &mut to));
        assert_eq!(to, [1.0, 0.0, 0.0]);
    }
}
