//! Vector of 16 lanes in two AVX2 registers.
//!
//! Invariants: each lane is what the scalar form computes.

use std::arch::x86_64::*;

use super::api::{Lanes, OnLanes, ROUNDER};

/// Vector of 16 f32 in two registers.
#[derive(Clone, Copy)]
pub(super) struct Vector([__m256; 2]);

// SAFETY of every block: sixteen elements are valid and the instructions are there, as the trait demands.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Vector {
    const ACCUMULATORS: usize = 6;

    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run<J: OnLanes>(job: J) {
        unsafe { job.on::<Self>() }
    }
    #[inline(always)]
    fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([unsafe { _mm256_set1_ps(x) }; 2])
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        Self(unsafe { [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))] })
    }
    #[inline(always)]
    unsafe fn load_f16(at: *const u16) -> Self {
        Self(unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(at.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(at.add(8).cast())),
            ]
        })
    }
    #[inline(always)]
    unsafe fn load_i8(at: *const i8) -> Self {
        unsafe {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.add(8).cast()));
            Self([_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)])
        }
    }
    #[inline(always)]
    unsafe fn load_i4(at: *const u8) -> [Self; 2] {
        unsafe {
            let (half, eight) = (_mm_set1_epi8(15), _mm_set1_epi8(8));
            let bytes = _mm_loadu_si128(at.cast());
            let low = _mm_and_si128(bytes, half);
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), half);
            [low, high].map(|codes| {
                let codes = _mm_sub_epi8(codes, eight);
                let behind = _mm_unpackhi_epi64(codes, codes);
                Self([codes, behind].map(|eight| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight))))
            })
        }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        unsafe {
            _mm256_storeu_ps(at, self.0[0]);
            _mm256_storeu_ps(at.add(8), self.0[1]);
        }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Self(unsafe {
            [
                _mm256_add_ps(self.0[0], other.0[0]),
                _mm256_add_ps(self.0[1], other.0[1]),
            ]
        })
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Self(unsafe {
            [
                _mm256_sub_ps(self.0[0], other.0[0]),
                _mm256_sub_ps(self.0[1], other.0[1]),
            ]
        })
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Self(unsafe {
            [
                _mm256_mul_ps(self.0[0], other.0[0]),
                _mm256_mul_ps(self.0[1], other.0[1]),
            ]
        })
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        Self(unsafe {
            [
                _mm256_max_ps(self.0[0], other.0[0]),
                _mm256_max_ps(self.0[1], other.0[1]),
            ]
        })
    }
    #[inline(always)]
    unsafe fn fma(self, by: Self, to: Self) -> Self {
        Self(unsafe {
            [
                _mm256_fmadd_ps(self.0[0], by.0[0], to.0[0]),
                _mm256_fmadd_ps(self.0[1], by.0[1], to.0[1]),
            ]
        })
    }
    #[inline(always)]
    unsafe fn keep(self, from: usize, to: usize, other: Self) -> Self {
        unsafe {
            let (from, to) = (_mm256_set1_epi32(from as i32 - 1), _mm256_set1_epi32(to as i32));
            let mut lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let mut kept = other.0;
            for (kept, mine) in kept.iter_mut().zip(self.0) {
                let inside = _mm256_and_si256(_mm256_cmpgt_epi32(lane, from), _mm256_cmpgt_epi32(to, lane));
                *kept = _mm256_blendv_ps(*kept, mine, _mm256_castsi256_ps(inside));
                lane = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
            }
            Self(kept)
        }
    }
    #[inline(always)]
    unsafe fn zero_below(self, x: Self, limit: Self) -> Self {
        unsafe {
            let low = _mm256_cmp_ps::<_CMP_LT_OQ>(x.0[0], limit.0[0]);
            let high = _mm256_cmp_ps::<_CMP_LT_OQ>(x.0[1], limit.0[1]);
            Self([_mm256_andnot_ps(low, self.0[0]), _mm256_andnot_ps(high, self.0[1])])
        }
    }
    #[inline(always)]
    unsafe fn power(self) -> Self {
        unsafe {
            let bias = _mm256_set1_epi32(127 - ROUNDER.to_bits() as i32);
            let low = _mm256_add_epi32(_mm256_castps_si256(self.0[0]), bias);
            let high = _mm256_add_epi32(_mm256_castps_si256(self.0[1]), bias);
            let (low, high) = (_mm256_slli_epi32::<23>(low), _mm256_slli_epi32::<23>(high));
            Self([_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)])
        }
    }
    #[inline(always)]
    unsafe fn total(self) -> f32 {
        unsafe { total(_mm256_add_ps(self.0[0], self.0[1])) }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe { largest(_mm256_max_ps(self.0[0], self.0[1])) }
    }
}

/// Returns the sum of 8 lanes: the last steps of [`Lanes::total`].
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn total(x: __m256) -> f32 {
    // SAFETY: upheld by the caller.
    unsafe {
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
    }
}

/// Returns the maximum of 8 lanes: the last steps of [`Lanes::largest`].
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn largest(x: __m256) -> f32 {
    // SAFETY: upheld by the caller.
    unsafe {
        let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
    }
}
