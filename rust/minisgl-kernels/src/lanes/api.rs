//! The trait of a vector, jobs over it, and 2^x made of it.

use std::cell::UnsafeCell;

/// Lanes of a vector on every instruction set.
pub(crate) const LANES: usize = 16;

/// Added to a number and taken off again, this rounds it to the nearest integer, ties to even.
pub(crate) const ROUNDER: f32 = 12_582_912.0;

/// Sixteen f32.
///
/// # Safety
/// Every function is for a processor that has the implementor's instructions; pointers are valid for sixteen elements
/// and need no alignment.
pub(crate) trait Lanes: Copy {
    /// Vectors of accumulators that fit into registers beside what feeds them.
    const ACCUMULATORS: usize;

    /// Do a job in a function of its own, which has the instructions: what many places do is compiled once.
    unsafe fn run<J: OnLanes>(job: J);
    /// Ask for a cache line that is needed soon; any address will do.
    fn prefetch(at: *const u8);
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(at: *const f32) -> Self;
    unsafe fn load_f16(at: *const u16) -> Self;
    unsafe fn load_i8(at: *const i8) -> Self;
    /// Of sixteen bytes the low halves, then the high ones, 8 taken off each.
    unsafe fn load_i4(at: *const u8) -> [Self; 2];
    unsafe fn store(self, at: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// `self * by + to`, rounded once.
    unsafe fn fma(self, by: Self, to: Self) -> Self;
    /// `self > other ? self : other`.
    unsafe fn max(self, other: Self) -> Self;
    /// Lanes `from..to` (within 0..=16), the rest from `other`.
    unsafe fn keep(self, from: usize, to: usize, other: Self) -> Self;
    /// 0 where `x < limit`, else this.
    unsafe fn zero_below(self, x: Self, limit: Self) -> Self;
    /// 2^n for a vector that is n + [`ROUNDER`], n from -126 to 127.
    unsafe fn power(self) -> Self;
    /// Lanes folded with `add`: i with i + 8, then i + 4, i + 2, i + 1.
    unsafe fn total(self) -> f32;
    /// The same with `max`.
    unsafe fn largest(self) -> f32;
}

/// What is written once over [`Lanes`].
pub(crate) trait OnLanes {
    /// Do it, with vectors of this kind.
    ///
    /// # Safety
    /// The processor has the instructions of `V`, and what the job itself asks for.
    unsafe fn on<V: Lanes>(self);
}

/// Coefficients of 2^f for f from -0.5 to 0.5, the highest power first; the last is 1.
pub(crate) const POLYNOMIAL: [f32; 7] = [
    1.535_336_2e-4,
    1.339_887_4e-3,
    9.618_437e-3,
    5.550_332_5e-2,
    2.402_265e-1,
    6.931_472e-1,
    1.0,
];

/// Below this, 2^x counts as 0.
pub(crate) const LOWEST: f32 = -125.0;

/// 2^x for x <= 0 (and a little above); NaN stays NaN.
///
/// # Safety
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn exp2<V: Lanes>(x: V) -> V {
    // SAFETY: the caller's word.
    unsafe {
        let lowest = V::splat(LOWEST);
        // NaN is not above the limit: `max` gives its second operand.
        let near = lowest.max(x);
        let rounder = V::splat(ROUNDER);
        let shifted = near.add(rounder);
        let f = near.sub(shifted.sub(rounder));
        let mut p = V::splat(POLYNOMIAL[0]);
        for c in &POLYNOMIAL[1..] {
            p = p.fma(f, V::splat(*c));
        }
        p.mul(shifted.power()).zero_below(x, lowest)
    }
}

/// [`exp2`] of one number, with the same operations.
#[inline(always)]
pub(crate) fn exp2_one(x: f32) -> f32 {
    if x < LOWEST {
        return 0.0;
    }
    let shifted = x + ROUNDER;
    let f = x - (shifted - ROUNDER);
    let mut p = POLYNOMIAL[0];
    for c in &POLYNOMIAL[1..] {
        p = p.mul_add(f, *c);
    }
    p * power_one(shifted)
}

/// [`Lanes::power`] of one number.
#[inline(always)]
pub(crate) fn power_one(shifted: f32) -> f32 {
    f32::from_bits(shifted.to_bits().wrapping_sub(ROUNDER.to_bits()).wrapping_add(127) << 23)
}

#[repr(align(64))]
#[derive(Debug)]
struct Line {
    // Reached through pointers.
    _numbers: UnsafeCell<[f32; LANES]>,
}

/// Numbers in whole cache lines.
#[derive(Debug, Default)]
pub(crate) struct Lines(Vec<Line>);

// SAFETY: shared numbers are reached only through `shared`, whose users are unsafe and say who writes where.
unsafe impl Sync for Lines {}

impl Lines {
    pub fn new(numbers: usize) -> Self {
        let mut lines = Self::default();
        lines.grow(numbers);
        lines
    }

    /// Room for at least so many; what was there is kept, what is new is 0.
    pub fn grow(&mut self, numbers: usize) {
        let lines = numbers.div_ceil(LANES);
        if self.0.len() < lines {
            self.0.resize_with(lines, || Line {
                _numbers: UnsafeCell::new([0.0; LANES]),
            });
        }
    }

    pub fn len(&self) -> usize {
        self.0.len() * LANES
    }

    #[inline(always)]
    pub fn as_ptr(&self) -> *const f32 {
        self.0.as_ptr().cast()
    }

    #[inline(always)]
    pub fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }

    /// To be written by several threads, each in places of its own.
    #[inline(always)]
    pub fn shared(&self) -> *mut f32 {
        UnsafeCell::raw_get(self.0.as_ptr().cast::<UnsafeCell<f32>>())
    }
}
