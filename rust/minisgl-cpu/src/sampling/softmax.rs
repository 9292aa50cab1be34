//! Exponentials of a row of logits.
//!
//! Invariants: the same bits whatever the instruction set: no fused operations, sums in a fixed order; nothing is slower
//! for odd numbers, and none of them makes a NaN: an impossible or a wrong logit has no probability.

/// Sums that run side by side.
const LANES: usize = 8;

/// 1.5 * 2^52: adding it leaves the nearest whole number in the low bits.
const ROUND: f64 = 6_755_399_441_055_744.0;
/// Below this float32 has only zero.
const LOWEST: f32 = -110.0;

/// e to the power of `x`, for `x` at most 0: rounded from float64, whose error is 1e-11 of the result.
#[inline(always)]
fn exp(x: f32) -> f64 {
    let x = f64::from(if x > LOWEST { x } else { LOWEST }); // a NaN, too, goes there
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

/// The largest number; minus infinity of none. A NaN never is.
pub(super) fn max(numbers: &[f32]) -> f32 {
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

/// Probabilities of `logits / temperature`, not yet divided by their sum, which is returned: not positive if no token
/// has any.
fn exponentials(logits: &[f32], temperature: f32, to: &mut [f32]) -> f32 {
    let top = max(logits) / temperature;
    let mut sums = [0.0_f64; LANES];
    let whole = logits.len() / LANES * LANES;
    for (from, to) in logits[..whole].chunks_exact(LANES).zip(to.chunks_exact_mut(LANES)) {
        for i in 0..LANES {
            to[i] = exp(from[i] / temperature - top) as f32;
            sums[i] += f64::from(to[i]);
        }
    }
    for (i, (from, to)) in logits[whole..].iter().zip(&mut to[whole..]).enumerate() {
        *to = exp(from / temperature - top) as f32;
        sums[i] += f64::from(*to);
    }
    total(&sums) as f32
}

/// Probabilities of `logits` at `temperature`. False if no token has any: then `to` holds nothing of use.
pub(super) fn softmax(logits: &[f32], temperature: f32, to: &mut [f32]) -> bool {
    let sum = exponentials(logits, temperature, to);
    let some = sum > 0.0 && sum.is_finite();
    if some {
        to.iter_mut().for_each(|p| *p /= sum);
    }
    some
}

/// The natural logarithm of the sum of the exponentials of `logits`: what to subtract from each for its log
/// probability.
pub(super) fn log_sum_exp(logits: &[f32]) -> f32 {
    let top = max(logits);
    let mut sums = [0.0_f64; LANES];
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for i in 0..LANES {
            sums[i] += exp(chunk[i] - top);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += exp(x - top);
    }
    (f64::from(top) + total(&sums).ln()) as f32
}

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
            assert!(softmax(&logits, 0.7, &mut to));
            assert!((to.iter().map(|&p| f64::from(p)).sum::<f64>() - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn rows_without_a_probable_token_are_told() {
        let mut to = [0.0; 3];
        assert!(!softmax(&[f32::NEG_INFINITY; 3], 1.0, &mut to));
        assert!(!softmax(&[f32::NAN; 3], 1.0, &mut to));
        assert!(!softmax(&[1.0, f32::INFINITY, 2.0], 1.0, &mut to));
        assert!(!softmax(&[1.0, 3.0, 2.0], 1e-40, &mut to));
        assert!(softmax(&[1.0, f32::NAN, f32::NEG_INFINITY], 1.0, &mut to));
        assert_eq!(to, [1.0, 0.0, 0.0]);
    }
}
