//! Matmul of quantized weights on AMX: one tile product for each sub-block of inputs with a scale, whose sums are then
//! scaled in vectors in the order that `scalar` defines.
//!
//! With int8 activations tiles are bytes, whose sums are exact. Otherwise they are bf16: a weight's integer is one, an
//! activation is the sum of three (24 bits of mantissa in 3 x 8). Some panels and inputs of weights at a time are
//! converted to tiles, with their scales and minima after them, and stay in the L2 cache.
//!
//! A pipeline step is three sub-blocks: while their tiles run, the last step's results are stored, the ones before
//! scaled.
//!
//! Invariants: with int8 the bits of every other instruction set; else a row's bits depend on row and matrix alone.

use std::arch::x86_64::*;
use std::ops::Range;

use super::expand::{to_bf16, to_bytes};
use super::tile::{Config, EXPANDED, GROUP, NEAR, SCRATCH, Tiles, load, multiply, store, zero};
use crate::kernels::Product;
use crate::kernels::avx512::{min, scale};
use crate::kernels::place::{Place, layout};
use crate::kernels::scalar::{input_sums, offsets};
use crate::memory::Zeroed;
use crate::panels::{BLOCK, PANEL};

/// Maximum rows of a tile: their accumulators stay in registers.
const TALL: usize = 16;
/// Rows that share one conversion of weights to tiles.
const ROWS: usize = 512;
/// Sub-blocks of a pipeline step.
const STEP: usize = 3;
/// Bytes of the accumulators of a tile; the constants below: of a group of panels, and of two steps' tiles.
const SUMS: usize = TALL * PANEL * 4;
const ALL_SUMS: usize = GROUP * ROWS / TALL * SUMS;
const RING: usize = 2 * STEP * SUMS;
/// Number of bf16 whose sum is an activation.
const PARTS: usize = 3;

/// Returns the bytes of one activation or weight in tiles: 1 for int8, 2 for bf16.
const fn width(bytes: bool) -> usize {
    if bytes { 1 } else { 2 }
}

/// Returns the bytes of a block's tiles; `block_bytes` adds scales and minima: [share][tile], [share][16], [share][16].
const fn tile_bytes(bytes: bool) -> usize {
    BLOCK * PANEL * width(bytes)
}

const fn block_bytes(kind: u8, bytes: bool) -> usize {
    let layout = layout(kind);
    tile_bytes(bytes) + layout.subs * PANEL * 4 * if layout.min { 2 } else { 1 }
}

/// Returns the bytes of one row's activations of a block.
const fn row_bytes(bytes: bool) -> usize {
    if bytes { BLOCK } else { PARTS * BLOCK * 2 }
}

/// Computes the whole matmul. `LIKE` is `like(KIND)`: kinds with alike tiles share the code after the conversion.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn matmul<const KIND: u8, const LIKE: u8, const BYTES: bool>(p: &Product<'_>) {
    let block = const { block_bytes(KIND, BYTES) };
    let chunk = EXPANDED / GROUP / block;
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < ALL_SUMS + RING + EXPANDED {
            *scratch = Zeroed::new(ALL_SUMS + RING + EXPANDED);
        }
        // SAFETY: upheld by the caller; the scratch has room for the sums and the blocks of a group.
        unsafe {
            let tiles = scratch.as_ptr().add(ALL_SUMS + RING);
            for first in p.rows.clone().step_by(ROWS) {
                let rows = first..(first + ROWS).min(p.rows.end);
                for first in p.panels.clone().step_by(GROUP) {
                    let group = Group {
                        p,
                        panels: first..(first + GROUP).min(p.panels.end),
                        rows: rows.clone(),
                        sums: scratch.as_ptr().cast(),
                        ring: scratch.as_ptr().add(ALL_SUMS),
                        tiles,
                    };
                    let sums = group.panels.len() * rows.len().next_multiple_of(TALL) * PANEL;
                    std::slice::from_raw_parts_mut(group.sums, sums).fill(0.0);
                    for from in (0..p.w.blocks()).step_by(chunk) {
                        let blocks = from..(from + chunk).min(p.w.blocks());
                        for (i, panel) in group.panels.clone().enumerate() {
                            let panel = p.w.panel(panel).as_ptr();
                            let to = tiles.add(i * blocks.len() * block);
                            for (j, b) in blocks.clone().enumerate() {
                                expand::<KIND, BYTES>(Place::of::<KIND>(panel, b), to.add(j * block));
                            }
                        }
                        group.multiply::<LIKE, BYTES>(blocks);
                    }
                    group.put();
                }
            }
        }
    });
}

/// Writes a block as tiles, followed by its scales and minima.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
unsafe fn expand<const KIND: u8, const BYTES: bool>(block: Place, to: *mut u8) {
    let layout = const { layout(KIND) };
    // SAFETY: the caller guarantees a block of that kind, `block_bytes` aligned bytes at `to`.
    unsafe {
        if BYTES {
            to_bytes::<KIND>(block.codes, to);
        } else {
            to_bf16::<KIND, 1, false>(block, to);
        }
        let scales: *mut f32 = to.add(tile_bytes(BYTES)).cast();
        for sub in 0..layout.subs {
            _mm512_store_ps(scales.add(sub * PANEL), scale::<KIND>(block, sub));
            if layout.min {
                _mm512_store_ps(scales.add((layout.subs + sub) * PANEL), min::<KIND>(block, sub));
            }
        }
    }
}

/// Work of one pass: a group of panels, expanded to tiles, times some rows of activations.
struct Group<'a> {
    p: &'a Product<'a>,
    panels: Range<usize>,
    rows: Range<usize>,
    /// Accumulators: [tile of rows][panel][row][16].
    sums: *mut f32,
    ring: *mut u8,
    /// Weights as `expand` writes them: [panel][block].
    tiles: *const u8,
}

impl Group<'_> {
    /// Adds the products of `blocks`, whose tiles `self.tiles` holds, to the sums.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<const LIKE: u8, const BYTES: bool>(&self, blocks: Range<usize>) {
        let near = const { NEAR / (TALL * row_bytes(BYTES)) };
        let block = const { block_bytes(LIKE, BYTES) };
        // SAFETY: the caller guarantees shapes fit, rows are prepared.
        unsafe {
            let tiles = Tiles::configure(&config::<LIKE, BYTES>(self.rows.len().min(TALL)));
            for (i, row) in self.rows.clone().step_by(TALL).enumerate() {
                let rows = TALL.min(self.rows.end - row);
                if i > 0 && rows < TALL {
                    tiles.reconfigure(&config::<LIKE, BYTES>(rows));
                }
                for from in blocks.clone().step_by(near) {
                    for panel in 0..self.panels.len() {
                        let piece = Piece {
                            p: self.p,
                            tiles: self.tiles.add((panel * blocks.len() + from - blocks.start) * block),
                            blocks: from..(from + near).min(blocks.end),
                            row,
                            sums: self.sums.add((i * self.panels.len() + panel) * TALL * PANEL),
                            ring: self.ring,
                        };
                        match rows {
                            ..=4 => piece.run::<LIKE, BYTES, 4>(),
                            5..=8 => piece.run::<LIKE, BYTES, 8>(),
                            9..=12 => piece.run::<LIKE, BYTES, 12>(),
                            _ => piece.run::<LIKE, BYTES, 16>(),
                        }
                    }
                }
            }
        }
    }

    /// Writes the sums to the output, or adds them if `add` is set.
    #[target_feature(enable = "avx512f")]
    unsafe fn put(&self) {
        let p = self.p;
        for (t, row) in self.rows.clone().enumerate() {
            for (i, panel) in self.panels.clone().enumerate() {
                let at = (row - p.rows.start) * p.stride + (panel - p.panels.start) * PANEL;
                // SAFETY: the caller guarantees `out` has room.
                unsafe {
                    let from = ((t / TALL * self.panels.len() + i) * TALL + t % TALL) * PANEL;
                    let mut sums = _mm512_load_ps(self.sums.add(from));
                    if p.add {
                        sums = _mm512_add_ps(_mm512_loadu_ps(p.out.add(at)), sums);
                    }
                    _mm512_storeu_ps(p.out.add(at), sums);
                }
            }
        }
    }
}

/// Returns the tile shapes: tiles 0 to 2 are accumulators, 3 and 4 rows, 5 to 7 weights.
fn config<const LIKE: u8, const BYTES: bool>(rows: usize) -> Config {
    let share = const { BLOCK / layout(LIKE).subs * width(BYTES) };
    let (sums, row, weights) = ((rows, 64), (rows, share), (share / 4, 64));
    Config::new([sums, sums, sums, row, row, weights, weights, weights])
}

/// Work of one tile: a panel times at most `TALL` rows of activations.
struct Piece<'a> {
    p: &'a Product<'a>,
    /// Tiles of the first block.
    tiles: *const u8,
    blocks: Range<usize>,
    row: usize,
    /// Accumulators, 16 for each row, read and written back.
    sums: *mut f32,
    ring: *mut u8,
}

impl Piece<'_> {
    /// Adds the products of the panel with `T` rows to their sums.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn run<const LIKE: u8, const BYTES: bool, const T: usize>(&self) {
        let layout = const { layout(LIKE) };
        let (subs, acts) = (layout.subs, &self.p.acts);
        let shares = self.blocks.len() * subs;
        let steps = shares.div_ceil(STEP);
        let start = self.blocks.start * acts.rows + self.row;
        // Bytes from block to block, of weights and of rows.
        let (block, next) = (const { block_bytes(LIKE, BYTES) }, acts.rows * row_bytes(BYTES));
        let row_stride = const { row_bytes(BYTES) };
        // SAFETY: the caller guarantees the panel's tiles and the rows; shares are clamped to the piece's.
        unsafe {
            let rows: *const u8 = if BYTES { acts.q.cast() } else { acts.parts.cast() };
            let rows = rows.add(start * row_bytes(BYTES));
            let rings = [self.ring, self.ring.add(RING / 2)];
            let mut acc = [_mm512_setzero_ps(); T];
            for (t, acc) in acc.iter_mut().enumerate() {
                *acc = _mm512_load_ps(self.sums.add(t * PANEL));
            }
            for g in 0..steps + 2 {
                let (mut weights, mut from) = ([self.tiles; STEP], [rows; STEP]);
                for i in 0..STEP {
                    let share = (g * STEP + i).min(shares - 1);
                    let (b, sub) = (share / subs, share % subs);
                    weights[i] = self.tiles.add(b * block + sub * (tile_bytes(BYTES) / subs));
                    from[i] = rows.add(b * next + sub * (BLOCK / subs * width(BYTES)));
                }
                // Stores the previous step's results and scales those before them, interleaved with
                // tile products, because the processor's reordering window is limited.
                let (now, to) = (g < steps, rings[(g + 1) % 2]);
                macro_rules! begin {
                    ($i:literal, $sums:literal, $weights:literal) => {
                        if (1..=steps).contains(&g) {
                            store!($sums, to.add($i * SUMS), 64usize);
                        }
                        if now {
                            zero!($sums);
                            load!($weights, weights[$i], 64usize);
                        }
                    };
                }
                macro_rules! add {
                    ($i:literal, $sums:literal, $rows:literal, $weights:literal, $part:literal) => {
                        if now {
                            load!($rows, from[$i].add($part * BLOCK * 2), row_stride);
                            multiply!($sums, $rows, $weights, BYTES);
                        }
                    };
                }
                macro_rules! scale {
                    ($i:literal) => {
                        if g >= 2 && (g - 2) * STEP + $i < shares {
                            let share = (g - 2) * STEP + $i;
                            let (b, sub) = (share / subs, share % subs);
                            let scales = self.tiles.add(b * block + tile_bytes(BYTES)).cast();
                            let sums = rings[g % 2].add($i * SUMS).cast();
                            self.scale::<LIKE, BYTES, T>(&mut acc, (self.blocks.start + b, sub), scales, sums);
                        }
                    };
                }
                if BYTES {
                    begin!(0, "0", "5");
                    add!(0, "0", "3", "5", 0);
                    scale!(0);
                    begin!(1, "1", "6");
                    add!(1, "1", "4", "6", 0);
                    scale!(1);
                    begin!(2, "2", "7");
                    add!(2, "2", "3", "7", 0);
                    scale!(2);
                } else {
                    // From the smallest part to the largest; three sums alternate to break the dependency chain.
                    begin!(0, "0", "5");
                    add!(0, "0", "3", "5", 2);
                    begin!(1, "1", "6");
                    add!(1, "1", "4", "6", 2);
                    begin!(2, "2", "7");
                    add!(2, "2", "3", "7", 2);
                    scale!(0);
                    add!(0, "0", "4", "5", 1);
                    add!(1, "1", "3", "6", 1);
                    add!(2, "2", "4", "7", 1);
                    scale!(1);
                    add!(0, "0", "3", "5", 0);
                    add!(1, "1", "4", "6", 0);
                    add!(2, "2", "3", "7", 0);
                    scale!(2);
                }
            }
            for (t, acc) in acc.into_iter().enumerate() {
                _mm512_store_ps(self.sums.add(t * PANEL), acc);
            }
        }
    }

    /// Scales the sums of sub-block `sub` of block `b`, which are at `sums`, and adds them to `acc`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn scale<const LIKE: u8, const BYTES: bool, const T: usize>(
        &self,
        acc: &mut [__m512; T],
        (b, sub): (usize, usize),
        scales: *const f32,
        sums: *const f32,
    ) {
        let layout = const { layout(LIKE) };
        let acts = &self.p.acts;
        // SAFETY: the caller guarantees a block's scales, a tile's sums, and the rows' elements for that block.
        unsafe {
            let d = _mm512_load_ps(scales.add(sub * PANEL));
            let dx = acts.d.wrapping_add(b * acts.rows + self.row);
            for (t, acc) in acc.iter_mut().enumerate() {
                let sum = sums.add(t * PANEL);
                *acc = if BYTES {
                    let sum = _mm512_cvtepi32_ps(_mm512_load_si512(sum.cast()));
                    _mm512_fmadd_ps(sum, _mm512_mul_ps(d, _mm512_set1_ps(*dx.add(t))), *acc)
                } else {
                    _mm512_fmadd_ps(_mm512_load_ps(sum), d, *acc)
                };
            }
            if layout.min {
                let m = _mm512_load_ps(scales.add((layout.subs + sub) * PANEL));
                let mut room = [0.0; PANEL];
                let totals = match (BYTES, layout.subs) {
                    (false, subs) => input_sums(acts, subs, b, sub, self.row),
                    (true, 1) => acts.ds.add(b * acts.rows + self.row),
                    (true, subs) => {
                        // `scaled_sum` for all rows: the sums divide by -128 exactly.
                        let offsets = _mm512_loadu_si512(offsets(acts, subs, b, sub, self.row).cast());
                        let sums = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_srai_epi32::<7>(offsets));
                        let totals = _mm512_mul_ps(_mm512_loadu_ps(dx), _mm512_cvtepi32_ps(sums));
                        _mm512_storeu_ps(room.as_mut_ptr(), totals);
                        room.as_ptr()
                    }
                };
                for (t, acc) in acc.iter_mut().enumerate() {
                    *acc = _mm512_fmadd_ps(m, _mm512_set1_ps(*totals.add(t)), *acc);
                }
            }
        }
    }
}
