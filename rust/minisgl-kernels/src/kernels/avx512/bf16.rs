//! Matmul of bf16 with bf16 by the dot-product instruction of AVX512-BF16.
//!
//! Invariants: the same bits for every number of rows and split of panels. The bits differ from other kernels: the
//! instruction adds two products to a sum, and treats values below 2^-126 as zero.

use super::*;

/// Panels in a tile.
const WIDE: usize = 4;
/// Rows in a tile, which with its weights fills the registers.
const TALL: usize = 6;

/// Returns true if this CPU has AVX512-BF16.
pub(crate) fn is_here() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

/// Computes a bf16 matmul.
///
/// # Safety
/// The CPU has AVX512-BF16, the matrix is bf16, the rows are prepared as one bf16 part each, and `out` is large enough.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
pub(crate) unsafe fn matmul(p: &Product<'_>) {
    for panel in p.panels.clone().step_by(WIDE) {
        // SAFETY: upheld by the caller.
        unsafe {
            match p.panels.end - panel {
                1 => rows::<1>(p, panel),
                2 => rows::<2>(p, panel),
                3 => rows::<3>(p, panel),
                _ => rows::<4>(p, panel),
            }
        }
    }
}

/// Multiplies the `P` panels from `panel` on by all rows, in tiles of about equal height.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
unsafe fn rows<const P: usize>(p: &Product<'_>, panel: usize) {
    let (count, tiles) = (p.rows.len(), p.rows.len().div_ceil(TALL));
    for tile in 0..tiles {
        let (from, to) = (tile * count / tiles, (tile + 1) * count / tiles);
        let row = p.rows.start + from;
        // SAFETY: upheld by the caller.
        unsafe {
            match to - from {
                1 => run::<1, P>(p, panel, row),
                2 => run::<2, P>(p, panel, row),
                3 => run::<3, P>(p, panel, row),
                4 => run::<4, P>(p, panel, row),
                5 => run::<5, P>(p, panel, row),
                _ => run::<6, P>(p, panel, row),
            }
        }
    }
}

/// Computes a tile of `R` rows by `P` panels: all inputs in order, two at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
unsafe fn run<const R: usize, const P: usize>(p: &Product<'_>, panel: usize, row: usize) {
    let mut sums = [[_mm512_setzero_ps(); P]; R];
    let weights: [*const u8; P] = std::array::from_fn(|i| p.w.panel(panel + i).as_ptr());
    // SAFETY: the caller guarantees every block of the panels and of the rows is there.
    unsafe {
        for b in 0..p.acts.blocks() {
            let x: *const i32 = p.acts.parts.add(cell(&p.acts, b, row) * BLOCK).cast();
            for pair in 0..BLOCK / 2 {
                let at = b * block_bytes(BF16) + pair * 64;
                let mut w = [_mm512_setzero_si512(); P];
                for i in 0..P {
                    w[i] = _mm512_loadu_si512(weights[i].add(at).cast());
                }
                for r in 0..R {
                    let x = bf16(_mm512_set1_epi32(*x.add(r * BLOCK / 2 + pair)));
                    for i in 0..P {
                        sums[r][i] = _mm512_dpbf16_ps(sums[r][i], bf16(w[i]), x);
                    }
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (i, sums) in sums.into_iter().enumerate() {
                put(p, panel + i, row + r, sums);
            }
        }
    }
}

/// Reinterprets the bits as bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes without meaning of their own.
    unsafe { std::mem::transmute(bits) }
}
