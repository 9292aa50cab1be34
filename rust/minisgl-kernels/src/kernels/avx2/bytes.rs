//! Matmul of many rows with int8 activations (AVX2, AVX-VNNI): some blocks of a panel are unpacked to bytes in the L1
//! cache, then multiplied by tiles of rows.
//!
//! Without AVX-VNNI, products are summed in 16 bits over a whole sub-block. Sums may wrap on the way, but the last one
//! fits: they begin with `-centre` times the activations, which centres the values around zero. Values of more than 6
//! bits are split into `16 h + l` of 4 bits each.
//!
//! Invariants: integer sums are exact in any order; everything else follows `scalar`, blocks in order.

use std::ops::Range;

use super::exact::biased;
use super::int8::{add_products, bits, high, low};
use super::*;

/// Blocks that are unpacked at a time.
const CHUNK: usize = 8;
/// Panels that are multiplied by a chunk of the activations while it is in the L2 cache.
const PANELS: usize = 16;
/// Rows in a tile.
const TALL: usize = 6;
/// Rows that share one unpacking of weights.
const ROWS: usize = 120;

/// Returns what is subtracted from the values of a kind in 16-bit sums, so that 32 of their products fit.
const fn centre(kind: u8) -> i32 {
    match (bits(kind), layout(kind).bias) {
        (8, _) => 8, // of the upper half
        (5, 0) => 16,
        (_, bias) => bias as i32,
    }
}

/// Returns the multiple of the activations' sum that turns sums of centred values into sums of values minus the bias.
const fn rest(kind: u8) -> i32 {
    if bits(kind) == 8 {
        0
    } else {
        centre(kind) - layout(kind).bias as i32
    }
}

/// Returns one representative kind for all kinds with alike tiles, so that they share their code.
pub(super) const fn like_int8(kind: u8) -> u8 {
    let (want, mut other) = (layout(kind), 0);
    loop {
        let found = layout(other);
        let halves = (bits(other) == 8) == (bits(kind) == 8);
        let centred = (centre(other) == 0) == (centre(kind) == 0) && (rest(other) == 0) == (rest(kind) == 0);
        if found.subs == want.subs && found.min == want.min && halves && centred {
            return other;
        }
        other += 1;
    }
}

/// Block of a panel, and what its sums need of each row.
#[repr(C, align(64))]
struct Unpacked {
    /// Unsigned bytes, bias included: [vector][64]. Values of more than 6 bits: their low halves, then the high ones.
    w: [[[u8; 4 * PANEL]; 8]; 2],
    /// Scales and minima: [sub-block][scale, minimum][16].
    scales: [[[f32; PANEL]; 2]; 2],
    /// First value of integer sums: two in 16 bits, or (AVX-VNNI) one in 32.
    start: [[i32; ROWS]; 2],
    /// Numbers that are added to integer sums.
    rest: [[i32; ROWS]; 2],
    /// Factors of minima.
    ds: [[f32; ROWS]; 2],
}

/// Blocks of a chunk, and sums of the chunks before.
#[repr(C, align(64))]
struct Room {
    blocks: [Unpacked; CHUNK],
    /// [panel][row][16]
    acc: [[[f32; PANEL]; ROWS]; PANELS],
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul<const KIND: u8, const LIKE: u8, const VNNI: bool>(p: &Product<'_>) {
    let mut room = std::mem::MaybeUninit::<Room>::uninit();
    let room = room.as_mut_ptr();
    for first in p.rows.clone().step_by(ROWS) {
        let rows = first..(first + ROWS).min(p.rows.end);
        for first in p.panels.clone().step_by(PANELS) {
            let panels = first..(first + PANELS).min(p.panels.end);
            for b in (0..p.acts.blocks()).step_by(CHUNK) {
                // SAFETY: upheld by the caller; `room` is written before it is read.
                unsafe { chunk::<KIND, LIKE, VNNI>(p, panels.clone(), rows.clone(), b, room) };
            }
        }
    }
}

/// Adds the products of the chunk of blocks from `b` on, with at most `PANELS` panels and `ROWS` rows.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn chunk<const KIND: u8, const LIKE: u8, const VNNI: bool>(
    p: &Product<'_>,
    panels: Range<usize>,
    rows: Range<usize>,
    b: usize,
    room: *mut Room,
) {
    let blocks = b..(b + CHUNK).min(p.acts.blocks());
    let (weights, panel_bytes) = (p.w.data().as_ptr(), p.w.panel_bytes());
    // SAFETY: upheld by the caller.
    unsafe {
        of_rows::<KIND, VNNI>(&p.acts, rows.clone(), blocks.clone(), room);
        for (i, panel) in panels.clone().enumerate() {
            let from = weights.add(panel * panel_bytes);
            unpack::<KIND, VNNI>(from, blocks.clone(), room);
            // The blocks to unpack next: of the next panel, or the next ones of the first panel.
            let next = match panel + 1 < panels.end {
                true => from.wrapping_add(panel_bytes + b * block_bytes(KIND)),
                false => weights.wrapping_add(panels.start * panel_bytes + blocks.end * block_bytes(KIND)),
            };
            let mut t = Tile {
                p,
                room,
                blocks: blocks.clone(),
                panel,
                row: rows.start,
                at: 0,
                acc: (&raw mut (*room).acc[i]).cast(),
            };
            // Tiles of like height: 8 rows are 4 and 4, not 6 and 2.
            let tiles = rows.len().div_ceil(TALL);
            let (height, taller) = (rows.len() / tiles, rows.len() % tiles);
            let lines = const { (CHUNK * block_bytes(KIND)).div_ceil(64) }.div_ceil(tiles);
            for tile in 0..tiles {
                for line in tile * lines..(tile + 1) * lines {
                    _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(line * 64).cast());
                }
                let height = height + usize::from(tile < taller);
                match height {
                    1 => t.run::<LIKE, VNNI, 1>(),
                    2 => t.run::<LIKE, VNNI, 2>(),
                    3 => t.run::<LIKE, VNNI, 3>(),
                    4 => t.run::<LIKE, VNNI, 4>(),
                    5 => t.run::<LIKE, VNNI, 5>(),
                    _ => t.run::<LIKE, VNNI, TALL>(),
                }
                t.row += height;
                t.at += height;
                t.acc = t.acc.add(height * PANEL);
            }
        }
    }
}

/// Writes what a block's sums need of each row.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn of_rows<const KIND: u8, const VNNI: bool>(
    acts: &ActsPtr,
    rows: Range<usize>,
    blocks: Range<usize>,
    room: *mut Room,
) {
    let layout = const { layout(KIND) };
    let (centre, rest) = const { (centre(KIND), rest(KIND)) };
    for (i, b) in blocks.enumerate() {
        for sub in 0..layout.subs {
            // SAFETY: the caller guarantees the rows and the blocks.
            unsafe {
                let block = &raw mut (*room).blocks[i];
                for (r, row) in rows.clone().enumerate() {
                    let sum = || *offsets(acts, layout.subs, b, sub, row) / 128;
                    if layout.min {
                        (*block).ds[sub][r] = scaled_sum(acts, layout.subs, b, sub, row);
                    }
                    if VNNI {
                        (*block).start[sub][r] = sum() * i32::from(layout.bias);
                        continue;
                    }
                    if centre != 0 {
                        let q = acts.q.add(cell(acts, b, row) * BLOCK + sub * 16);
                        let pairs = if layout.subs == 1 {
                            let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256(q.cast()));
                            _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs))
                        } else {
                            _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadu_si128(q.cast()))
                        };
                        let pairs = _mm_add_epi16(pairs, _mm_shuffle_epi32::<0b0100_1110>(pairs));
                        let pairs = _mm_add_epi16(pairs, _mm_shuffle_epi32::<0b1011_0001>(pairs));
                        let start = _mm_mullo_epi16(pairs, _mm_set1_epi16(-centre as i16));
                        (*block).start[sub][r] = _mm_cvtsi128_si32(start);
                    }
                    if rest != 0 {
                        (*block).rest[sub][r] = -sum() * rest;
                    }
                }
            }
        }
    }
}

/// Unpacks the `blocks` of the panel at `from`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<const KIND: u8, const VNNI: bool>(from: *const u8, blocks: Range<usize>, room: *mut Room) {
    let layout = const { layout(KIND) };
    for (i, b) in blocks.enumerate() {
        // SAFETY: the caller guarantees the blocks, for which `room` has space.
        unsafe {
            let block = Place::of::<KIND>(from, b);
            let room = &raw mut (*room).blocks[i];
            for j in 0..8 {
                let v = biased::<KIND>(block.codes, j);
                let put = |half: usize, v: [__m256i; 2]| {
                    let to: *mut __m256i = (&raw mut (*room).w[half][j]).cast();
                    _mm256_store_si256(to, v[0]);
                    _mm256_store_si256(to.add(1), v[1]);
                };
                if VNNI || bits(KIND) < 8 {
                    put(0, v);
                } else {
                    put(0, low(v));
                    put(1, high(v));
                }
            }
            for sub in 0..layout.subs {
                let to: *mut f32 = (&raw mut (*room).scales[sub]).cast();
                store(to, scale::<KIND>(block, sub));
                if layout.min {
                    store(to.add(PANEL), min::<KIND>(block, sub));
                }
            }
        }
    }
}

/// Work of one tile: some rows of activations times a chunk of blocks.
struct Tile<'a> {
    p: &'a Product<'a>,
    room: *const Room,
    blocks: Range<usize>,
    panel: usize,
    row: usize,
    /// Index of the first row in `room`.
    at: usize,
    acc: *mut f32,
}

impl Tile<'_> {
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run<const KIND: u8, const VNNI: bool, const R: usize>(&self) {
        let layout = const { layout(KIND) };
        let acts = &self.p.acts;
        // SAFETY: the caller guarantees unpacked blocks, prepared rows, room for their sums.
        unsafe {
            if self.blocks.start == 0 {
                for r in 0..R {
                    store(self.acc.add(r * PANEL), zero());
                }
            }
            let room = self.room.cast::<Unpacked>();
            for (at, b) in self.blocks.clone().enumerate() {
                let cell = cell(acts, b, self.row);
                let (q, d) = (acts.q.add(cell * BLOCK).cast_const(), acts.d.add(cell).cast_const());
                let block = room.wrapping_add(at);
                for sub in 0..layout.subs {
                    let s = sums::<KIND, VNNI, R>(block, sub, q.add(sub * (BLOCK / layout.subs)), self.at);
                    let scales: *const f32 = (&raw const (*block).scales[sub]).cast();
                    for r in 0..R {
                        let acc = self.acc.add(r * PANEL);
                        let dx = _mm256_set1_ps(*d.add(r));
                        let by = both!(load(scales), |scale| _mm256_mul_ps(scale, dx));
                        let mut sum = fma2(both!(s[r], |s| _mm256_cvtepi32_ps(s)), by, load(acc));
                        if layout.min {
                            let ds = (&raw const (*block).ds[sub]).cast::<f32>().add(self.at + r);
                            sum = fma(load(scales.add(PANEL)), _mm256_set1_ps(*ds), sum);
                        }
                        store(acc, sum);
                    }
                }
            }
            if self.blocks.end == acts.blocks() {
                for r in 0..R {
                    put(self.p, self.panel, self.row + r, load(self.acc.add(r * PANEL)));
                }
            }
        }
    }
}

/// Returns the integer sums of sub-block `sub`; `q`: its activations of the first row, `at`: the row's index.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sums<const KIND: u8, const VNNI: bool, const R: usize>(
    block: *const Unpacked,
    sub: usize,
    q: *const i8,
    at: usize,
) -> [Whole; R] {
    let layout = const { layout(KIND) };
    let count = 8 / layout.subs;
    // SAFETY: the caller guarantees an unpacked block and `R` cells.
    unsafe {
        let start: *const i32 = (&raw const (*block).start[sub]).cast::<i32>().add(at);
        let of = |half: usize, centred: bool| {
            let mut s = [[_mm256_setzero_si256(); 2]; R];
            if centred {
                for r in 0..R {
                    s[r] = [_mm256_set1_epi32(*start.add(r)); 2];
                }
            }
            for j in 0..std::hint::black_box(count) {
                let w = vectors((&raw const (*block).w[half][sub * count]).cast::<u8>().add(64 * j));
                for r in 0..R {
                    let x = _mm256_set1_epi32(q.add(r * BLOCK + 4 * j).cast::<i32>().read_unaligned());
                    for h in 0..2 {
                        s[r][h] = if VNNI {
                            add_products(s[r][h], w[h], x)
                        } else {
                            _mm256_add_epi16(s[r][h], _mm256_maddubs_epi16(w[h], x))
                        };
                    }
                }
            }
            s
        };
        if VNNI {
            return of(0, !layout.min);
        }
        let mut s = of(0, const { centre(KIND) != 0 && bits(KIND) < 8 });
        for r in 0..R {
            s[r] = both!(s[r], |s| _mm256_madd_epi16(s, _mm256_set1_epi16(1)));
        }
        if bits(KIND) == 8 {
            let high = of(1, true);
            for r in 0..R {
                for h in 0..2 {
                    s[r][h] = _mm256_add_epi32(s[r][h], _mm256_madd_epi16(high[r][h], _mm256_set1_epi16(16)));
                }
            }
        }
        if const { rest(KIND) != 0 } {
            let rest = (&raw const (*block).rest[sub]).cast::<i32>().add(at);
            for r in 0..R {
                let rest = _mm256_set1_epi32(*rest.add(r));
                s[r] = both!(s[r], |s| _mm256_add_epi32(s, rest));
            }
        }
        s
    }
}
