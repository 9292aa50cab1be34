//! Vector of 16 lanes in one AVX-512 register.
//!
//! Invariants: each lane is what the scalar form computes.

use std::arch::x86_64::*;

use super::api::{Lanes, OnLanes, ROUNDER};
use super::avx2;

/// Vector of 16 f32 in one register.
#[derive(Clone, Copy)]
pub(super) struct Vector(__m512);

// SAFETY of every block: sixteen elements are valid and the instructions are there, as the trait demands.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Vector {
    const ACCUMULATORS: usize = 24;

    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
    unsafe fn run<J: OnLanes>(job: J) {
        unsafe { job.on::<Self>() }
    }
    #[inline(always)]
    fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        Self(unsafe { _mm512_loadu_ps(at) })
    }
    #[inline(always)]
    unsafe fn load_f16(at: *const u16) -> Self {
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) })
    }
    #[inline(always)]
    unsafe fn load_i8(at: *const i8) -> Self {
        Self(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast()))) })
    }
    #[inline(always)]
    unsafe fn load_i4(at: *const u8) -> [Self; 2] {
        unsafe {
            let (half, eight) = (_mm_set1_epi8(15), _mm_set1_epi8(8));
            let bytes = _mm_loadu_si128(at.cast());
            let low = _mm_and_si128(bytes, half);
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), half);
            [low, high].map(|codes| Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_sub_epi8(codes, eight)))))
        }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        unsafe { _mm512_storeu_ps(at, self.0) };
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Self(unsafe { _mm512_sub_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Self(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        Self(unsafe { _mm512_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn fma(self, by: Self, to: Self) -> Self {
        Self(unsafe { _mm512_fmadd_ps(self.0, by.0, to.0) })
    }
    #[inline(always)]
    unsafe fn keep(self, from: usize, to: usize, other: Self) -> Self {
        let lanes = ((1u32 << to) - 1) & !((1u32 << from) - 1);
        Self(unsafe { _mm512_mask_blend_ps(lanes as u16, other.0, self.0) })
    }
    #[inline(always)]
    unsafe fn zero_below(self, x: Self, limit: Self) -> Self {
        unsafe {
            let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x.0, limit.0);
            Self(_mm512_maskz_mov_ps(!below, self.0))
        }
    }
    #[inline(always)]
    unsafe fn power(self) -> Self {
        unsafe {
            let bias = _mm512_set1_epi32(127 - ROUNDER.to_bits() as i32);
            let n = _mm512_add_epi32(_mm512_castps_si512(self.0), bias);
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(n)))
        }
    }
    #[inline(always)]
    unsafe fn total(self) -> f32 {
        unsafe {
            let x = _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
            avx2::total(x)
        }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe {
            let x = _mm256_max_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
            avx2::largest(x)
        }
    }
}
