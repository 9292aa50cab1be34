//! Keys and values into pages, in each form.

#![allow(unsafe_code)]

use crate::attention::MAX_HEAD_DIM;

use super::{KvDtype, Layout, Q8_BLOCK, f16_to_f32, f32_to_f16};

/// A key that does not fit becomes this in every form: an infinite score could be a weight of 0 and hide it.
const NOT_A_NUMBER: u16 = 0x7e00;

/// As [`f32_to_f16`], number by number.
pub(super) type ToHalves = fn(&[f32], &mut [u16]);

/// The fastest that this processor has.
pub(super) fn to_halves() -> ToHalves {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if is_x86_feature_detected!("f16c") && is_x86_feature_detected!("avx") {
        // SAFETY: the instructions are there.
        return |x, halves| unsafe { f16c(x, halves) };
    }
    plain
}

fn plain(x: &[f32], halves: &mut [u16]) {
    for (half, x) in halves.iter_mut().zip(x) {
        *half = f32_to_f16(*x);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,f16c")]
fn f16c(x: &[f32], halves: &mut [u16]) {
    use std::arch::x86_64::{_MM_FROUND_TO_NEAREST_INT, _mm256_cvtps_ph, _mm256_loadu_ps};
    let (xs, rest) = x.as_chunks::<8>();
    let (to, rest_to) = halves.as_chunks_mut::<8>();
    for (to, x) in to.iter_mut().zip(xs) {
        // SAFETY: eight of each.
        unsafe {
            let eight = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(x.as_ptr()));
            to.as_mut_ptr()
                .cast::<std::arch::x86_64::__m128i>()
                .write_unaligned(eight);
        }
    }
    plain(rest, rest_to);
}

/// Write one token's key and value of one head.
///
/// # Safety
/// `to` is the start of a head's part of a page that nobody else uses at `at`; `at` is below the page size; `k` and
/// `v` have `head_dim` numbers.
pub(super) unsafe fn token(l: &Layout, to_halves: ToHalves, to: *mut u8, at: usize, k: &[f32], v: &[f32]) {
    let dim = l.head_dim;
    // Number d of the key of token `at` is number `first + d * step`.
    let (first, step) = (at / l.group * l.group * dim + at % l.group, l.group);
    // SAFETY: every place computed here is inside the head's part of the page, by the layout.
    unsafe {
        match l.dtype {
            KvDtype::F32 => {
                let (ks, vs) = (to.cast::<f32>(), to.add(l.v).cast::<f32>());
                for d in 0..dim {
                    *ks.add(first + d * step) = if k[d].is_finite() { k[d] } else { f32::NAN };
                    *vs.add(at * dim + d) = v[d];
                }
            }
            KvDtype::F16 => {
                let mut halves = [0; MAX_HEAD_DIM];
                let halves = &mut halves[..dim];
                to_halves(k, halves);
                let ks = to.cast::<u16>().add(first);
                for (d, half) in halves.iter().enumerate() {
                    let fits = half & 0x7c00 != 0x7c00;
                    *ks.add(d * step) = if fits { *half } else { NOT_A_NUMBER };
                }
                to_halves(v, halves);
                let vs = to.add(l.v).cast::<u16>().add(at * dim);
                vs.copy_from_nonoverlapping(halves.as_ptr(), dim);
            }
            KvDtype::Q8 => {
                let blocks = l.blocks();
                let scales = to.add(l.k_scales).cast::<u16>();
                let scales = scales.add(at / l.group * l.group * blocks + at % l.group);
                quantized(k, to.cast::<i8>().add(first), step, scales);
                let scales = to.add(l.v_scales).cast::<u16>().add(at * blocks);
                quantized(v, to.add(l.v).cast::<i8>().add(at * dim), 1, scales);
            }
        }
    }
}

/// # Safety
/// Every `step`-th place is writable: of `to` for each number of `x`, of `scales` for each block.
unsafe fn quantized(x: &[f32], to: *mut i8, step: usize, scales: *mut u16) {
    for (b, block) in x.chunks(Q8_BLOCK).enumerate() {
        let mut max = 0.0f32;
        for &x in block {
            // What is not a number must stay so: it makes the scale one.
            max = if x.abs() > max || x.is_nan() { x.abs() } else { max };
        }
        let scale = f32_to_f16(max / 127.0);
        let d = f16_to_f32(scale);
        let inverse = if d > 0.0 { 1.0 / d } else { 0.0 };
        // SAFETY: the caller's word.
        unsafe {
            *scales.add(b * step) = scale;
            for (i, &x) in block.iter().enumerate() {
                let q = (x * inverse).round_ties_even().clamp(-127.0, 127.0);
                *to.add((b * Q8_BLOCK + i) * step) = q as i8;
            }
        }
    }
}
