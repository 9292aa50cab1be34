//! Products of bytes: a tile product for each block of 32 inputs, whose sums are exact and then scaled in vectors, as
//! `scalar` scales them.
//!
//! A step is three blocks: while their tiles are computed, those of the step before are stored and those of the one
//! before that are scaled.
//!
//! Invariants: the bits of every other instruction set.

use std::arch::x86_64::*;
use std::ops::Range;

use super::expand::q4_to_bytes;
use super::tile::{Config, EXPANDED, GROUP, NEAR, SCRATCH, Tiles, load, multiply, store, zero};
use crate::files::Kind;
use crate::kernels::Product;
use crate::weights::PANEL;
use crate::weights::memory::Zeroed;

/// Most rows at once: their sums stay in registers.
const MOST: usize = 16;
/// Bytes of a tile of weights, and of a row's part of a block.
const TILE: usize = 512;
const ROW: usize = 32;
/// Blocks of a step.
const STEP: usize = 3;
/// Bytes of the sums of a group, and of two steps' tiles.
const SUMS: usize = GROUP * MOST * PANEL * 4;
const RING: usize = 2 * STEP * MOST * PANEL * 4;

/// The whole product. `Q4`: of 4-bit weights, or else of 8-bit ones, whose blocks are tiles as they lie.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
pub(super) unsafe fn matmul<const Q4: bool>(p: &Product<'_>) {
    let rows = p.rows.len();
    if rows == 0 || p.panels.is_empty() {
        return;
    }
    let panel_bytes = p.w.blocks() * TILE;
    let group = (EXPANDED / panel_bytes).clamp(1, GROUP);
    let need = SUMS + RING + if Q4 { group * panel_bytes } else { 0 };
    let last = rows - (rows - 1) / MOST * MOST;
    let (config_full, config_last) = (config(MOST), config(last));
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < need {
            *scratch = Zeroed::new(need);
        }
        // SAFETY: the caller's, and the scratch is as large as needed.
        unsafe {
            let ring = scratch.as_ptr().add(SUMS);
            let expanded = ring.add(RING);
            let tiles = Tiles::take(&config_last);
            for first in p.panels.clone().step_by(group) {
                let panels = first..(first + group).min(p.panels.end);
                if Q4 {
                    for block in 0..panels.len() * p.w.blocks() {
                        let from = p.w.panel(first).as_ptr();
                        q4_to_bytes(
                            from.add(block * block_bytes::<Q4>() + header::<Q4>()),
                            expanded.add(block * TILE),
                        );
                    }
                }
                tiles.shape(&config_full);
                for row in (0..rows).step_by(MOST) {
                    let left = (rows - row).min(MOST);
                    if left < MOST {
                        tiles.shape(&config_last);
                    }
                    let place = Place {
                        p,
                        panels: panels.clone(),
                        row,
                        rows: left,
                        sums: scratch.as_ptr().cast(),
                        ring,
                        expanded,
                    };
                    match left {
                        ..=4 => cell::<Q4, 4>(&place),
                        5..=8 => cell::<Q4, 8>(&place),
                        9..=12 => cell::<Q4, 12>(&place),
                        _ => cell::<Q4, 16>(&place),
                    }
                }
            }
        }
    });
}

const fn block_bytes<const Q4: bool>() -> usize {
    if Q4 {
        Kind::Q4_1.layout().unit_bytes()
    } else {
        Kind::Q8_0.layout().unit_bytes()
    }
}

/// Where in a block its numbers are.
const fn header<const Q4: bool>() -> usize {
    if Q4 { 64 } else { 32 }
}

/// Tiles 0 to 2 are sums, 4 and 5 rows, 6 and 7 weights.
fn config(rows: usize) -> Config {
    let (sums, weights) = ((rows, 64), (TILE / 64, 64));
    Config::new([sums, sums, sums, sums, (rows, ROW), (rows, ROW), weights, weights])
}

/// A group of panels by up to `MOST` rows.
struct Place<'a> {
    p: &'a Product<'a>,
    panels: Range<usize>,
    row: usize,
    rows: usize,
    sums: *mut f32,
    ring: *mut u8,
    expanded: *const u8,
}

/// `T`: rows to scale, at least as many as there are.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn cell<const Q4: bool, const T: usize>(place: &Place<'_>) {
    let p = place.p;
    let (acts, blocks) = (p.acts, p.w.blocks());
    let chunk = const { NEAR / (ROW * MOST) };
    // SAFETY: the caller's: shapes fit, rows are prepared, `out` has room.
    unsafe {
        std::slice::from_raw_parts_mut(place.sums, place.panels.len() * MOST * PANEL).fill(0.0);
        for from in (0..blocks).step_by(chunk) {
            let at = from * acts.rows + p.rows.start + place.row;
            for (i, panel) in place.panels.clone().enumerate() {
                let w = p.w.panel(panel).as_ptr().add(from * block_bytes::<Q4>());
                run::<Q4, T>(&Piece {
                    w,
                    tiles: if Q4 {
                        place.expanded.add((i * blocks + from) * TILE)
                    } else {
                        w.add(header::<Q4>())
                    },
                    blocks: chunk.min(blocks - from),
                    q: acts.q.cast::<u8>().add(at * ROW),
                    d: acts.d.add(at),
                    ds: acts.ds.add(at),
                    cells: acts.rows,
                    sums: place.sums.add(i * MOST * PANEL),
                    ring: place.ring,
                });
            }
        }
        for t in 0..place.rows {
            for i in 0..place.panels.len() {
                let at = (place.row + t) * p.stride + (place.panels.start - p.panels.start + i) * PANEL;
                let mut sums = _mm512_load_ps(place.sums.add((i * MOST + t) * PANEL));
                if p.add {
                    sums = _mm512_add_ps(_mm512_loadu_ps(p.out.add(at)), sums);
                }
                _mm512_storeu_ps(p.out.add(at), sums);
            }
        }
    }
}

/// One panel by at most `MOST` rows; pointers are at the first block.
struct Piece {
    /// Blocks of the panel as they lie, and their tiles.
    w: *const u8,
    tiles: *const u8,
    blocks: usize,
    /// Bytes, scales, and scales times sums of the rows; from block to block it is `cells` of them.
    q: *const u8,
    d: *const f32,
    ds: *const f32,
    cells: usize,
    /// 16 sums of each row: read, and written back.
    sums: *mut f32,
    ring: *mut u8,
}

/// Adds the products of a piece with `T` rows to its sums.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn run<const Q4: bool, const T: usize>(p: &Piece) {
    let steps = p.blocks.div_ceil(STEP);
    let tile_step = if Q4 { TILE } else { block_bytes::<Q4>() };
    // SAFETY: the caller's: everything that the piece points to has the sizes it says; blocks are clamped to its own.
    unsafe {
        let ring_of = |step: usize| p.ring.add(step % 2 * (RING / 2));
        let mut acc = [_mm512_setzero_ps(); T];
        for (t, acc) in acc.iter_mut().enumerate() {
            *acc = _mm512_load_ps(p.sums.add(t * PANEL));
        }
        for g in 0..steps + 2 {
            // What was computed in the step before is stored, then what is to be read in the next.
            let to = ring_of(g + 1);
            if g < steps {
                let block = |i: usize| (g * STEP + i).min(p.blocks - 1);
                let tile = |i: usize| p.tiles.add(block(i) * tile_step);
                let rows = |i: usize| p.q.add(block(i) * p.cells * ROW);
                load!("6", tile(0), 64usize);
                product!("0", "4", "6", rows(0), to);
                load!("7", tile(1), 64usize);
                product!("1", "5", "7", rows(1), to.add(1024));
                load!("6", tile(2), 64usize);
                product!("2", "4", "6", rows(2), to.add(2048));
            } else if g == steps {
                store!("0", to, 64usize);
                store!("1", to.add(1024), 64usize);
                store!("2", to.add(2048), 64usize);
            }
            if g >= 2 {
                for i in 0..STEP.min(p.blocks - (g - 2) * STEP) {
                    let block = (g - 2) * STEP + i;
                    scale::<Q4, T>(
                        &mut acc,
                        p.w.add(block * block_bytes::<Q4>()),
                        ring_of(g).add(i * 1024),
                        p.d.add(block * p.cells),
                        p.ds.add(block * p.cells),
                    );
                }
            }
        }
        for (t, acc) in acc.into_iter().enumerate() {
            _mm512_store_ps(p.sums.add(t * PANEL), acc);
        }
    }
}

/// A product of tile `$a` = rows at `$from` by tile `$b` in tile `$c`, after what was in that is stored at `$to`.
macro_rules! product {
    ($c:literal, $a:literal, $b:literal, $from:expr, $to:expr) => {{
        store!($c, $to, 64usize);
        load!($a, $from, ROW);
        zero!($c);
        multiply!($c, $a, $b, true);
    }};
}
use product;

/// Adds the scaled sums of a block, which are at `sums`, to `acc`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn scale<const Q4: bool, const T: usize>(
    acc: &mut [__m512; T],
    block: *const u8,
    sums: *const u8,
    d_x: *const f32,
    ds_x: *const f32,
) {
    // SAFETY: the caller's: a block, its sums, and the rows' numbers for that block.
    unsafe {
        let d = _mm512_cvtph_ps(_mm256_loadu_si256(block.cast()));
        for (t, acc) in acc.iter_mut().enumerate() {
            let sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums.add(64 * t).cast()));
            let by = _mm512_mul_ps(d, _mm512_set1_ps(*d_x.add(t)));
            *acc = _mm512_fmadd_ps(sum, by, *acc);
        }
        if Q4 {
            let m = _mm512_cvtph_ps(_mm256_loadu_si256(block.add(32).cast()));
            for (t, acc) in acc.iter_mut().enumerate() {
                *acc = _mm512_fmadd_ps(m, _mm512_set1_ps(*ds_x.add(t)), *acc);
            }
        }
    }
}
