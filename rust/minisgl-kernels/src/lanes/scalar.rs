//! Vector of 16 lanes as an array: the reference that all other forms must equal bit for bit.
//!
//! Invariants: one lane is one f32 operation, rounded once.

use super::api::{LANES, Lanes, OnLanes, power_one};
use crate::blocks::f16_to_f32;

/// Vector of 16 f32 as an array.
#[derive(Clone, Copy)]
pub(super) struct Scalar([f32; LANES]);

impl Scalar {
    #[inline(always)]
    fn by(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }

    #[inline(always)]
    fn folded(mut self, f: impl Fn(f32, f32) -> f32) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                self.0[i] = f(self.0[i], self.0[i + half]);
            }
        }
        self.0[0]
    }
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

// SAFETY of every function: sixteen elements are valid, as the trait demands.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Scalar {
    const ACCUMULATORS: usize = 4;

    #[inline(never)]
    unsafe fn run<J: OnLanes>(job: J) {
        unsafe { job.on::<Self>() }
    }
    #[inline(always)]
    fn prefetch(_: *const u8) {}
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        Self(unsafe { at.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f16(at: *const u16) -> Self {
        let bits = unsafe { at.cast::<[u16; LANES]>().read_unaligned() };
        Self(bits.map(f16_to_f32))
    }
    #[inline(always)]
    unsafe fn load_i8(at: *const i8) -> Self {
        let bytes = unsafe { at.cast::<[i8; LANES]>().read_unaligned() };
        Self(bytes.map(f32::from))
    }
    #[inline(always)]
    unsafe fn load_i4(at: *const u8) -> [Self; 2] {
        let bytes = unsafe { at.cast::<[u8; LANES]>().read_unaligned() };
        [0, 4].map(|shift| Self(bytes.map(|byte| f32::from(byte >> shift & 15) - 8.0)))
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        unsafe { at.cast::<[f32; LANES]>().write_unaligned(self.0) };
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.by(other, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.by(other, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.by(other, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn fma(self, by: Self, to: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(by.0[i], to.0[i])))
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.by(other, larger)
    }
    #[inline(always)]
    unsafe fn keep(self, from: usize, to: usize, other: Self) -> Self {
        Self(std::array::from_fn(|i| {
            if (from..to).contains(&i) { self.0[i] } else { other.0[i] }
        }))
    }
    #[inline(always)]
    unsafe fn zero_below(self, x: Self, limit: Self) -> Self {
        Self(std::array::from_fn(
            |i| {
                if x.0[i] < limit.0[i] { 0.0 } else { self.0[i] }
            },
        ))
    }
    #[inline(always)]
    unsafe fn power(self) -> Self {
        Self(self.0.map(power_one))
    }
    #[inline(always)]
    unsafe fn total(self) -> f32 {
        self.folded(|a, b| a + b)
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        self.folded(larger)
    }
}
