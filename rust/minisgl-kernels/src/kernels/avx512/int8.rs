//! Matmul with int8 activations (AVX-512): `vpdpbusd` sums four products of a lane, exactly.
//!
//! Its first operand is unsigned: weights include their bias, and the activations' `offset` subtracts its contribution.
//!
//! Invariants: integer sums are exact in any order; everything else follows `scalar`.

use super::many;
use super::unpack::biased;
use super::*;

/// Rows in a tile.
const TALL: usize = 12;
/// Prefetch distances of weights in bytes. Few rows prefetch in two stages: they wait for memory, and the L1 cache
/// alone has too few lines in flight. With more rows a tile takes so long that distant lines would be evicted.
const NEAR: usize = 4096;
const AHEAD: usize = 8192;
const FAR_AHEAD: usize = 12288;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn matmul<const KIND: u8, const LIKE: u8>(p: &Product<'_>) {
    let rows = p.rows.len();
    // Tiles of a single panel in `many` have six sums, too few to hide latency: worth it only if unpacking is slow.
    let few = const { few(KIND) };
    if rows > few && (p.panels.len() > 1 || few == TALL) {
        // SAFETY: upheld by the caller.
        return unsafe { many::matmul::<KIND, LIKE>(p) };
    }
    let tiles = rows.div_ceil(TALL);
    for panel in p.panels.clone() {
        for tile in 0..tiles {
            let (from, to) = (tile * rows / tiles, (tile + 1) * rows / tiles);
            let row = p.rows.start + from;
            // SAFETY: upheld by the caller.
            unsafe {
                match to - from {
                    1 => run::<KIND, 1>(p, panel, row, tile == 0),
                    2 => run::<KIND, 2>(p, panel, row, tile == 0),
                    3 => run::<KIND, 3>(p, panel, row, tile == 0),
                    4 => run::<KIND, 4>(p, panel, row, tile == 0),
                    5 => run::<KIND, 5>(p, panel, row, tile == 0),
                    6 => run::<KIND, 6>(p, panel, row, tile == 0),
                    7 => run::<KIND, 7>(p, panel, row, tile == 0),
                    8 => run::<KIND, 8>(p, panel, row, tile == 0),
                    9 => run::<KIND, 9>(p, panel, row, tile == 0),
                    10 => run::<KIND, 10>(p, panel, row, tile == 0),
                    11 => run::<KIND, 11>(p, panel, row, tile == 0),
                    _ => run::<KIND, 12>(p, panel, row, tile == 0),
                }
            }
        }
    }
}

/// Returns the maximum rows for unpacking weights in registers, once for each tile of rows, instead of in the cache.
const fn few(kind: u8) -> usize {
    let layout = layout(kind);
    match layout.bits {
        [4, 0] | [8, 0] if layout.subs == 1 && layout.table.is_none() => 36,
        _ => TALL,
    }
}

/// Multiplies one panel by the `R` rows from `row` on; the `first` tile of rows brings the panel into the cache.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn run<const KIND: u8, const R: usize>(p: &Product<'_>, panel: usize, row: usize, first: bool) {
    let layout = const { layout(KIND) };
    let weights = p.w.panel(panel).as_ptr();
    let mut acc = [_mm512_setzero_ps(); R];
    for b in 0..p.acts.blocks() {
        // SAFETY: the caller guarantees every block of the panel and of the rows is there.
        unsafe {
            let block = Place::of::<KIND>(weights, b);
            let cell = cell(&p.acts, b, row);
            if first {
                for line in 0..block_bytes(KIND).div_ceil(64) {
                    if R < TALL {
                        _mm_prefetch::<_MM_HINT_T0>(block.codes.wrapping_add(NEAR + line * 64).cast());
                        _mm_prefetch::<_MM_HINT_T1>(block.codes.wrapping_add(AHEAD + line * 64).cast());
                    } else {
                        _mm_prefetch::<_MM_HINT_T1>(block.codes.wrapping_add(FAR_AHEAD + line * 64).cast());
                    }
                }
            }
            let q = p.acts.q.add(cell * BLOCK).cast_const();
            for sub in 0..layout.subs {
                let s = match KIND {
                    Q4 | Q4_K => sums_of_halves::<R>(block.codes, q),
                    _ => sums::<KIND, R>(&p.acts, block.codes, b, sub, row),
                };
                let d = scale::<KIND>(block, sub);
                for r in 0..R {
                    let dx = _mm512_set1_ps(*p.acts.d.add(cell + r));
                    acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(s[r]), _mm512_mul_ps(d, dx), acc[r]);
                }
                if layout.min {
                    let m = min::<KIND>(block, sub);
                    for r in 0..R {
                        let ds = scaled_sum(&p.acts, layout.subs, b, sub, row + r);
                        acc[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(ds), acc[r]);
                    }
                }
            }
        }
    }
    for (r, acc) in acc.into_iter().enumerate() {
        // SAFETY: the caller guarantees `out` has room.
        unsafe { put(p, panel, row + r, acc) };
    }
}

/// Returns the integer sums of a block of 4-bit codes, low and high nibbles of a byte together.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn sums_of_halves<const R: usize>(codes: *const u8, q: *const i8) -> [__m512i; R] {
    let low = _mm512_set1_epi8(15);
    let mut s = [_mm512_setzero_si512(); R];
    for j in 0..4 {
        // SAFETY: the caller guarantees a block of weights and `R` cells.
        unsafe {
            let v = _mm512_loadu_si512(codes.add(64 * j).cast());
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

/// Returns the integer sums of sub-block `sub` of a block's inputs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn sums<const KIND: u8, const R: usize>(
    acts: &ActsPtr,
    codes: *const u8,
    b: usize,
    sub: usize,
    row: usize,
) -> [__m512i; R] {
    let layout = const { layout(KIND) };
    let vectors = 8 / layout.subs;
    // SAFETY: the caller guarantees a block of weights and `R` cells.
    unsafe {
        let q = acts.q.add(cell(acts, b, row) * BLOCK).cast_const();
        let offset = offsets(acts, layout.subs, b, sub, row);
        let mut s = [_mm512_setzero_si512(); R];
        for r in 0..R {
            s[r] = _mm512_set1_epi32(*offset.add(r) / 128 * i32::from(layout.bias));
        }
        for j in sub * vectors..(sub + 1) * vectors {
            let v = biased::<KIND>(codes, j);
            for r in 0..R {
                s[r] = _mm512_dpbusd_epi32(s[r], v, four(q.add(r * BLOCK + 4 * j)));
            }
        }
        s
    }
}
