//! Products with int8 activations: `vpdpbusd` sums four products of a lane, exactly.
//!
//! Its first factor is unsigned: Q4's halves of bytes are; Q8's bytes get 128 added, which the activations' `offset`
//! takes off again.
//!
//! Invariants: integer sums are exact in any order; the rest as `scalar`.

use super::*;

/// Rows of a tile.
const TALL: usize = 12;
/// How far ahead weights are asked for.
const AHEAD: usize = 12288;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
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
                        4 => run::<FORM, 4>(p, panel, row, tile == 0),
                        5 => run::<FORM, 5>(p, panel, row, tile == 0),
                        6 => run::<FORM, 6>(p, panel, row, tile == 0),
                        7 => run::<FORM, 7>(p, panel, row, tile == 0),
                        8 => run::<FORM, 8>(p, panel, row, tile == 0),
                        9 => run::<FORM, 9>(p, panel, row, tile == 0),
                        10 => run::<FORM, 10>(p, panel, row, tile == 0),
                        11 => run::<FORM, 11>(p, panel, row, tile == 0),
                        _ => run::<FORM, 12>(p, panel, row, tile == 0),
                    }
                }
            }
        }
    }
}

/// `R` rows from `row` on by one panel; the first tile of rows brings the panel into the cache.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn run<const FORM: u8, const R: usize>(p: &Product<'_>, panel: usize, row: usize, first: bool) {
    let weights = p.w.panel(panel).as_ptr();
    let mut acc = [_mm512_setzero_ps(); R];
    for b in 0..p.acts.blocks() {
        // SAFETY: the caller's: every block of the panel and of the rows is there.
        unsafe {
            let block = weights.add(b * block_bytes(FORM));
            let cell = cell(&p.acts, b, row);
            if first {
                for line in 0..block_bytes(FORM).div_ceil(64) {
                    _mm_prefetch::<_MM_HINT_T1>(block.wrapping_add(AHEAD + line * 64).cast());
                }
            }
            let s = if FORM == Q4 {
                sums_q4::<R>(block, p.acts.q.add(cell * BLOCK))
            } else {
                sums_q8::<R>(block, p.acts.q.add(cell * BLOCK), p.acts.offset.add(cell))
            };
            let d = halves(block);
            for r in 0..R {
                let dx = _mm512_set1_ps(*p.acts.d.add(cell + r));
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(s[r]), _mm512_mul_ps(d, dx), acc[r]);
                if FORM == Q4 {
                    let ds = _mm512_set1_ps(*p.acts.ds.add(cell + r));
                    acc[r] = _mm512_fmadd_ps(halves(block.add(32)), ds, acc[r]);
                }
            }
        }
    }
    for (r, acc) in acc.into_iter().enumerate() {
        // SAFETY: the caller's: `out` has room.
        unsafe { put(p, panel, row + r, acc) };
    }
}

/// Four activations in every lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn four(q: *const i8) -> __m512i {
    // SAFETY: the caller's: 4 bytes.
    unsafe { _mm512_set1_epi32(q.cast::<i32>().read_unaligned()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn sums_q4<const R: usize>(block: *const u8, q: *const i8) -> [__m512i; R] {
    let low = _mm512_set1_epi8(15);
    let mut s = [_mm512_setzero_si512(); R];
    for j in 0..4 {
        // SAFETY: the caller's: a block of weights and `R` cells.
        unsafe {
            let v = _mm512_loadu_si512(block.add(64 + 64 * j).cast());
            let (a, b) = (
                _mm512_and_si512(v, low),
                _mm512_and_si512(_mm512_srli_epi16::<4>(v), low),
            );
            for r in 0..R {
                s[r] = _mm512_dpbusd_epi32(s[r], a, four(q.add(r * BLOCK + 4 * j)));
                s[r] = _mm512_dpbusd_epi32(s[r], b, four(q.add(r * BLOCK + 16 + 4 * j)));
            }
        }
    }
    s
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn sums_q8<const R: usize>(block: *const u8, q: *const i8, offset: *const i32) -> [__m512i; R] {
    let top = _mm512_set1_epi8(-128);
    // SAFETY: the caller's: a block of weights and `R` cells.
    unsafe {
        let mut s = [_mm512_setzero_si512(); R];
        for r in 0..R {
            s[r] = _mm512_set1_epi32(*offset.add(r));
        }
        for j in 0..8 {
            let v = _mm512_xor_si512(_mm512_loadu_si512(block.add(32 + 64 * j).cast()), top);
            for r in 0..R {
                s[r] = _mm512_dpbusd_epi32(s[r], v, four(q.add(r * BLOCK + 4 * j)));
            }
        }
        s
    }
}
