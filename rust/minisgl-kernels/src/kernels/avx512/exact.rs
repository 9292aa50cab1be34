//! Matmul with f32 activations (AVX-512).
//!
//! Few rows: weights are converted to f32 in registers and used for all rows at once, block after block in one stream;
//! the sums of a block depend on no other block, which fills the pipeline at one row. Many rows: some blocks of two
//! panels are converted to f32 in the L1 cache, unless they are f32, and multiplied by tiles of rows in registers.
//!
//! Invariants: sums follow `scalar`: within a block in the order of its steps, then blocks in order.

use super::unpack::{GROUP, group, input, steps, weights};
use super::*;

/// Minimum rows for unpacking weights into the cache: of packed formats, then of formats that need no unpacking.
const FEW: usize = 8;
const FEW_OF_NUMBERS: usize = 12;
/// Blocks that are unpacked at a time; for f32, the blocks of two panels that fit the L2 cache.
const CHUNK: usize = 4;
const CHUNK_OF_F32: usize = 48;
/// Panels that are unpacked at a time.
const WIDE: usize = 2;
/// Rows in a tile.
const TALL: usize = 6;
/// Rows that share one unpacking of weights.
const ROWS: usize = 128;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn matmul<const KIND: u8, const LIKE: u8>(p: &Product<'_>) {
    // SAFETY: upheld by the caller.
    unsafe {
        let are_numbers = const { layout(KIND).subs == 0 };
        if p.rows.len() > if are_numbers { FEW_OF_NUMBERS } else { FEW } {
            return many::<KIND, LIKE>(p);
        }
        let row = p.rows.start;
        for panel in p.panels.clone() {
            // As many blocks at once as registers can hold sums: one for each row and sub-block.
            match (p.rows.len(), const { layout(KIND).subs == 2 }) {
                (0, _) => {}
                (1, _) => few::<KIND, 1, 4>(p, panel, row),
                (2, false) => few::<KIND, 2, 4>(p, panel, row),
                (2, true) => few::<KIND, 2, 2>(p, panel, row),
                (3, false) => few::<KIND, 3, 2>(p, panel, row),
                (3, true) => few::<KIND, 3, 1>(p, panel, row),
                (4, false) => few::<KIND, 4, 2>(p, panel, row),
                (4, true) => few::<KIND, 4, 1>(p, panel, row),
                (5, false) => few::<KIND, 5, 2>(p, panel, row),
                (5, true) => few::<KIND, 5, 1>(p, panel, row),
                (6, _) => few::<KIND, 6, 1>(p, panel, row),
                (7, _) => few::<KIND, 7, 1>(p, panel, row),
                (8, _) => few::<KIND, 8, 1>(p, panel, row),
                _ if !are_numbers => unreachable!("many rows"),
                (9, _) => few::<KIND, 9, 1>(p, panel, row),
                (10, _) => few::<KIND, 10, 1>(p, panel, row),
                (11, _) => few::<KIND, 11, 1>(p, panel, row),
                _ => few::<KIND, FEW_OF_NUMBERS, 1>(p, panel, row),
            }
        }
    }
}

/// Multiplies a panel by the `R` rows from `row` on, `B` blocks at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn few<const KIND: u8, const R: usize, const B: usize>(p: &Product<'_>, panel: usize, row: usize) {
    let (weights, blocks) = (p.w.panel(panel).as_ptr(), p.acts.blocks());
    let mut acc = [_mm512_setzero_ps(); R];
    let mut b = 0;
    // SAFETY: the caller guarantees every block of the panel and of the rows is there.
    unsafe {
        while b + B <= blocks {
            few_blocks::<KIND, R, B>(p, weights, b, row, &mut acc);
            b += B;
        }
        while b < blocks {
            few_blocks::<KIND, R, 1>(p, weights, b, row, &mut acc);
            b += 1;
        }
        for (r, acc) in acc.into_iter().enumerate() {
            put(p, panel, row + r, acc);
        }
    }
}

/// Adds the products of the `B` blocks from `b` on to `acc`; `panel` is the panel's first byte.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn few_blocks<const KIND: u8, const R: usize, const B: usize>(
    p: &Product<'_>,
    panel: *const u8,
    b: usize,
    row: usize,
    acc: &mut [__m512; R],
) {
    let layout = const { layout(KIND) };
    // SAFETY: the caller guarantees `B` blocks of weights and activations.
    unsafe {
        let mut x = [std::ptr::null::<f32>(); B];
        let mut blocks = [Place::of::<KIND>(panel, b); B];
        for i in 0..B {
            x[i] = p.acts.x.add(cell(&p.acts, b + i, row) * BLOCK);
            blocks[i] = Place::of::<KIND>(panel, b + i);
        }
        let mut s = [[[_mm512_setzero_ps(); R]; B]; 2];
        let lines = const { (B * block_bytes(KIND)).div_ceil(4 * 64) };
        for g in 0..4 {
            // Prefetches a few lines at a time: more than the processor can track would stall the computation.
            for line in g * lines..(g + 1) * lines {
                _mm_prefetch::<_MM_HINT_T0>(blocks[0].codes.wrapping_add(AHEAD + line * 64).cast());
            }
            let sub = g / 2 * (layout.subs / 2);
            let mut v = [[_mm512_setzero_si512(); 2]; B];
            for i in 0..B {
                v[i] = group::<KIND>(blocks[i], g);
            }
            steps!(|T| {
                for i in 0..B {
                    let w = weights::<KIND, T>(blocks[i], g, v[i]);
                    for r in 0..R {
                        let x = _mm512_set1_ps(*x[i].add(r * BLOCK + input::<KIND>(g, T)));
                        s[sub][i][r] = _mm512_fmadd_ps(w, x, s[sub][i][r]);
                    }
                }
            });
        }
        for i in 0..B {
            if layout.subs == 0 {
                for r in 0..R {
                    acc[r] = _mm512_add_ps(acc[r], s[0][i][r]);
                }
            }
            for sub in 0..layout.subs {
                let d = scale::<KIND>(blocks[i], sub);
                for r in 0..R {
                    acc[r] = _mm512_fmadd_ps(s[sub][i][r], d, acc[r]);
                }
                if layout.min {
                    let (m, sums) = (
                        min::<KIND>(blocks[i], sub),
                        input_sums(&p.acts, layout.subs, b + i, sub, row),
                    );
                    for r in 0..R {
                        acc[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(*sums.add(r)), acc[r]);
                    }
                }
            }
        }
    }
}

/// Prefetch distance of weights in bytes for few rows; it runs over into the next panel.
const AHEAD: usize = 4096;

/// Unpacked weights: [block][panel][step][16], and [block][panel][share] scales and minima.
#[repr(C, align(64))]
struct Unpacked {
    w: [[[[f32; PANEL]; BLOCK]; WIDE]; CHUNK],
    scales: [[[[[f32; PANEL]; 2]; 2]; WIDE]; CHUNK],
    acc: [[[f32; PANEL]; WIDE]; ROWS],
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn many<const KIND: u8, const LIKE: u8>(p: &Product<'_>) {
    let mut room = std::mem::MaybeUninit::<Unpacked>::uninit();
    let room = room.as_mut_ptr();
    for first in p.rows.clone().step_by(ROWS) {
        let rows = first..(first + ROWS).min(p.rows.end);
        for panel in p.panels.clone().step_by(WIDE) {
            // SAFETY: upheld by the caller; `room` is written before it is read.
            unsafe {
                match p.panels.end - panel {
                    1 => panels_by_rows::<KIND, LIKE, 1>(p, panel, rows.clone(), room),
                    _ => panels_by_rows::<KIND, LIKE, WIDE>(p, panel, rows.clone(), room),
                }
            }
        }
    }
}

/// Multiplies the `P` panels from `panel` on by at most `ROWS` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn panels_by_rows<const KIND: u8, const LIKE: u8, const P: usize>(
    p: &Product<'_>,
    panel: usize,
    rows: std::ops::Range<usize>,
    room: *mut Unpacked,
) {
    let blocks = p.acts.blocks();
    // SAFETY: upheld by the caller.
    unsafe {
        let acc: *mut f32 = (&raw mut (*room).acc).cast();
        for r in 0..rows.len() {
            for panel in 0..P {
                _mm512_store_ps(acc.add((r * WIDE + panel) * PANEL), _mm512_setzero_ps());
            }
        }
        let size = if KIND == F32 { CHUNK_OF_F32 } else { CHUNK };
        for b in (0..blocks).step_by(size) {
            let chunk = size.min(blocks - b);
            let mut w: [*const f32; P] = [std::ptr::null(); P];
            for i in 0..P {
                let from = p.w.panel(panel + i).as_ptr();
                if KIND == F32 {
                    w[i] = Place::of::<KIND>(from, b).codes.cast();
                    continue;
                }
                unpack::<KIND>(from, b, chunk, i, room);
                w[i] = (&raw const (*room).w[0][i]).cast();
                // Prefetches the blocks to unpack next while tiles run: the next ones, or the first of the next panels.
                let next = if b + CHUNK < blocks { CHUNK } else { P * blocks - b };
                for i in 0..CHUNK {
                    for line in 0..block_bytes(KIND).div_ceil(64) {
                        let ahead = (b + next + i) * block_bytes(KIND) + line * 64;
                        _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(ahead).cast());
                    }
                }
            }
            let tiles = rows.len().div_ceil(TALL);
            for tile in 0..tiles {
                // Tiles of like height: 9 rows are 4 and 5, not 6 and 3.
                let (from, to) = (tile * rows.len() / tiles, (tile + 1) * rows.len() / tiles);
                let t = Tile {
                    acts: &p.acts,
                    w,
                    next: BLOCK * PANEL * if KIND == F32 { 1 } else { WIDE },
                    scales: (&raw const (*room).scales).cast(),
                    // The first rows wait for memory, so they prefetch.
                    ahead: if KIND == F32 && tile == 0 { AHEAD } else { 0 },
                    b,
                    chunk,
                    row: rows.start + from,
                    acc: acc.add(from * WIDE * PANEL),
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
            for i in 0..P {
                put(p, panel + i, row, _mm512_load_ps(acc.add((r * WIDE + i) * PANEL)));
            }
        }
    }
}

/// Unpacks the `chunk` blocks from block `first` on of the panel at `from` into panel index `at` of `room`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<const KIND: u8>(from: *const u8, first: usize, chunk: usize, at: usize, room: *mut Unpacked) {
    let layout = const { layout(KIND) };
    for b in 0..chunk {
        // SAFETY: the caller guarantees `chunk` blocks to read, for which `room` has space.
        unsafe {
            let block = Place::of::<KIND>(from, first + b);
            let to: *mut f32 = (&raw mut (*room).w[b][at]).cast();
            for g in 0..4 {
                let v = group::<KIND>(block, g);
                steps!(|T| {
                    let w = weights::<KIND, T>(block, g, v);
                    _mm512_store_ps(to.add((g * GROUP + T) * PANEL), w);
                });
            }
            for sub in 0..layout.subs {
                let to: *mut f32 = (&raw mut (*room).scales[b][at][sub]).cast();
                _mm512_store_ps(to, scale::<KIND>(block, sub));
                if layout.min {
                    _mm512_store_ps(to.add(PANEL), min::<KIND>(block, sub));
                }
            }
        }
    }
}

/// Work of one tile: some rows of activations times `chunk` blocks of f32 weights, unpacked or in the panels.
struct Tile<'a, const P: usize> {
    acts: &'a ActsPtr,
    /// First block of each panel; the next one is `next` elements later.
    w: [*const f32; P],
    next: usize,
    scales: *const f32,
    /// Prefetch distance of weights in bytes.
    ahead: usize,
    b: usize,
    chunk: usize,
    row: usize,
    acc: *mut f32,
}

impl<const P: usize> Tile<'_, P> {
    /// Prefetches the weights after group `g` of the blocks `w`.
    #[inline(always)]
    fn ask(&self, w: &[*const f32; P], g: usize) {
        for from in w {
            for step in 0..GROUP {
                let from = from.wrapping_add((g * GROUP + step) * PANEL);
                // SAFETY: a prefetched address need not be valid.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_byte_add(self.ahead).cast()) };
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn run<const KIND: u8, const R: usize>(&self) {
        let has_min = const { layout(KIND).min };
        let shares = const { if layout(KIND).subs == 2 { 2 } else { 1 } };
        // SAFETY: the caller guarantees unpacked blocks, prepared rows, room for their sums.
        unsafe {
            let mut acc = [[_mm512_setzero_ps(); P]; R];
            for r in 0..R {
                for i in 0..P {
                    acc[r][i] = _mm512_load_ps(self.acc.add((r * WIDE + i) * PANEL));
                }
            }
            for b in 0..self.chunk {
                let cell = cell(self.acts, self.b + b, self.row);
                let x = self.acts.x.add(cell * BLOCK).cast_const();
                let mut w = self.w;
                for i in 0..P {
                    w[i] = w[i].add(b * self.next);
                }
                let scales = self.scales.wrapping_add(b * WIDE * 4 * PANEL);
                for sub in 0..shares {
                    let mut s = [[_mm512_setzero_ps(); P]; R];
                    for g in 4 / shares * sub..4 / shares * (sub + 1) {
                        if self.ahead > 0 {
                            self.ask(&w, g);
                        }
                        steps!(|T| {
                            let mut v = [_mm512_setzero_ps(); P];
                            for i in 0..P {
                                v[i] = _mm512_loadu_ps(w[i].add((g * GROUP + T) * PANEL));
                            }
                            for r in 0..R {
                                let x = _mm512_set1_ps(*x.add(r * BLOCK + input::<KIND>(g, T)));
                                for i in 0..P {
                                    s[r][i] = _mm512_fmadd_ps(v[i], x, s[r][i]);
                                }
                            }
                        });
                    }
                    let sums = if has_min {
                        input_sums(self.acts, shares, self.b + b, sub, self.row)
                    } else {
                        std::ptr::null()
                    };
                    for r in 0..R {
                        for i in 0..P {
                            let scales = scales.wrapping_add((i * 2 + sub) * 2 * PANEL);
                            acc[r][i] = total::<KIND>(acc[r][i], s[r][i], scales, sums.wrapping_add(r));
                        }
                    }
                }
            }
            for r in 0..R {
                for i in 0..P {
                    _mm512_store_ps(self.acc.add((r * WIDE + i) * PANEL), acc[r][i]);
                }
            }
        }
    }
}

/// Returns `acc` plus the scaled sum `s` of a sub-block's inputs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn total<const KIND: u8>(acc: __m512, s: __m512, scales: *const f32, sum: *const f32) -> __m512 {
    let layout = const { layout(KIND) };
    if layout.subs == 0 {
        return _mm512_add_ps(acc, s);
    }
    // SAFETY: the caller guarantees scales and sum are there if the kind has them.
    unsafe {
        let acc = _mm512_fmadd_ps(s, _mm512_load_ps(scales), acc);
        if layout.min {
            _mm512_fmadd_ps(_mm512_load_ps(scales.add(PANEL)), _mm512_set1_ps(*sum), acc)
        } else {
            acc
        }
    }
}
