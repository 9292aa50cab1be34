//! Products on AMX tiles; everything else as AVX-512 does it.
//!
//! int8: the same bits as everywhere. Exact products with Q4, Q8 and bf16 have an order of sums of their own
//! (see `scaled` and `plain`), and it is the same for every number of rows: a row's bits depend on the row alone, but
//! not those of other instruction sets.
//!
//! Keeps true: no tile outlives a product; activations of f32 lose nothing on their way into bf16.
//! Doesn't know: threads.

mod expand;
mod plain;
mod scaled;
mod tile;

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use super::{ActsPtr, Product, Table, avx512};
use crate::weights::memory::Zeroed;
use crate::weights::{BLOCK, Form, PANEL};
use expand::Tables;
use scaled::{ExactQ4, ExactQ8, Int8Q4, Int8Q8, Kind, MOST, Piece, RING, run};
use tile::{Config, Tiles};

pub(super) use tile::missing;

pub(super) static TABLE: Table = Table {
    prepare,
    matmul,
    rms_norm: avx512::TABLE.rms_norm,
    silu_mul: avx512::TABLE.silu_mul,
    add: avx512::TABLE.add,
    rotate: avx512::TABLE.rotate,
    argmax: avx512::TABLE.argmax,
    finite: avx512::TABLE.finite,
};

/// For rows that decode.
pub(super) static DECODING: Table = Table {
    prepare,
    matmul: matmul_decoding,
    rms_norm: avx512::TABLE.rms_norm,
    silu_mul: avx512::TABLE.silu_mul,
    add: avx512::TABLE.add,
    rotate: avx512::TABLE.rotate,
    argmax: avx512::TABLE.argmax,
    finite: avx512::TABLE.finite,
};

/// Rows from which on tiles of bytes are faster than vectors (the bits are the same).
const INT8_ROWS: usize = 16;
/// Panels whose sums are kept at once.
const GROUP: usize = 8;
/// Bytes of expanded weights at once: they stay in the second level of the cache.
const EXPANDED: usize = 512 << 10;
/// Bytes of activations that many panels use one after the other: they stay in the first level.
const NEAR: usize = 24 << 10;

unsafe fn prepare(x: *const f32, acts: ActsPtr, row: usize) {
    // SAFETY: the caller's; the CPU has AVX-512.
    unsafe {
        (avx512::TABLE.prepare)(x, acts, row);
        if acts.mode.has_f32() {
            split(acts, row);
        }
    }
}

/// Writes a prepared row as sums of three: what the upper halves of f32 hold of the number, of the rest, of its rest.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn split(acts: ActsPtr, row: usize) {
    let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    for b in 0..acts.blocks() {
        let cell = b * acts.rows + row;
        for half in 0..2 {
            // SAFETY: the caller's: the row is prepared, and its own.
            unsafe {
                let mut rest = _mm512_loadu_ps(acts.x.add(cell * BLOCK + 16 * half));
                for part in 0..3 {
                    let bits = _mm512_and_si512(_mm512_castps_si512(rest), upper);
                    rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(bits));
                    let to = acts.parts.add((cell * 3 + part) * BLOCK + 16 * half);
                    let words = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(bits));
                    _mm256_storeu_si256(to.cast(), words);
                }
            }
        }
    }
}

unsafe fn matmul_decoding(p: &Product<'_>) {
    // SAFETY: the caller's; the table is only for CPUs with tiles.
    unsafe {
        match (p.acts.mode.int8_with(p.w.form()), p.w.form()) {
            (false, Form::Q4 | Form::Q8) => (avx512::TABLE.matmul)(p),
            _ => matmul(p),
        }
    }
}

unsafe fn matmul(p: &Product<'_>) {
    // SAFETY: the caller's; the table is only for CPUs with tiles.
    unsafe {
        match (p.acts.mode.int8_with(p.w.form()), p.w.form()) {
            (true, _) if p.rows.len() < INT8_ROWS => (avx512::TABLE.matmul)(p),
            (true, Form::Q4) => scaled::<Int8Q4>(p),
            (true, Form::Q8) => scaled::<Int8Q8>(p),
            (false, Form::Q4) => scaled::<ExactQ4>(p),
            (false, Form::Q8) => scaled::<ExactQ8>(p),
            (_, Form::Bf16) => plain::matmul(p),
            (_, _) => (avx512::TABLE.matmul)(p),
        }
    }
}

thread_local! {
    /// Sums of a group, rings, expanded weights.
    static SCRATCH: RefCell<Zeroed> = RefCell::new(Zeroed::new(GROUP * MOST * PANEL * 4 + RING));
}

/// Numbers of rows that there are kernels for.
const SIZES: [usize; 10] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16];

/// The least of those for `rows`.
fn size_for(rows: usize) -> usize {
    SIZES.into_iter().find(|&size| size >= rows).unwrap_or(MOST)
}

fn config<K: Kind>(rows: usize) -> Config {
    let tiles = scaled::tiles(K::PARTS, rows);
    let (a, b) = ((K::PART_BYTES, 16), (64, K::EXPANDED / 64));
    let mut shapes = [(16, 64); 8];
    for (i, shape) in shapes.iter_mut().enumerate() {
        // Tiles as `scaled::step` uses them: products, rows, weights.
        let (j, bytes) = match (tiles, i) {
            (_, 6..) => (None, 64),
            (3, 0..3) => (Some(i), 64),
            (3, _) => (Some(i - 3), a.0),
            (_, 0..4) => (Some(i % tiles), 64),
            (_, _) => (Some(i % tiles), a.0),
        };
        let rows = j.map_or(b.1, |j| scaled::tile_rows(K::PARTS, rows, j));
        *shape = (rows, bytes);
    }
    Config::new(shapes)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn scaled<K: Kind>(p: &Product<'_>) {
    let rows = p.rows.len();
    if rows == 0 || p.panels.is_empty() {
        return;
    }
    let (full, last) = (MOST, rows - (rows - 1) / MOST * MOST);
    let fused = rows <= MOST;
    let blocks = p.w.blocks();
    let group = if fused {
        GROUP
    } else {
        (EXPANDED / (blocks * K::EXPANDED)).clamp(1, GROUP)
    };
    let need = GROUP * MOST * PANEL * 4
        + RING
        + if fused {
            0
        } else {
            group * blocks * K::EXPANDED
        };
    let (config_full, config_last) = (config::<K>(full), config::<K>(size_for(last)));
    let tables = Tables::new();
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < need {
            *scratch = Zeroed::new(need);
        }
        let acc = scratch.as_ptr().cast::<f32>();
        // SAFETY: the caller's, and the scratch is as large as needed.
        unsafe {
            let ring = scratch.as_ptr().add(GROUP * MOST * PANEL * 4);
            let expanded = ring.add(RING);
            let tiles = Tiles::take(&config_last);
            for first in p.panels.clone().step_by(group) {
                let panels = first..(first + group).min(p.panels.end);
                if !fused {
                    if !K::AS_IS {
                        for (i, block) in (0..panels.len() * blocks).enumerate() {
                            let at = p.w.panel(first).as_ptr().add(block * K::FORM.block_bytes());
                            scaled::expand::<K>(&tables, at, expanded.add(i * K::EXPANDED));
                        }
                    }
                    tiles.shape(&config_full);
                }
                for row in (0..rows).step_by(MOST) {
                    let left = (rows - row).min(MOST);
                    if !fused && left < MOST {
                        tiles.shape(&config_last);
                    }
                    let place = Place {
                        p,
                        panels: panels.clone(),
                        row,
                        rows: left,
                        acc,
                        ring,
                        expanded,
                    };
                    by_size::<K>(&tables, &place, size_for(left), fused);
                }
            }
        }
    });
}

/// A group of panels by up to `MOST` rows.
struct Place<'a> {
    p: &'a Product<'a>,
    panels: Range<usize>,
    row: usize,
    rows: usize,
    acc: *mut f32,
    ring: *mut u8,
    expanded: *const u8,
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn by_size<K: Kind>(tables: &Tables, place: &Place<'_>, size: usize, fused: bool) {
    macro_rules! sizes {
        ($($size:literal)*) => {
            match (size, fused) {
                $(($size, true) => cell::<K, $size, true>(tables, place),)*
                $(($size, false) => cell::<K, $size, false>(tables, place),)*
                _ => unreachable!("no kernel for {size} rows"),
            }
        };
    }
    // SAFETY: the caller's.
    unsafe { sizes!(1 2 3 4 5 6 8 10 12 16) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn cell<K: Kind, const T: usize, const FUSED: bool>(tables: &Tables, place: &Place<'_>) {
    let p = place.p;
    let (acts, blocks) = (p.acts, p.w.blocks());
    let row = p.rows.start + place.row;
    let row_bytes = K::PARTS * K::PART_BYTES;
    let chunk = (NEAR / (row_bytes * T)).max(8);
    // SAFETY: the caller's: shapes fit, rows are prepared, `out` has room.
    unsafe {
        let (a, sum) = if K::BYTES {
            (acts.q.cast::<u8>(), acts.ds)
        } else {
            (acts.parts.cast::<u8>(), acts.sum)
        };
        std::slice::from_raw_parts_mut(place.acc, place.panels.len() * MOST * PANEL).fill(0.0);
        for from in (0..blocks).step_by(chunk) {
            for (i, panel) in place.panels.clone().enumerate() {
                let at = from * acts.rows + row;
                let piece = Piece {
                    w: p.w.panel(panel).as_ptr().add(from * K::FORM.block_bytes()),
                    expanded: place
                        .expanded
                        .wrapping_add((i * blocks + from) * K::EXPANDED),
                    blocks: chunk.min(blocks - from),
                    a: a.add(at * row_bytes),
                    a_step: acts.rows * row_bytes,
                    d: acts.d.wrapping_add(at),
                    sum: sum.add(at),
                    cells: acts.rows,
                    acc: place.acc.add(i * MOST * PANEL),
                    ring: place.ring,
                };
                run::<K, T, FUSED>(tables, &piece);
            }
        }
        for r in 0..place.rows {
            for i in 0..place.panels.len() {
                let at =
                    (place.row + r) * p.stride + (place.panels.start - p.panels.start + i) * PANEL;
                let mut sums = _mm512_load_ps(place.acc.add((i * MOST + r) * PANEL));
                if p.add {
                    sums = _mm512_add_ps(_mm512_loadu_ps(p.out.add(at)), sums);
                }
                _mm512_storeu_ps(p.out.add(at), sums);
            }
        }
    }
}

#[cfg(test)]
mod tests;
