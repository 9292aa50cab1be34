//! Matmul of many rows with f32 activations (AVX2): blocks of a panel are unpacked to the L1 cache, then multiplied.
//!
//! Invariants: results follow `scalar`; sums of blocks are added in memory, in the blocks' order.

use std::ops::Range;

use super::exact::{GROUP, group, input, steps, weights};
use super::*;

/// Blocks that are unpacked at a time.
const CHUNK: usize = 6;
/// Rows in a tile.
const TALL: usize = 6;
/// Rows that share one unpacking of weights.
const ROWS: usize = 120;

/// Unpacked weights: [block][step][16], [block][share] scales and minima; and the rows' sums.
#[repr(C, align(64))]
struct Unpacked {
    w: [[[f32; PANEL]; BLOCK]; CHUNK],
    scales: [[[[f32; PANEL]; 2]; 2]; CHUNK],
    acc: [[f32; PANEL]; ROWS],
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn matmul<const KIND: u8, const LIKE: u8>(p: &Product<'_>) {
    let mut room = std::mem::MaybeUninit::<Unpacked>::uninit();
    let room = room.as_mut_ptr();
    for first in p.rows.clone().step_by(ROWS) {
        let rows = first..(first + ROWS).min(p.rows.end);
        for panel in p.panels.clone() {
            // SAFETY: upheld by the caller; `room` is written before it is read.
            unsafe { panel_by_rows::<KIND, LIKE>(p, panel, rows.clone(), room) };
        }
    }
}

/// Multiplies a panel by at most `ROWS` rows.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn panel_by_rows<const KIND: u8, const LIKE: u8>(
    p: &Product<'_>,
    panel: usize,
    rows: Range<usize>,
    room: *mut Unpacked,
) {
    let blocks = p.acts.blocks();
    // SAFETY: upheld by the caller.
    unsafe {
        let acc: *mut f32 = (&raw mut (*room).acc).cast();
        for r in 0..rows.len() {
            store(acc.add(r * PANEL), zero());
        }
        for b in (0..blocks).step_by(CHUNK) {
            let chunk = CHUNK.min(blocks - b);
            let from = p.w.panel(panel).as_ptr();
            let w = if KIND == F32 {
                Place::of::<KIND>(from, b).codes.cast()
            } else {
                unpack::<KIND>(from, b, chunk, room);
                (&raw const (*room).w).cast()
            };
            // Prefetches the bytes to unpack next while tiles run, in this panel or the next.
            for line in 0..(CHUNK * block_bytes(KIND)).div_ceil(64) {
                let next = from.wrapping_add((b + chunk) * block_bytes(KIND) + line * 64);
                _mm_prefetch::<_MM_HINT_T0>(next.cast());
            }
            let tiles = rows.len().div_ceil(TALL);
            for tile in 0..tiles {
                // Tiles of like height: 8 rows are 4 and 4, not 6 and 2.
                let (from, to) = (tile * rows.len() / tiles, (tile + 1) * rows.len() / tiles);
                let t = Tile {
                    acts: &p.acts,
                    w,
                    scales: (&raw const (*room).scales).cast(),
                    b,
                    chunk,
                    row: rows.start + from,
                    acc: acc.add(from * PANEL),
                };
                match to - from {
                    1 => t.run::<LIKE, 1>(),
                    2 => t.run::<LIKE, 2>(),
                    3 => t.run::<LIKE, 3>(),
                    4 => t.run::<LIKE, 4>(),
                    5 => t.run::<LIKE, 5>(),
                    _ => t.run::<LIKE, 6>(),
                }
            }
        }
        for (r, row) in rows.enumerate() {
            put(p, panel, row, load(acc.add(r * PANEL)));
        }
    }
}

/// Unpacks `chunk` blocks of the panel at `from`, from block `first` on.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<const KIND: u8>(from: *const u8, first: usize, chunk: usize, room: *mut Unpacked) {
    let layout = const { layout(KIND) };
    for b in 0..chunk {
        // SAFETY: the caller guarantees `chunk` blocks to read, for which `room` has space.
        unsafe {
            let block = Place::of::<KIND>(from, first + b);
            let to: *mut f32 = (&raw mut (*room).w[b]).cast();
            for g in 0..4 {
                let v = group::<KIND, true>(block, g);
                steps!(|T| {
                    store(to.add((g * GROUP + T) * PANEL), weights::<KIND, T, true>(block, g, &v));
                });
            }
            for sub in 0..layout.subs {
                let to: *mut f32 = (&raw mut (*room).scales[b][sub]).cast();
                store(to, scale::<KIND>(block, sub));
                if layout.min {
                    store(to.add(PANEL), min::<KIND>(block, sub));
                }
            }
        }
    }
}

/// Work of one tile: some rows of activations times `chunk` consecutive blocks of f32 weights.
struct Tile<'a> {
    acts: &'a ActsPtr,
    w: *const f32,
    scales: *const f32,
    b: usize,
    chunk: usize,
    row: usize,
    acc: *mut f32,
}

impl Tile<'_> {
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run<const KIND: u8, const R: usize>(&self) {
        let shares = const { if layout(KIND).subs == 2 { 2 } else { 1 } };
        for b in 0..self.chunk {
            // SAFETY: the caller guarantees unpacked blocks, prepared rows, room for their sums.
            unsafe {
                let cell = cell(self.acts, self.b + b, self.row);
                let x = self.acts.x.add(cell * BLOCK).cast_const();
                let w = self.w.add(b * BLOCK * PANEL);
                let mut s = [zero(); R];
                let scales = self.scales.add(b * 4 * PANEL);
                for sub in 0..shares {
                    for g in 4 / shares * sub..4 / shares * (sub + 1) {
                        steps!(|T| {
                            let w = load(w.add((g * GROUP + T) * PANEL));
                            for r in 0..R {
                                let x = _mm256_set1_ps(*x.add(r * BLOCK + input::<KIND>(g, T)));
                                s[r] = fma(w, x, s[r]);
                            }
                        });
                    }
                    let sums = input_sums(self.acts, shares, self.b + b, sub, self.row);
                    for r in 0..R {
                        let acc = self.acc.add(r * PANEL);
                        store(
                            acc,
                            total::<KIND>(load(acc), s[r], scales.add(sub * 2 * PANEL), sums.add(r)),
                        );
                        s[r] = zero();
                    }
                }
            }
        }
    }
}

/// Returns `acc` plus the scaled sum `s` of a sub-block's inputs.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn total<const KIND: u8>(acc: Pair, s: Pair, scales: *const f32, total: *const f32) -> Pair {
    let layout = const { layout(KIND) };
    if layout.subs == 0 {
        return sum(acc, s);
    }
    // SAFETY: the caller guarantees scales and sum are there if the kind has them.
    unsafe {
        let acc = fma2(s, load(scales), acc);
        if layout.min {
            fma(load(scales.add(PANEL)), _mm256_set1_ps(*total), acc)
        } else {
            acc
        }
    }
}
