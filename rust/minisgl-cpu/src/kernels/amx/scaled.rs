//! Products with Q4 and Q8: a tile product for each block of 32 inputs, whose sums are then scaled in vectors.
//!
//! `Int8`: bytes by bytes, whose sums are exact: the bits of every other instruction set. `Exact`: a number of f32 is
//! the sum of three of bf16 (24 bits of mantissa in 3 x 8), so a row of activations is three rows of a tile; the
//! sums of the three are added, then scaled as everywhere. Only the order within a block's sum is the tile's own.
//!
//! A step is several products: while its tiles are computed, those of the step before are stored and those of the
//! one before that are scaled, and the weights of the next are expanded.
//!
//! Keeps true: a row's bits depend on nothing but the row and the matrix.
//! Doesn't know: threads, how panels and rows are cut.

use std::arch::x86_64::*;

use super::expand::{Q8_UNIT, Tables, q4_to_bf16, q4_to_bytes, q8_to_bf16};
use super::tile::{load, multiply, store, zero};
use crate::weights::{Form, PANEL};

/// Most rows of activations at once: their sums stay in registers.
pub(super) const MOST: usize = 16;

/// One kind of product.
pub(super) trait Kind {
    /// The weights' form.
    const FORM: Form;
    /// Bytes by bytes, not bf16 by bf16.
    const BYTES: bool;
    /// Bytes of an expanded block.
    const EXPANDED: usize = if Self::BYTES { 512 } else { 1024 };
    /// Rows of a tile for one row of activations, and their bytes.
    const PARTS: usize = if Self::BYTES { 1 } else { 3 };
    const PART_BYTES: usize = if Self::BYTES { 32 } else { 64 };
    /// Where in a block its numbers are.
    const NUMBERS: usize = if matches!(Self::FORM, Form::Q4) {
        64
    } else {
        32
    };
    /// Whether the numbers are a tile as they lie.
    const AS_IS: bool = Self::BYTES && matches!(Self::FORM, Form::Q8);
}

pub(super) struct ExactQ4;
pub(super) struct ExactQ8;
pub(super) struct Int8Q4;
pub(super) struct Int8Q8;

impl Kind for ExactQ4 {
    const FORM: Form = Form::Q4;
    const BYTES: bool = false;
}

impl Kind for ExactQ8 {
    const FORM: Form = Form::Q8;
    const BYTES: bool = false;
}

impl Kind for Int8Q4 {
    const FORM: Form = Form::Q4;
    const BYTES: bool = true;
}

impl Kind for Int8Q8 {
    const FORM: Form = Form::Q8;
    const BYTES: bool = true;
}

/// Tiles that the parts of `rows` rows fill.
pub(super) const fn tiles(parts: usize, rows: usize) -> usize {
    (rows * parts).div_ceil(16)
}

/// Rows of tile `j` of those.
pub(super) const fn tile_rows(parts: usize, rows: usize, j: usize) -> usize {
    let (tiles, all) = (tiles(parts, rows), rows * parts);
    all / tiles + if j < all % tiles { 1 } else { 0 }
}

/// One panel by at most `MOST` rows; pointers are at the first block.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    /// Blocks of the panel as they lie.
    pub w: *const u8,
    /// Blocks of it expanded, if they are.
    pub expanded: *const u8,
    /// How many blocks.
    pub blocks: usize,
    /// Parts of the rows, and bytes from block to block.
    pub a: *const u8,
    pub a_step: usize,
    /// int8: scales of the rows. From block to block it is `cells` numbers, here and in `sum`.
    pub d: *const f32,
    /// What the minimum is multiplied by.
    pub sum: *const f32,
    pub cells: usize,
    /// 16 sums of each row: read, and written back.
    pub acc: *mut f32,
    /// `RING` bytes.
    pub ring: *mut u8,
}

/// How far ahead weights are asked for: they come from memory where rows are few.
pub(super) const AHEAD: usize = 12 << 10;

/// Bytes of rings: two steps of sums, two of expanded blocks, up to 4096 bytes each.
pub(super) const RING: usize = 2 * 4 * 1024 + 2 * 4 * 1024;

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn expand<K: Kind>(tables: &Tables, block: *const u8, to: *mut u8) {
    // SAFETY: the caller's: a block, and room for it expanded.
    unsafe {
        let from = block.add(K::NUMBERS);
        match (K::FORM, K::BYTES) {
            (Form::Q4, false) => q4_to_bf16(tables, from, to),
            (Form::Q4, true) => q4_to_bytes(from, to),
            (_, false) => q8_to_bf16(tables, from, to),
            (_, true) => {}
        }
    }
}

/// Adds the scaled sums of a block, which are at `sums`, to `acc`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn scale<K: Kind, const T: usize>(
    acc: &mut [__m512; T],
    block: *const u8,
    sums: *const u8,
    d_x: *const f32,
    sum_x: *const f32,
) {
    // SAFETY: the caller's: a block, its sums, and the rows' numbers for that block.
    unsafe {
        let mut d = _mm512_cvtph_ps(_mm256_loadu_si256(block.cast()));
        if K::BYTES {
            for (t, acc) in acc.iter_mut().enumerate() {
                let sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums.add(64 * t).cast()));
                let by = _mm512_mul_ps(d, _mm512_set1_ps(*d_x.add(t)));
                *acc = _mm512_fmadd_ps(sum, by, *acc);
            }
        } else {
            if K::FORM == Form::Q8 {
                d = _mm512_mul_ps(d, _mm512_set1_ps(Q8_UNIT));
            }
            for (t, acc) in acc.iter_mut().enumerate() {
                let parts = sums.add(64 * 3 * t).cast::<f32>();
                let two = _mm512_add_ps(_mm512_load_ps(parts), _mm512_load_ps(parts.add(16)));
                let sum = _mm512_add_ps(two, _mm512_load_ps(parts.add(32)));
                *acc = _mm512_fmadd_ps(sum, d, *acc);
            }
        }
        if K::FORM == Form::Q4 {
            let m = _mm512_cvtph_ps(_mm256_loadu_si256(block.add(32).cast()));
            for (t, acc) in acc.iter_mut().enumerate() {
                *acc = _mm512_fmadd_ps(m, _mm512_set1_ps(*sum_x.add(t)), *acc);
            }
        }
    }
}

/// A product of tile `$a` = rows at `$from` by tile `$b` in tile `$c`, after what was in that is stored at `$to`.
macro_rules! product {
    ($k:ty, $c:literal, $a:literal, $b:literal, $from:expr, $to:expr) => {{
        store!($c, $to, 64usize);
        load!($a, $from, <$k>::PART_BYTES);
        zero!($c);
        multiply!($c, $a, $b, <$k>::BYTES);
    }};
}

/// One step: `blocks` are where the tiles of its blocks are, `a` the rows for them; `to` is for the last step's sums,
/// `width` bytes a block.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn step<K: Kind, const T: usize>(
    blocks: [*const u8; 3],
    a: [*const u8; 3],
    to: *mut u8,
    width: usize,
) {
    let first = const { tile_rows(K::PARTS, T, 0) };
    let (up, rows) = (first * K::PART_BYTES, first * 64);
    // SAFETY: the caller's: tiles are configured for `T` rows, pointers are valid.
    unsafe {
        match const { tiles(K::PARTS, T) } {
            1 => {
                load!("6", blocks[0], 64usize);
                product!(K, "0", "4", "6", a[0], to);
                load!("7", blocks[1], 64usize);
                product!(K, "1", "5", "7", a[1], to.add(width));
                load!("6", blocks[2], 64usize);
                product!(K, "2", "4", "6", a[2], to.add(2 * width));
            }
            2 => {
                load!("6", blocks[0], 64usize);
                product!(K, "0", "4", "6", a[0], to);
                product!(K, "1", "5", "6", a[0].add(up), to.add(rows));
                load!("7", blocks[1], 64usize);
                product!(K, "2", "4", "7", a[1], to.add(width));
                product!(K, "3", "5", "7", a[1].add(up), to.add(width + rows));
            }
            _ => {
                let second = const { tile_rows(K::PARTS, T, 0) + tile_rows(K::PARTS, T, 1) };
                let (up2, rows2) = (second * K::PART_BYTES, second * 64);
                load!("6", blocks[0], 64usize);
                product!(K, "0", "3", "6", a[0], to);
                product!(K, "1", "4", "6", a[0].add(up), to.add(rows));
                product!(K, "2", "5", "6", a[0].add(up2), to.add(rows2));
            }
        }
    }
}

/// Stores the sums of the last step.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn flush<K: Kind, const T: usize>(to: *mut u8, width: usize) {
    let rows = const { tile_rows(K::PARTS, T, 0) * 64 };
    // SAFETY: the caller's: tiles are configured for `T` rows, there is room.
    unsafe {
        match const { tiles(K::PARTS, T) } {
            1 => {
                store!("0", to, 64usize);
                store!("1", to.add(width), 64usize);
                store!("2", to.add(2 * width), 64usize);
            }
            2 => {
                store!("0", to, 64usize);
                store!("1", to.add(rows), 64usize);
                store!("2", to.add(width), 64usize);
                store!("3", to.add(width + rows), 64usize);
            }
            _ => {
                let two = const { tile_rows(K::PARTS, T, 0) + tile_rows(K::PARTS, T, 1) };
                store!("0", to, 64usize);
                store!("1", to.add(rows), 64usize);
                store!("2", to.add(two * 64), 64usize);
            }
        }
    }
}

/// Blocks of a step.
const fn step_blocks(tiles: usize) -> usize {
    match tiles {
        1 => 3,
        2 => 2,
        _ => 1,
    }
}

/// Adds the products of a piece with `T` rows to its sums. `FUSED`: expands the weights on the way.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
pub(super) unsafe fn run<K: Kind, const T: usize, const FUSED: bool>(tables: &Tables, p: &Piece) {
    let n = const { step_blocks(tiles(K::PARTS, T)) };
    let width = const { T * K::PARTS * 64 };
    let block_bytes = K::FORM.block_bytes();
    let steps = p.blocks.div_ceil(n);
    // SAFETY: the caller's: everything that the piece points to has the sizes it says; blocks are clamped to its own.
    unsafe {
        let weights = p.ring.add(2 * 4 * 1024);
        let sums_of = |step: usize| p.ring.add(step % 2 * 4096);
        let expand_step = |step: usize| {
            for i in 0..n {
                let block = p.w.add((step * n + i).min(p.blocks - 1) * block_bytes);
                for line in 0..block_bytes.div_ceil(64) {
                    _mm_prefetch::<_MM_HINT_T1>(block.wrapping_add(AHEAD + line * 64).cast());
                }
                expand::<K>(
                    tables,
                    block,
                    weights.add(step % 2 * 4096 + i * K::EXPANDED),
                );
            }
        };
        let tile_of = |step: usize, i: usize| {
            let block = (step * n + i).min(p.blocks - 1);
            if K::AS_IS {
                p.w.add(block * block_bytes + K::NUMBERS)
            } else if FUSED {
                weights.add(step % 2 * 4096 + i * K::EXPANDED).cast_const()
            } else {
                p.expanded.add(block * K::EXPANDED)
            }
        };
        let mut acc = [_mm512_setzero_ps(); T];
        for (t, acc) in acc.iter_mut().enumerate() {
            *acc = _mm512_load_ps(p.acc.add(t * PANEL));
        }
        if FUSED && !K::AS_IS {
            expand_step(0);
        }
        for g in 0..steps + 2 {
            if FUSED && !K::AS_IS && g + 1 < steps {
                expand_step(g + 1);
            }
            if g < steps {
                let (mut blocks, mut a) = ([p.w; 3], [p.a; 3]);
                for i in 0..n {
                    blocks[i] = tile_of(g, i);
                    a[i] = p.a.add((g * n + i).min(p.blocks - 1) * p.a_step);
                }
                step::<K, T>(blocks, a, sums_of(g + 1), width);
            } else if g == steps {
                flush::<K, T>(sums_of(g + 1), width);
            }
            if g >= 2 {
                for i in 0..n.min(p.blocks - (g - 2) * n) {
                    let block = (g - 2) * n + i;
                    let cell = block * p.cells;
                    let sums = sums_of(g).add(i * width);
                    let w = p.w.add(block * block_bytes);
                    scale::<K, T>(&mut acc, w, sums, p.d.wrapping_add(cell), p.sum.add(cell));
                }
            }
        }
        for (t, acc) in acc.into_iter().enumerate() {
            _mm512_store_ps(p.acc.add(t * PANEL), acc);
        }
    }
}
