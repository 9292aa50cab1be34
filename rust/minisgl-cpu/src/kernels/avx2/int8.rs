//! Products with int8 activations: `maddubs` sums two products of unsigned by signed bytes in 16 bits, which overflow
//! in no order as long as the unsigned ones have 4 bits: 32 * 15 * 127 / 2 is below 2^15.
//!
//! Q4 has such halves of bytes. A byte of Q8 is `16 h + l - 128` with two of them; the activations' `offset` is what
//! 128 gives.
//!
//! Invariants: integer sums are exact in any order; the rest as `scalar`.

use super::*;

/// Rows of a tile.
const TALL: usize = 4;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul<const FORM: u8>(p: &Product<'_>) {
    /// Rows that go over a few panels together, so that both stay in caches.
    const ROWS: usize = 240;
    for first in p.rows.clone().step_by(ROWS) {
        let rows = ROWS.min(p.rows.end - first);
        let tiles = rows.div_ceil(TALL);
        for panel in p.panels.clone() {
            for tile in 0..tiles {
                let (from, to) = (tile * rows / tiles, (tile + 1) * rows / tiles);
                let row = first + from;
                // SAFETY: the caller's.
                unsafe {
                    match to - from {
                        1 => run::<FORM, 1>(p, panel, row, tile == 0),
                        2 => run::<FORM, 2>(p, panel, row, tile == 0),
                        3 => run::<FORM, 3>(p, panel, row, tile == 0),
                        _ => run::<FORM, 4>(p, panel, row, tile == 0),
                    }
                }
            }
        }
    }
}

/// `R` rows from `row` on by one panel; the first tile of rows brings the panel into the cache.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run<const FORM: u8, const R: usize>(p: &Product<'_>, panel: usize, row: usize, first: bool) {
    let weights = p.w.panel(panel).as_ptr();
    let mut acc = [zero(); R];
    for b in 0..p.acts.blocks() {
        // SAFETY: the caller's: every block of the panel and of the rows is there.
        unsafe {
            let block = weights.add(b * block_bytes(FORM));
            let cell = cell(&p.acts, b, row);
            if first {
                for line in 0..block_bytes(FORM).div_ceil(64) {
                    _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(AHEAD + line * 64).cast());
                }
            }
            let q = p.acts.q.add(cell * BLOCK).cast_const();
            let s = if FORM == Q4 {
                sums_q4::<R>(block, q)
            } else {
                sums_q8::<R>(block, q, p.acts.offset.add(cell))
            };
            let d = halves(block);
            for r in 0..R {
                let dx = _mm256_set1_ps(*p.acts.d.add(cell + r));
                let i = [_mm256_cvtepi32_ps(s[r][0]), _mm256_cvtepi32_ps(s[r][1])];
                acc[r] = fma2(i, [_mm256_mul_ps(d[0], dx), _mm256_mul_ps(d[1], dx)], acc[r]);
                if FORM == Q4 {
                    let ds = _mm256_set1_ps(*p.acts.ds.add(cell + r));
                    acc[r] = fma(halves(block.add(32)), ds, acc[r]);
                }
            }
        }
    }
    for (r, acc) in acc.into_iter().enumerate() {
        // SAFETY: the caller's: `out` has room.
        unsafe { put(p, panel, row + r, acc) };
    }
}

/// The sums of both vectors of a panel, in 16 or 32 bits.
type Sums<const R: usize> = [[__m256i; 2]; R];

/// Adds the products of bytes of 4 bits with four activations of each row.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply<const R: usize>(s: &mut Sums<R>, w: [__m256i; 2], q: *const i8) {
    for r in 0..R {
        // SAFETY: the caller's: `R` cells.
        let x = unsafe { _mm256_set1_epi32(q.add(r * BLOCK).cast::<i32>().read_unaligned()) };
        s[r][0] = _mm256_add_epi16(s[r][0], _mm256_maddubs_epi16(w[0], x));
        s[r][1] = _mm256_add_epi16(s[r][1], _mm256_maddubs_epi16(w[1], x));
    }
}

/// The lower halves of bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn low(v: [__m256i; 2]) -> [__m256i; 2] {
    let mask = _mm256_set1_epi8(15);
    [_mm256_and_si256(v[0], mask), _mm256_and_si256(v[1], mask)]
}

/// The upper halves of bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn high(v: [__m256i; 2]) -> [__m256i; 2] {
    low([_mm256_srli_epi16::<4>(v[0]), _mm256_srli_epi16::<4>(v[1])])
}

/// From 16 bits to 32.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn widen(s: [__m256i; 2]) -> [__m256i; 2] {
    let ones = _mm256_set1_epi16(1);
    [_mm256_madd_epi16(s[0], ones), _mm256_madd_epi16(s[1], ones)]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sums_q4<const R: usize>(block: *const u8, q: *const i8) -> Sums<R> {
    let mut s = [[_mm256_setzero_si256(); 2]; R];
    // What the compiler knows to be 4 it unrolls until registers run out.
    for j in 0..if R == 1 { 4 } else { std::hint::black_box(4) } {
        // SAFETY: the caller's: a block of weights and `R` cells.
        unsafe {
            let v = vectors(block.add(64 + 64 * j));
            multiply(&mut s, low(v), q.add(4 * j));
            multiply(&mut s, high(v), q.add(16 + 4 * j));
        }
    }
    for r in 0..R {
        s[r] = widen(s[r]);
    }
    s
}

/// First all lower halves, then all upper ones: one set of sums is what registers have room for.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sums_q8<const R: usize>(block: *const u8, q: *const i8, offset: *const i32) -> Sums<R> {
    let zero = [[_mm256_setzero_si256(); 2]; R];
    let (mut lows, mut highs) = (zero, zero);
    let top = _mm256_set1_epi8(-128);
    let eight = || if R == 1 { 8 } else { std::hint::black_box(8) };
    // SAFETY: the caller's: a block of weights and `R` cells.
    unsafe {
        for j in 0..eight() {
            multiply(&mut lows, low(vectors(block.add(32 + 64 * j))), q.add(4 * j));
        }
        for r in 0..R {
            let offset = _mm256_set1_epi32(*offset.add(r));
            let s = widen(lows[r]);
            lows[r] = [_mm256_add_epi32(s[0], offset), _mm256_add_epi32(s[1], offset)];
        }
        for j in 0..eight() {
            let v = vectors(block.add(32 + 64 * j));
            let v = [_mm256_xor_si256(v[0], top), _mm256_xor_si256(v[1], top)];
            multiply(&mut highs, high(v), q.add(4 * j));
        }
        for r in 0..R {
            let s = widen(highs[r]);
            for h in 0..2 {
                lows[r][h] = _mm256_add_epi32(lows[r][h], _mm256_slli_epi32::<4>(s[h]));
            }
        }
    }
    lows
}
