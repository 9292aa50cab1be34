//! Lossless conversions between integer types, as traits.
//!
//! Requests, slots, pages and tokens are counted in 32 bits, so that arrays of them are small. Step arrays for the
//! engine are int32. Each method asserts in debug builds that its value fits.
#![allow(clippy::as_conversions)]

/// Largest value of a 32-bit count, as `usize`.
pub(crate) const MAX_U32: usize = u32::MAX as usize;

/// Conversion to an array index or a size. Lossless, because `usize` has at least 32 bits here.
pub(crate) trait ToUsize {
    fn to_usize(self) -> usize;
}

impl ToUsize for u32 {
    fn to_usize(self) -> usize {
        self as usize
    }
}

impl ToUsize for i32 {
    fn to_usize(self) -> usize {
        self.to_u32().to_usize()
    }
}

/// Conversion of a count that fits in 32 bits, as all counts of requests, slots, pages and tokens do.
pub(crate) trait ToU32 {
    fn to_u32(self) -> u32;
}

impl ToU32 for usize {
    fn to_u32(self) -> u32 {
        debug_assert!(u32::try_from(self).is_ok());
        self as u32
    }
}

impl ToU32 for i32 {
    fn to_u32(self) -> u32 {
        debug_assert!(self >= 0);
        self.cast_unsigned()
    }
}

/// Conversion to an element of a step array.
pub(crate) trait ToI32 {
    fn to_i32(self) -> i32;
}

impl ToI32 for u32 {
    fn to_i32(self) -> i32 {
        debug_assert!(i32::try_from(self).is_ok());
        self.cast_signed()
    }
}

impl ToI32 for usize {
    fn to_i32(self) -> i32 {
        debug_assert!(i32::try_from(self).is_ok());
        self as i32
    }
}

/// Conversion of a size for arithmetic with a token budget, which may be negative.
pub(crate) trait ToI64 {
    fn to_i64(self) -> i64;
}

impl ToI64 for usize {
    fn to_i64(self) -> i64 {
        debug_assert!(i64::try_from(self).is_ok());
        self as i64
    }
}

/// Conversion of a size to a 64-bit counter or hash.
pub(crate) trait ToU64 {
    fn to_u64(self) -> u64;
}

impl ToU64 for usize {
    fn to_u64(self) -> u64 {
        self as u64
    }
}

/// Conversion of a step number or hash to its low 32 bits.
pub(crate) trait LowBits {
    fn low_u32(self) -> u32;
}

impl LowBits for i64 {
    fn low_u32(self) -> u32 {
        self as u32
    }
}

impl LowBits for u64 {
    fn low_u32(self) -> u32 {
        self as u32
    }
}

/// Divisibility test by a constant, with a multiplication in place of a division.
///
/// For the odd part d of the divisor, n d^-1 modulo 2^32 is at most (2^32 - 1) / d exactly for multiples of d (Granlund
/// and Montgomery, "Division by Invariant Integers using Multiplication", 1994, section 9). A right rotation by the
/// trailing zeros of the divisor tests the even part too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MultiplesOf {
    inverse: u32,
    zeros: u32,
    max: u32,
}

impl MultiplesOf {
    /// Creates the test for multiples of `number`, which is at least 1.
    pub fn new(number: u32) -> Self {
        debug_assert!(number > 0);
        let zeros = number.trailing_zeros();
        let odd = number >> zeros;
        // each round doubles how many of the low bits are right: 3, 6, 12, 24, 48
        let inverse = (0..4).fold(odd, |x, _| x.wrapping_mul(2_u32.wrapping_sub(odd.wrapping_mul(x))));
        let max = u32::MAX / number;
        Self { inverse, zeros, max }
    }

    pub fn has(self, number: u32) -> bool {
        number.wrapping_mul(self.inverse).rotate_right(self.zeros) <= self.max
    }

    /// Returns true if `number` has enough trailing zero bits for a multiple. A cheap necessary condition for `has`.
    pub fn may_have(self, number: u32) -> bool {
        number & ((1 << self.zeros) - 1) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::MultiplesOf;

    #[test]
    fn multiples_match_division() {
        let near = |n: u32| (n.saturating_sub(3)..=n.saturating_add(3)).collect::<Vec<_>>();
        let numbers: Vec<u32> = (0..5000)
            .chain([1 << 16, 3 << 20, 1 << 31, u32::MAX].into_iter().flat_map(near))
            .collect();
        for divisor in (1..600).chain([1024, 1536, 4096, 99_991, 1 << 31, u32::MAX]) {
            let multiples = MultiplesOf::new(divisor);
            for &number in &numbers {
                assert_eq!(multiples.has(number), number % divisor == 0, "{number} of {divisor}");
                let zeros = divisor.trailing_zeros();
                let may = number == 0 || number.trailing_zeros() >= zeros;
                assert_eq!(multiples.may_have(number), may, "{number} of {divisor}");
            }
        }
    }
}
