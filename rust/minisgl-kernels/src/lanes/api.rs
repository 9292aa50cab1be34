//! Trait of a vector of 16 f32, jobs over it, and 2^x built on it.

use std::cell::UnsafeCell;

/// Lanes of a vector on every instruction set.
pub(crate) const LANES: usize = 16;

/// Rounding constant: adding and subtracting it rounds an f32 to the nearest integer, ties to even.
pub(crate) const ROUNDER: f32 = 12_582_912.0;

/// Vector of 16 f32.
///
/// # Safety
/// The processor has the implementor's instructions; pointers are valid for 16 elements and need no alignment.
pub(crate) trait Lanes: Copy {
    /// Maximum number of accumulator vectors that fit into registers alongside their operands.
    const ACCUMULATORS: usize;

    /// Runs a job in a function that has the instructions enabled, so that a job used in many places is compiled once.
    unsafe fn run<J: OnLanes>(job: J);
    /// Prefetches a cache line; any address is allowed.
    fn prefetch(at: *const u8);
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(at: *const f32) -> Self;
    unsafe fn load_f16(at: *const u16) -> Self;
    unsafe fn load_i8(at: *const i8) -> Self;
    /// Loads 16 bytes and returns their low nibbles, then their high ones, minus 8 each.
    unsafe fn load_i4(at: *const u8) -> [Self; 2];
    unsafe fn store(self, at: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// Returns `self * by + to`, rounded once.
    unsafe fn fma(self, by: Self, to: Self) -> Self;
    /// Returns `self > other ? self : other`.
    unsafe fn max(self, other: Self) -> Self;
    /// Returns lanes `from..to` (within 0..=16) of `self` and the rest of `other`.
    unsafe fn keep(self, from: usize, to: usize, other: Self) -> Self;
    /// Returns 0 where `x < limit`, else `self`.
    unsafe fn zero_below(self, x: Self, limit: Self) -> Self;
    /// Returns 2^n for a vector that is n + [`ROUNDER`], n from -126 to 127.
    unsafe fn power(self) -> Self;
    /// Returns the sum of the lanes: i with i + 8, then i + 4, i + 2, i + 1.
    unsafe fn total(self) -> f32;
    /// Returns the maximum of the lanes, reduced in the order of `total`.
    unsafe fn largest(self) -> f32;
}

/// Job that is written once over [`Lanes`].
pub(crate) trait OnLanes {
    /// Runs the job with vectors of type `V`.
    ///
    /// # Safety
    /// The processor has the instructions of `V`, and the job's own conditions hold.
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

/// Exponent below which 2^x counts as 0.
pub(crate) const LOWEST: f32 = -125.0;

/// Returns 2^x for x <= 0 (and a little above); NaN stays NaN.
///
/// # Safety
/// The processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn exp2<V: Lanes>(x: V) -> V {
    // SAFETY: upheld by the caller.
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

/// Returns 2^x of one f32, by the operations of [`exp2`].
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

/// Returns 2^n for an f32 that is n + [`ROUNDER`] ([`Lanes::power`] of one element).
#[inline(always)]
pub(crate) fn power_one(shifted: f32) -> f32 {
    f32::from_bits(shifted.to_bits().wrapping_sub(ROUNDER.to_bits()).wrapping_add(127) << 23)
}

#[repr(align(64))]
#[derive(Debug)]
struct Line {
    // Accessed through pointers only.
    _numbers: UnsafeCell<[f32; LANES]>,
}

/// Buffer of f32 in whole cache lines.
#[derive(Debug, Default)]
pub(crate) struct Lines(Vec<Line>);

// SAFETY: shared elements are reached only through `shared`, whose unsafe users state who writes where.
unsafe impl Sync for Lines {}

impl Lines {
    pub fn new(numbers: usize) -> Self {
        let mut lines = Self::default();
        lines.grow(numbers);
        lines
    }

    /// Grows the buffer to at least `numbers` elements; existing elements are kept, new ones are 0.
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

    /// Returns a pointer through which several threads may write, each its own elements.
    #[inline(always)]
    pub fn shared(&self) -> *mut f32 {
        UnsafeCell::raw_get(self.0.as_ptr().cast::<UnsafeCell<f32>>())
    }
}
