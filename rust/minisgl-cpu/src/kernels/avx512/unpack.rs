//! A block's weights as vectors of f32, one input of all 16 outputs after the other.
//!
//! Invariants: numbers come as they are held; scales and minima are the caller's.

use super::*;

/// Steps of a group: what comes out of registers at once. A block has 4 groups.
pub(crate) const GROUP: usize = 8;

/// Runs a body with each step of a group as a constant.
macro_rules! steps {
    (|$t:ident| $body:block) => {
        steps!(@ $t $body 0 1 2 3 4 5 6 7)
    };
    (@ $t:ident $body:block $($step:literal)*) => {
        $({
            const $t: usize = $step;
            $body
        })*
    };
}

/// What the weights of group `g` come out of, if it is not read step by step.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(crate) unsafe fn group<const FORM: u8>(block: *const u8, g: usize) -> [__m512i; 2] {
    // SAFETY: the caller's: a whole block, 4 groups.
    unsafe {
        match FORM {
            Q4 => [
                _mm512_loadu_si512(block.add(64 + 64 * g).cast()),
                _mm512_setzero_si512(),
            ],
            Q8 => {
                let at = block.add(32 + 128 * g);
                [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(64).cast())]
            }
            _ => [_mm512_setzero_si512(); 2],
        }
    }
}

/// The weights of step `T` of group `g`, as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(crate) unsafe fn weights<const FORM: u8, const T: usize>(block: *const u8, g: usize, v: [__m512i; 2]) -> __m512 {
    // SAFETY: the caller's: a whole block.
    unsafe {
        match FORM {
            Q4 => nibble::<T>(v[0]),
            Q8 => byte::<T>(v[T / 4]),
            F16 => halves(block.add(256 * g + 32 * T)),
            BF16 => {
                let v = _mm512_loadu_si512(block.add(256 * g + T / 2 * 64).cast());
                let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
                _mm512_castsi512_ps(if T.is_multiple_of(2) {
                    _mm512_slli_epi32::<16>(v)
                } else {
                    _mm512_and_si512(v, high)
                })
            }
            _ => _mm512_loadu_ps(block.add(512 * g + 64 * T).cast()),
        }
    }
}

/// Half a byte of each lane, the `T`-th: a table of 16 numbers looks at an index's lowest 4 bits only.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn nibble<const T: usize>(v: __m512i) -> __m512 {
    let table = _mm512_setr_ps(
        0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
    );
    let index = match T {
        0 => v,
        1 => _mm512_srli_epi32::<4>(v),
        2 => _mm512_srli_epi32::<8>(v),
        3 => _mm512_srli_epi32::<12>(v),
        4 => _mm512_srli_epi32::<16>(v),
        5 => _mm512_srli_epi32::<20>(v),
        6 => _mm512_srli_epi32::<24>(v),
        _ => _mm512_srli_epi32::<28>(v),
    };
    _mm512_permutexvar_ps(index, table)
}

/// A signed byte of each lane, the `T % 4`-th.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn byte<const T: usize>(v: __m512i) -> __m512 {
    let top = match T % 4 {
        0 => _mm512_slli_epi32::<24>(v),
        1 => _mm512_slli_epi32::<16>(v),
        2 => _mm512_slli_epi32::<8>(v),
        _ => v,
    };
    _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(top))
}

/// Which input step `t` of group `g` takes.
#[inline]
pub(crate) const fn input<const FORM: u8>(g: usize, t: usize) -> usize {
    if FORM == Q4 {
        4 * g + t / 2 + t % 2 * 16
    } else {
        GROUP * g + t
    }
}

pub(crate) use steps;
