//! Products with bf16: tiles sum over all inputs, and the sums of a number's three parts are added at the end.
//!
//! Keeps true: a row's bits depend on nothing but the row and the matrix.
//! Doesn't know: threads, how panels and rows are cut.

use std::arch::x86_64::*;

use super::scaled::{AHEAD, tile_rows, tiles};
use super::tile::{Config, Tiles, load, multiply, store};
use super::{GROUP, MOST, NEAR, Product, SCRATCH, size_for};
use crate::weights::PANEL;
use crate::weights::memory::Zeroed;

/// Tile rows for one row of activations, and their bytes.
const PARTS: usize = 3;
const ROW_BYTES: usize = PARTS * 64;
/// Bytes of a block of a panel.
const BLOCK_BYTES: usize = 1024;
/// Bytes of the sums of a panel with 16 rows in three parts.
const SUMS: usize = 3 * 1024;

/// Two panels by up to 16 rows; pointers are at the first block.
#[derive(Clone, Copy)]
struct Pair {
    w: [*const u8; 2],
    blocks: usize,
    /// Parts of the rows, and bytes from block to block.
    a: *const u8,
    a_step: usize,
    /// `SUMS` bytes a panel: read, and written back.
    sums: *mut u8,
}

/// For each of a panel's (`$b`) row tiles: load it, multiply.
macro_rules! row_tiles {
    ($a:expr, $up:expr, $b:literal, $($c:literal $j:literal $row:literal),*) => {{
        $(
            load!($row, $a.add($j * $up), 64usize);
            multiply!($c, $row, $b, false);
        )*
    }};
}

/// Adds the products of two panels with `T` rows to their sums. Tiles 0 to 5 are sums, of 0, 1 and 2 the first panel's.
#[target_feature(enable = "avx512f")]
unsafe fn run<const T: usize>(p: &Pair) {
    let n = const { tiles(PARTS, T) };
    let up = const { tile_rows(PARTS, T, 0) * 64 };
    // SAFETY: the caller's: tiles are configured for `T` rows, and everything has the sizes that the pair says.
    unsafe {
        let (first, second) = (p.sums, p.sums.add(SUMS));
        load!("0", first, 64usize);
        load!("3", second, 64usize);
        if n > 1 {
            load!("1", first.add(up), 64usize);
            load!("4", second.add(up), 64usize);
        }
        if n > 2 {
            load!("2", first.add(2 * up), 64usize);
            load!("5", second.add(2 * up), 64usize);
        }
        for b in 0..p.blocks {
            let (a, at) = (p.a.add(b * p.a_step), b * BLOCK_BYTES);
            if T <= 5 {
                for w in p.w {
                    for line in 0..BLOCK_BYTES / 64 {
                        let ahead = w.wrapping_add(at + AHEAD + 64 * line);
                        _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                    }
                }
            }
            load!("7", p.w[0].add(at), 64usize);
            match n {
                1 => row_tiles!(a, up, "7", "0" 0 "6"),
                2 => row_tiles!(a, up, "7", "0" 0 "6", "1" 1 "6"),
                _ => row_tiles!(a, up, "7", "0" 0 "6", "1" 1 "6", "2" 2 "6"),
            }
            load!("7", p.w[1].add(at), 64usize);
            match n {
                1 => row_tiles!(a, up, "7", "3" 0 "6"),
                2 => row_tiles!(a, up, "7", "3" 0 "6", "4" 1 "6"),
                _ => row_tiles!(a, up, "7", "3" 0 "6", "4" 1 "6", "5" 2 "6"),
            }
        }
        store!("0", first, 64usize);
        store!("3", second, 64usize);
        if n > 1 {
            store!("1", first.add(up), 64usize);
            store!("4", second.add(up), 64usize);
        }
        if n > 2 {
            store!("2", first.add(2 * up), 64usize);
            store!("5", second.add(2 * up), 64usize);
        }
    }
}

/// The sums of row `t` of a panel.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn row(sums: *const u8, t: usize) -> __m512 {
    // SAFETY: the caller's: sums that `run` wrote.
    unsafe {
        let parts = sums.cast::<f32>().add(t * PARTS * PANEL);
        let two = _mm512_add_ps(_mm512_load_ps(parts), _mm512_load_ps(parts.add(PANEL)));
        _mm512_add_ps(two, _mm512_load_ps(parts.add(2 * PANEL)))
    }
}

fn config(rows: usize) -> Config {
    let mut shapes = [(tile_rows(PARTS, rows, 0), 64); 8];
    shapes[7] = (16, 64);
    Config::new(shapes)
}

/// The whole product.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn matmul(p: &Product<'_>) {
    let rows = p.rows.len();
    if rows == 0 || p.panels.is_empty() {
        return;
    }
    let last = rows - (rows - 1) / MOST * MOST;
    let (config_full, config_last) = (config(MOST), config(size_for(last)));
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < GROUP * SUMS {
            *scratch = Zeroed::new(GROUP * SUMS);
        }
        // SAFETY: the caller's; the scratch has room for the sums of a group.
        unsafe {
            let tiles = Tiles::take(&config_last);
            for first in p.panels.clone().step_by(GROUP) {
                let panels = GROUP.min(p.panels.end - first);
                if rows > MOST {
                    tiles.shape(&config_full);
                }
                for row in (0..rows).step_by(MOST) {
                    let left = (rows - row).min(MOST);
                    if left < MOST && row > 0 {
                        tiles.shape(&config_last);
                    }
                    let place = Place {
                        p,
                        first,
                        panels,
                        row,
                        rows: left,
                    };
                    by_size(&place, size_for(left), scratch.as_ptr());
                }
            }
        }
    });
}

/// A group of panels by up to `MOST` rows.
struct Place<'a> {
    p: &'a Product<'a>,
    first: usize,
    panels: usize,
    row: usize,
    rows: usize,
}

#[target_feature(enable = "avx512f")]
unsafe fn by_size(place: &Place<'_>, size: usize, sums: *mut u8) {
    macro_rules! sizes {
        ($($size:literal)*) => {
            match size {
                $($size => cell::<$size>(place, sums),)*
                _ => unreachable!("no kernel for {size} rows"),
            }
        };
    }
    // SAFETY: the caller's.
    unsafe { sizes!(1 2 3 4 5 6 8 10 12 16) }
}

#[target_feature(enable = "avx512f")]
unsafe fn cell<const T: usize>(place: &Place<'_>, sums: *mut u8) {
    let p = place.p;
    let (acts, blocks) = (p.acts, p.w.blocks());
    let chunk = (NEAR / (ROW_BYTES * T)).max(8);
    // SAFETY: the caller's: shapes fit, rows are prepared, `out` has room.
    unsafe {
        for i in 0..place.panels.next_multiple_of(2) {
            std::slice::from_raw_parts_mut(sums.add(i * SUMS), T * ROW_BYTES).fill(0);
        }
        for from in (0..blocks).step_by(chunk) {
            for i in (0..place.panels).step_by(2) {
                // An odd panel is its own neighbour, whose sums nobody reads.
                let w = [i, (i + 1).min(place.panels - 1)].map(|i| {
                    let panel = p.w.panel(place.first + i).as_ptr();
                    panel.add(from * BLOCK_BYTES)
                });
                let cell = from * acts.rows + p.rows.start + place.row;
                run::<T>(&Pair {
                    w,
                    blocks: chunk.min(blocks - from),
                    a: acts.parts.cast::<u8>().add(cell * ROW_BYTES),
                    a_step: acts.rows * ROW_BYTES,
                    sums: sums.add(i * SUMS),
                });
            }
        }
        for t in 0..place.rows {
            for i in 0..place.panels {
                let at = (place.row + t) * p.stride + (place.first - p.panels.start + i) * PANEL;
                let mut all = row(sums.add(i * SUMS), t);
                if p.add {
                    all = _mm512_add_ps(_mm512_loadu_ps(p.out.add(at)), all);
                }
                _mm512_storeu_ps(p.out.add(at), all);
            }
        }
    }
}
