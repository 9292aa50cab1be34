//! Matmul on AMX tiles of bf16 whose sums run over all inputs.
//!
//! An f32, activation or weight, is the sum of three bf16 (24 bits of mantissa in 3 x 8). Of the nine products of their
//! parts the six largest are computed, all into the same accumulators; the rest is below the last bit of f32. Weights
//! in bf16 have one part, those in f16 two; quantized ones are multiplied in `shares`. With `Mode::Bf16` both sides are
//! rounded to one part. Some panels of weights at a time are converted to tiles in the L2 cache.
//!
//! Invariants: a row's bits depend on nothing but the row and the matrix.

use std::arch::x86_64::*;

pub(super) use super::expand::parts_of;
use super::expand::{TILE, to_bf16};
use super::tile::{Config, EXPANDED, GROUP, NEAR, SCRATCH, Tiles, load, multiply, store, zero};
use crate::Kind;
use crate::kernels::Product;
use crate::kernels::avx512::BF16;
use crate::kernels::place::{self, by_kind};
use crate::memory::Zeroed;
use crate::panels::PANEL;

/// Rows of a tile; a matmul uses two tiles of rows.
const TALL: usize = 16;
const MOST: usize = 2 * TALL;
/// Bytes of the accumulators of a panel with `MOST` rows.
const SUMS: usize = MOST * PANEL * 4;

/// Computes the matmul with `Mode::Bf16`: one bf16 part on both sides.
pub(super) unsafe fn rounded(p: &Product<'_>) {
    // SAFETY: upheld by the caller; the table is only for CPUs with tiles.
    unsafe { by_kind!(p.w.kind(), KIND, product::<KIND, 1, 1>(p), product::<KIND, 1, 1>(p)) }
}

/// Computes the matmul of unquantized weights (`W` bf16 parts) with full f32 activations (3 parts).
pub(super) unsafe fn exact<const KIND: u8, const W: usize>(p: &Product<'_>) {
    // SAFETY: as above.
    unsafe { product::<KIND, 3, W>(p) }
}

/// Computes the matmul with `A` bf16 parts per activation and `W` per weight.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
unsafe fn product<const KIND: u8, const A: usize, const W: usize>(p: &Product<'_>) {
    let rows = p.rows.len();
    if rows == 0 || p.panels.is_empty() {
        return;
    }
    let panel_bytes = p.w.blocks() * W * TILE;
    let group = (EXPANDED / panel_bytes).clamp(2, GROUP) & !1;
    let own = if KIND == BF16 { 0 } else { group * panel_bytes };
    let last = rows - (rows - 1) / MOST * MOST;
    let (config_full, config_last) = (config(MOST), config(last));
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < (GROUP + 2) * SUMS + own {
            *scratch = Zeroed::new((GROUP + 2) * SUMS + own);
        }
        // SAFETY: upheld by the caller; the scratch has room for the sums and tiles of a group.
        unsafe {
            let tiles_at = scratch.as_ptr().add((GROUP + 2) * SUMS);
            let tiles = Tiles::configure(&config_last);
            for first in p.panels.clone().step_by(group) {
                let panels = group.min(p.panels.end - first);
                if KIND != BF16 {
                    for i in 0..panels {
                        let from = p.w.panel(first + i).as_ptr();
                        for b in 0..p.w.blocks() {
                            let at = (i * p.w.blocks() + b) * W * TILE;
                            to_bf16::<KIND, W, true>(place::Place::of::<KIND>(from, b), tiles_at.add(at));
                        }
                    }
                }
                let mut place = Place {
                    p,
                    weights: if KIND == BF16 {
                        p.w.panel(first).as_ptr()
                    } else {
                        tiles_at
                    },
                    first,
                    panels,
                    row: 0,
                    rows: 0,
                    sums: scratch.as_ptr(),
                };
                tiles.reconfigure(&config_full);
                for row in (0..rows).step_by(MOST) {
                    (place.row, place.rows) = (row, (rows - row).min(MOST));
                    if place.rows < MOST {
                        tiles.reconfigure(&config_last);
                    }
                    if place.rows > TALL {
                        cell::<A, W, 2>(&place);
                    } else {
                        cell::<A, W, 1>(&place);
                    }
                }
            }
        }
    });
}

/// Returns the tile shapes: tiles 0 and 1 accumulate the first panel, 2 and 3 the second; 4, 5 hold rows, 6, 7 weights.
fn config(rows: usize) -> Config {
    let (first, second) = (rows.min(TALL), rows.saturating_sub(TALL).max(1));
    let mut shapes = [(TALL, 64); 8];
    for i in [0, 2, 4] {
        shapes[i].0 = first;
        shapes[i + 1].0 = second;
    }
    Config::new(shapes)
}

/// Work of one pass: a group of panels, converted to tiles panel after panel, times up to `MOST` rows of activations.
struct Place<'a> {
    p: &'a Product<'a>,
    weights: *const u8,
    first: usize,
    panels: usize,
    row: usize,
    rows: usize,
    sums: *mut u8,
}

/// Multiplies a group of panels by `N` tiles of rows and writes the output.
#[target_feature(enable = "avx512f")]
unsafe fn cell<const A: usize, const W: usize, const N: usize>(place: &Place<'_>) {
    let p = place.p;
    let (acts, blocks) = (p.acts, p.w.blocks());
    let row_bytes = const { A * 64 };
    let chunk = const { NEAR / (A * 64 * MOST) };
    // SAFETY: the caller guarantees shapes fit, rows are prepared, `out` has room.
    unsafe {
        std::slice::from_raw_parts_mut(place.sums, place.panels.next_multiple_of(2) * SUMS).fill(0);
        for from in (0..blocks).step_by(chunk) {
            let at = from * acts.rows + p.rows.start + place.row;
            for i in (0..place.panels).step_by(2) {
                // A last odd panel is paired with itself; the second sums are not read.
                let w = [i, (i + 1).min(place.panels - 1)].map(|i| place.weights.add((i * blocks + from) * W * TILE));
                run::<A, W, N>(&Pair {
                    w,
                    blocks: chunk.min(blocks - from),
                    a: acts.parts.cast::<u8>().add(at * row_bytes),
                    a_step: acts.rows * row_bytes,
                    sums: place.sums.add(i * SUMS),
                    chunk: place.sums.add(GROUP * SUMS),
                });
            }
        }
        for t in 0..place.rows {
            for i in 0..place.panels {
                let at = (place.row + t) * p.stride + (place.first - p.panels.start + i) * PANEL;
                let mut all = _mm512_load_ps(place.sums.add(i * SUMS + t * 64).cast());
                if p.add {
                    all = _mm512_add_ps(_mm512_loadu_ps(p.out.add(at)), all);
                }
                _mm512_storeu_ps(p.out.add(at), all);
            }
        }
    }
}

/// Work of one set of tiles: two panels times up to `MOST` rows of activations. Pointers are at the first block.
struct Pair {
    w: [*const u8; 2],
    blocks: usize,
    /// bf16 parts of the rows; `a_step` bytes from block to block.
    a: *const u8,
    a_step: usize,
    /// Accumulators, `SUMS` bytes a panel, read and written back; `chunk` has the same size for one chunk's sums.
    sums: *mut u8,
    chunk: *mut u8,
}

/// Adds the products of two panels with `N` tiles of rows to their sums. Tiles accumulate one chunk of blocks at a
/// time: long sums of small values lose less precision in chunks.
#[target_feature(enable = "avx512f")]
unsafe fn run<const A: usize, const W: usize, const N: usize>(p: &Pair) {
    // SAFETY: the caller guarantees tiles are configured for the rows, and everything has the sizes that the pair says.
    unsafe {
        zero!("0");
        zero!("2");
        if N > 1 {
            zero!("1");
            zero!("3");
        }
        for b in 0..p.blocks {
            let a = p.a.add(b * p.a_step);
            for part in 0..W {
                let at = (b * W + part) * TILE;
                load!("6", p.w[0].add(at), 64usize);
                load!("7", p.w[1].add(at), 64usize);
                // Products whose part indices add up to more than 2 are below the precision of f32.
                for other in 0..const { A }.min(3 - part) {
                    let rows = a.add(64 * other);
                    load!("4", rows, const { A * 64 });
                    multiply!("0", "4", "6", false);
                    multiply!("2", "4", "7", false);
                    if N > 1 {
                        load!("5", rows.add(A * 64 * TALL), const { A * 64 });
                        multiply!("1", "5", "6", false);
                        multiply!("3", "5", "7", false);
                    }
                }
            }
        }
        let second = p.chunk.add(SUMS);
        store!("0", p.chunk, 64usize);
        store!("2", second, 64usize);
        if N > 1 {
            store!("1", p.chunk.add(SUMS / 2), 64usize);
            store!("3", second.add(SUMS / 2), 64usize);
        }
        for panel in 0..2 {
            for t in 0..TALL * N {
                let at = panel * SUMS + t * 64;
                let sums = p.sums.add(at).cast::<f32>();
                let more = _mm512_load_ps(p.chunk.add(at).cast());
                _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), more));
            }
        }
    }
}
