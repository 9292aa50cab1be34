//! Mamba-2 layer (arXiv 2405.21060) between its matmuls, token by token: state update, gate and norm.
//!
//! One form serves all instruction sets: compilers vectorize it in `#[target_feature]` copies.
//!
//! Invariants: nothing is fused or reordered and adjacent elements are independent, so the bits are the same on every
//! instruction set and do not depend on what else is computed with a token.

use super::Isa;
use super::plain::{silu, softplus, total};

on_each_isa! {
    /// Replaces each element x by x sigmoid(x).
    silu_all(numbers: &mut [f32]) as silu_each
}

#[inline(always)]
fn silu_each(numbers: &mut [f32]) {
    for x in numbers {
        *x = silu(*x);
    }
}

/// Returns the step size of a head: softplus(dt), clamped to (least, most).
#[inline]
pub fn step(dt: f32, (least, most): (f32, f32)) -> f32 {
    let dt = softplus(dt);
    // comparisons that let NaN through
    if dt < least {
        least
    } else if dt > most {
        most
    } else {
        dt
    }
}

/// Coefficients of one head for one token.
#[derive(Clone, Copy)]
pub struct By {
    /// Step size dt.
    pub dt: f32,
    /// Decay exp(dt A), by which the state is multiplied.
    pub decay: f32,
    /// Skip coefficient D: the fraction of x that bypasses the state.
    pub past: f32,
}

on_each_isa! {
    /// Updates the state, S = decay S + dt b x^T, then sets x to the output c S + past x. `state`: [len of b, len of
    /// x].
    advance(by: By, b: &[f32], c: &[f32], state: &mut [f32], x: &mut [f32]) as advance_one
}

#[inline(always)]
fn advance_one(by: By, b: &[f32], c: &[f32], state: &mut [f32], x: &mut [f32]) {
    let mut first = 0;
    first = advance_some::<32>(by, (b, c), state, x, first);
    first = advance_some::<8>(by, (b, c), state, x, first);
    advance_some::<1>(by, (b, c), state, x, first);
}

/// Updates the elements of x from `first` on, LANES at a time while possible. Returns the index of the next one.
#[inline(always)]
fn advance_some<const LANES: usize>(
    by: By,
    (b, c): (&[f32], &[f32]),
    state: &mut [f32],
    x: &mut [f32],
    mut first: usize,
) -> usize {
    let width = x.len();
    while let Some(x) = x.get_mut(first..first + LANES) {
        let mut given = [0.0; LANES];
        let mut sum = [0.0; LANES];
        for i in 0..LANES {
            given[i] = by.dt * x[i];
        }
        for ((row, b), c) in state.chunks_exact_mut(width).zip(b).zip(c) {
            let row = &mut row[first..first + LANES];
            for i in 0..LANES {
                row[i] = row[i] * by.decay + given[i] * b;
                sum[i] += row[i] * c;
            }
        }
        for i in 0..LANES {
            x[i] = sum[i] + by.past * x[i];
        }
        first += LANES;
    }
    first
}

/// Order of the gate z and the norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// Gate without a norm: y silu(z).
    Alone,
    /// Gate, then norm: norm(y silu(z)).
    BeforeNorm,
    /// Norm, then gate: norm(y) silu(z).
    BehindNorm,
}

/// Parameters of the gated norm before a layer's output projection.
#[derive(Clone, Copy)]
pub struct Way<'a> {
    /// Order of gate and norm.
    pub gating: Gating,
    /// Weights of the norm, one for each element of y.
    pub weight: &'a [f32],
    /// Elements in a norm group.
    pub group: usize,
    /// Epsilon added to the mean square under the root.
    pub eps: f32,
    /// Factor of the gate z.
    pub gate_scale: f32,
    /// Factor of the output.
    pub out_scale: f32,
}

on_each_isa! {
    /// Applies gate `z` and norm to `y` in place.
    leave(way: Way<'_>, z: &[f32], y: &mut [f32]) as leave_one
}

#[inline(always)]
fn leave_one(way: Way<'_>, z: &[f32], y: &mut [f32]) {
    if way.gating != Gating::BehindNorm {
        gate(way.gate_scale, z, y);
    }
    if way.gating != Gating::Alone {
        for (y, weight) in y.chunks_exact_mut(way.group).zip(way.weight.chunks_exact(way.group)) {
            let squares = total(y.len(), |i| y[i] * y[i]);
            let by = 1.0 / (squares / y.len() as f32 + way.eps).sqrt();
            for (y, weight) in y.iter_mut().zip(weight) {
                *y = *y * by * weight;
            }
        }
    }
    if way.gating == Gating::BehindNorm {
        gate(way.gate_scale, z, y);
    }
    for y in y {
        *y *= way.out_scale;
    }
}

#[inline(always)]
fn gate(scale: f32, z: &[f32], y: &mut [f32]) {
    for (y, z) in y.iter_mut().zip(z) {
        *y *= silu(z * scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns pseudo-random values between -1 and 1, the same for the same seed.
    fn numbers(seed: u32, count: usize) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9e37_79b9);
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    fn exact_silu(x: f64) -> f64 {
        x / (1.0 + (-x).exp())
    }

    fn near(found: f32, wanted: f64) -> bool {
        (f64::from(found) - wanted).abs() <= 2e-6 * wanted.abs().max(1.0)
    }

    #[test]
    fn a_mamba_state_decays_and_adds_its_input() {
        for (width, size) in [(64, 128), (1, 3), (24, 16), (43, 5)] {
            let mut state = vec![0.0; size * width];
            let mut wanted = vec![0.0_f64; size * width];
            for token in 0..9 {
                let (b, c, from) = (
                    numbers(token, size),
                    numbers(50 + token, size),
                    numbers(99 + token, width),
                );
                let by = By {
                    dt: 0.3,
                    decay: 0.8,
                    past: 0.5,
                };
                let mut x = from.clone();
                advance(Isa::Scalar, by, &b, &c, &mut state, &mut x);
                for i in 0..width {
                    let mut sum = 0.0;
                    for n in 0..size {
                        let old = &mut wanted[n * width + i];
                        *old = *old * f64::from(by.decay) + f64::from(by.dt) * f64::from(b[n]) * f64::from(from[i]);
                        sum += *old * f64::from(c[n]);
                    }
                    let sum = sum + f64::from(by.past) * f64::from(from[i]);
                    assert!(near(x[i], sum), "{width} of {size}: {} {sum}", x[i]);
                }
            }
        }
    }

    #[test]
    fn a_step_is_a_softplus_within_limits() {
        let free = (0.0, f32::INFINITY);
        for dt in [-100.0_f32, -5.0, -0.1, 0.0, 0.7, 19.9, 20.1, 300.0] {
            let wanted = if dt > 100.0 {
                f64::from(dt)
            } else {
                f64::from(dt).exp().ln_1p()
            };
            assert!(near(step(dt, free), wanted), "{dt}: {}", step(dt, free));
        }
        assert_eq!((step(-5.0, (0.1, 2.0)), step(5.0, (0.1, 2.0))), (0.1, 2.0));
        assert!(step(f32::NAN, (0.1, 2.0)).is_nan());
    }

    #[test]
    fn the_gated_norm_follows_the_requested_order() {
        let (z, from, weight) = (numbers(1, 24), numbers(2, 24), numbers(3, 24));
        for gating in [Gating::Alone, Gating::BeforeNorm, Gating::BehindNorm] {
            let way = Way {
                gating,
                weight: &weight,
                group: 12,
                eps: 1e-3,
                gate_scale: 1.5,
                out_scale: 0.25,
            };
            let mut y = from.clone();
            leave(Isa::Scalar, way, &z, &mut y);
            let gated = |i: usize| exact_silu(1.5 * f64::from(z[i]));
            let first = |i: usize| f64::from(from[i]) * if gating == Gating::BehindNorm { 1.0 } else { gated(i) };
            for i in 0..24 {
                let group = i / 12 * 12..i / 12 * 12 + 12;
                let mean = group.map(|i| first(i) * first(i)).sum::<f64>() / 12.0;
                let normed = first(i) / (mean + 1e-3).sqrt() * f64::from(weight[i]);
                let wanted = match gating {
                    Gating::Alone => first(i),
                    Gating::BeforeNorm => normed,
                    Gating::BehindNorm => normed * gated(i),
                };
                assert!(near(y[i], wanted * 0.25), "{gating:?}: {} {wanted}", y[i]);
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let of = |isa: Isa| {
            let mut found = Vec::new();
            let mut state = vec![0.0; 40 * 43];
            for token in 0..20 {
                let mut x: Vec<f32> = numbers(70 + token, 50).iter().map(|x| x * 30.0).collect();
                silu_all(isa, &mut x);
                let (b, c) = (numbers(token, 40), numbers(30 + token, 40));
                let by = By {
                    dt: 0.3,
                    decay: 0.9,
                    past: 0.5,
                };
                let mut y = x[..43].to_vec();
                advance(isa, by, &b, &c, &mut state, &mut y);
                for gating in [Gating::Alone, Gating::BeforeNorm, Gating::BehindNorm] {
                    let way = Way {
                        gating,
                        weight: &x[..43],
                        group: 43,
                        eps: 1e-5,
                        gate_scale: 1.1,
                        out_scale: 0.7,
                    };
                    leave(isa, way, &x[..43], &mut y);
                    found.extend(bits(&y));
                }
                found.extend(bits(&x));
            }
            found.extend(bits(&state));
            found
        };
        let scalar = of(Isa::Scalar);
        for isa in Isa::here() {
            assert!(of(isa) == scalar, "{isa:?}");
        }
    }
}
