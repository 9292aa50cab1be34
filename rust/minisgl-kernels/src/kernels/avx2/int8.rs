//! Matmul with int8 activations (AVX2). With AVX-VNNI, `vpdpbusd` sums four products of a lane, exactly. Without it,
//! `maddubs` sums two products of unsigned by signed bytes in 16 bits, which do not overflow as long as the unsigned
//! bytes are small: 16 sums of two products with 4 bits stay below 2^15, 8 with 5 bits, 4 with 6.
//!
//! A byte with more bits is split into `16 h + l` with 4 bits each. The activations' `offset` subtracts the bias. Many
//! rows are multiplied by `bytes`.
//!
//! Invariants: integer sums are exact in any order; everything else follows `scalar`.

use super::exact::biased;
use super::*;

/// Rows in a tile.
const TALL: usize = 4;

/// Returns the maximum rows for unpacking weights in registers, once for each tile of rows, instead of in the cache.
const fn few(kind: u8, vnni: bool) -> usize {
    match (kind, bits(kind)) {
        (Q8, _) if vnni => 36,
        (Q4 | Q4_K, _) => 8,
        (_, 6) if !vnni => 1,
        _ => TALL,
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul<const KIND: u8, const LIKE: u8, const VNNI: bool>(p: &Product<'_>) {
    if p.rows.len() > const { few(KIND, VNNI) } {
        // SAFETY: upheld by the caller.
        return unsafe { bytes::matmul::<KIND, LIKE, VNNI>(p) };
    }
    /// Rows that are multiplied by a few panels together, so that both stay in caches.
    const ROWS: usize = 240;
    for first in p.rows.clone().step_by(ROWS) {
        let rows = ROWS.min(p.rows.end - first);
        let tiles = rows.div_ceil(TALL);
        for panel in p.panels.clone() {
            for tile in 0..tiles {
                let (from, to) = (tile * rows / tiles, (tile + 1) * rows / tiles);
                let row = first + from;
                // SAFETY: upheld by the caller.
                unsafe {
                    match to - from {
                        1 => run::<KIND, VNNI, 1>(p, panel, row, tile == 0),
                        2 => run::<KIND, VNNI, 2>(p, panel, row, tile == 0),
                        3 => run::<KIND, VNNI, 3>(p, panel, row, tile == 0),
                        _ => run::<KIND, VNNI, 4>(p, panel, row, tile == 0),
                    }
                }
            }
        }
    }
}

/// Multiplies one panel by the `R` rows from `row` on; the `first` tile of rows brings the panel into the cache.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run<const KIND: u8, const VNNI: bool, const R: usize>(
    p: &Product<'_>,
    panel: usize,
    row: usize,
    first: bool,
) {
    let layout = const { layout(KIND) };
    let weights = p.w.panel(panel).as_ptr();
    let mut acc = [zero(); R];
    for b in 0..p.acts.blocks() {
        // SAFETY: the caller guarantees every block of the panel and of the rows is there.
        unsafe {
            let block = Place::of::<KIND>(weights, b);
            let cell = cell(&p.acts, b, row);
            if first {
                for line in 0..block_bytes(KIND).div_ceil(64) {
                    _mm_prefetch::<_MM_HINT_T0>(block.codes.wrapping_add(AHEAD + line * 64).cast());
                }
            }
            let q = p.acts.q.add(cell * BLOCK).cast_const();
            for sub in 0..layout.subs {
                let s = match KIND {
                    _ if VNNI => {
                        let offset = offsets(&p.acts, layout.subs, b, sub, row);
                        sums_of_four::<KIND, R>(block.codes, sub, q, offset)
                    }
                    Q4 | Q4_K => sums_of_halves::<R>(block.codes, q),
                    _ => {
                        let offset = offsets(&p.acts, layout.subs, b, sub, row);
                        match const { bits(KIND) } {
                            8 => sums_of_bytes::<KIND, R>(block.codes, q, offset),
                            _ => sums_of_values::<KIND, R>(block.codes, sub, q, offset),
                        }
                    }
                };
                let d = scale::<KIND>(block, sub);
                for r in 0..R {
                    let dx = _mm256_set1_ps(*p.acts.d.add(cell + r));
                    let i = [_mm256_cvtepi32_ps(s[r][0]), _mm256_cvtepi32_ps(s[r][1])];
                    acc[r] = fma2(i, [_mm256_mul_ps(d[0], dx), _mm256_mul_ps(d[1], dx)], acc[r]);
                }
                if layout.min {
                    let m = min::<KIND>(block, sub);
                    for r in 0..R {
                        let ds = scaled_sum(&p.acts, layout.subs, b, sub, row + r);
                        acc[r] = fma(m, _mm256_set1_ps(ds), acc[r]);
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

/// Accumulators of a panel's two vectors for R rows, in 16 or 32 bits.
type Sums<const R: usize> = [[__m256i; 2]; R];

/// Returns the integer sums of sub-block `sub` of a block's inputs, by AVX-VNNI.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sums_of_four<const KIND: u8, const R: usize>(
    codes: *const u8,
    sub: usize,
    q: *const i8,
    offset: *const i32,
) -> Sums<R> {
    let layout = const { layout(KIND) };
    let vectors = 8 / layout.subs;
    // SAFETY: the caller guarantees a block of weights and `R` cells.
    unsafe {
        let mut s = start::<R>(offset, layout.bias);
        for j in sub * vectors..(sub + 1) * vectors {
            let w = biased::<KIND>(codes, j);
            for r in 0..R {
                let x = _mm256_set1_epi32(q.add(r * BLOCK + 4 * j).cast::<i32>().read_unaligned());
                s[r] = [add_products(s[r][0], w[0], x), add_products(s[r][1], w[1], x)];
            }
        }
        s
    }
}

/// Returns `s` plus the products of four unsigned bytes of `w` by four signed of `x`. Inline assembly, because a
/// function with the instruction's target feature would not be inlined into callers without it.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn add_products(mut s: __m256i, w: __m256i, x: __m256i) -> __m256i {
    // SAFETY: the caller guarantees the CPU has AVX-VNNI.
    unsafe {
        std::arch::asm!("{{vex}} vpdpbusd {s}, {w}, {x}", s = inout(ymm_reg) s, w = in(ymm_reg) w, x = in(ymm_reg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    s
}

/// Adds the products of 4-bit values in bytes with four activations of each row to `s`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply<const R: usize>(s: &mut Sums<R>, w: [__m256i; 2], q: *const i8) {
    for r in 0..R {
        // SAFETY: the caller guarantees `R` cells.
        let x = unsafe { _mm256_set1_epi32(q.add(r * BLOCK).cast::<i32>().read_unaligned()) };
        s[r][0] = _mm256_add_epi16(s[r][0], _mm256_maddubs_epi16(w[0], x));
        s[r][1] = _mm256_add_epi16(s[r][1], _mm256_maddubs_epi16(w[1], x));
    }
}

/// Returns the low nibbles of all bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn low(v: [__m256i; 2]) -> [__m256i; 2] {
    let mask = _mm256_set1_epi8(15);
    [_mm256_and_si256(v[0], mask), _mm256_and_si256(v[1], mask)]
}

/// Returns the high nibbles of all bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn high(v: [__m256i; 2]) -> [__m256i; 2] {
    low([_mm256_srli_epi16::<4>(v[0]), _mm256_srli_epi16::<4>(v[1])])
}

/// Widens sums from 16 to 32 bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn widen(s: [__m256i; 2]) -> [__m256i; 2] {
    let ones = _mm256_set1_epi16(1);
    [_mm256_madd_epi16(s[0], ones), _mm256_madd_epi16(s[1], ones)]
}

/// Returns the bits that the values of a kind need.
pub(super) const fn bits(kind: u8) -> u32 {
    let layout = layout(kind);
    let mut most = ((1_u64 << (layout.bits[0] + layout.bits[1])) - 1) as u32;
    if let Some(table) = layout.table {
        let mut i = 0;
        most = 0;
        while i < 16 {
            if table[i] as u32 > most {
                most = table[i] as u32;
            }
            i += 1;
        }
    }
    let bits = 32 - most.leading_zeros();
    if bits > 6 { 8 } else { bits }
}

/// Returns the integer sums of a block of 4-bit codes, low and high nibbles of a byte together.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sums_of_halves<const R: usize>(codes: *const u8, q: *const i8) -> Sums<R> {
    let mut s = [[_mm256_setzero_si256(); 2]; R];
    // A constant 4 would be unrolled until registers run out.
    for j in 0..if R == 1 { 4 } else { std::hint::black_box(4) } {
        // SAFETY: the caller guarantees a block of weights and `R` cells.
        unsafe {
            let v = vectors(codes.add(64 * j));
            multiply(&mut s, low(v), q.add(4 * j));
            multiply(&mut s, high(v), q.add(16 + 4 * j));
        }
    }
    for r in 0..R {
        s[r] = widen(s[r]);
    }
    s
}

/// Returns the integer sums of sub-block `sub` for values of at most 6 bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sums_of_values<const KIND: u8, const R: usize>(
    codes: *const u8,
    sub: usize,
    q: *const i8,
    offset: *const i32,
) -> Sums<R> {
    let layout = const { layout(KIND) };
    // Vectors whose products fit into 16 bits.
    let fit = const { 128 >> if bits(KIND) < 4 { 4 } else { bits(KIND) } };
    let vectors = 8 / layout.subs;
    let chunk = if fit < vectors { fit } else { vectors };
    // SAFETY: the caller guarantees a block of weights and `R` cells.
    unsafe {
        let mut all = start::<R>(offset, layout.bias);
        for from in (sub * vectors..(sub + 1) * vectors).step_by(chunk) {
            let mut s = [[_mm256_setzero_si256(); 2]; R];
            for j in from..from + chunk {
                multiply(&mut s, biased::<KIND>(codes, j), q.add(4 * j));
            }
            add_wide(&mut all, &s);
        }
        all
    }
}

/// Returns initial sums that cancel the contribution of the bias.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn start<const R: usize>(offset: *const i32, bias: u8) -> Sums<R> {
    let mut s = [[_mm256_setzero_si256(); 2]; R];
    for r in 0..R {
        // SAFETY: the caller guarantees `R` cells.
        s[r] = [_mm256_set1_epi32(unsafe { *offset.add(r) } / 128 * i32::from(bias)); 2];
    }
    s
}

/// Adds 16-bit sums to 32-bit sums.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_wide<const R: usize>(all: &mut Sums<R>, s: &Sums<R>) {
    for r in 0..R {
        let wide = widen(s[r]);
        for h in 0..2 {
            all[r][h] = _mm256_add_epi32(all[r][h], wide[h]);
        }
    }
}

/// Returns the integer sums of 8-bit values: first all low nibbles, then all high ones, to save registers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sums_of_bytes<const KIND: u8, const R: usize>(codes: *const u8, q: *const i8, offset: *const i32) -> Sums<R> {
    let zero = [[_mm256_setzero_si256(); 2]; R];
    let (mut lows, mut highs) = (zero, zero);
    let eight = || if R == 1 { 8 } else { std::hint::black_box(8) };
    // SAFETY: the caller guarantees a block of weights and `R` cells.
    unsafe {
        for j in 0..eight() {
            multiply(&mut lows, low(biased::<KIND>(codes, j)), q.add(4 * j));
        }
        let mut all = start::<R>(offset, const { layout(KIND).bias });
        add_wide(&mut all, &lows);
        for j in 0..eight() {
            multiply(&mut highs, high(biased::<KIND>(codes, j)), q.add(4 * j));
        }
        for r in 0..R {
            let s = widen(highs[r]);
            for h in 0..2 {
                all[r][h] = _mm256_add_epi32(all[r][h], _mm256_slli_epi32::<4>(s[h]));
            }
        }
        all
    }
}
