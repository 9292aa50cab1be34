//! Matmul of many rows with int8 activations (AVX-512): some blocks of two panels are unpacked to bytes in the L1
//! cache, then multiplied by tiles of rows. A vector of activations is loaded once for both panels.
//!
//! Invariants: results follow `scalar`; sums of blocks are added in the blocks' order.

use std::ops::Range;

use super::unpack::biased;
use super::*;

/// Blocks that are unpacked at a time.
const CHUNK: usize = 8;
/// Panels that are unpacked at a time.
const WIDE: usize = 2;
/// Pairs of panels that are multiplied by a chunk of the activations while it is in the L2 cache.
const PAIRS: usize = 8;
/// Rows in a tile.
const TALL: usize = 6;
/// Rows that share one unpacking of weights.
const ROWS: usize = 128;

/// Returns one representative kind for all kinds with alike tiles, so that they share their code.
pub(super) const fn like_int8(kind: u8) -> u8 {
    let mut other = 0;
    while layout(other).subs != layout(kind).subs || layout(other).min != layout(kind).min {
        other += 1;
    }
    other
}

/// Block of two panels.
#[repr(C, align(64))]
struct Unpacked {
    /// Scales and minima: [sub-block][panel][scale, minimum][16].
    scales: [[[[f32; PANEL]; 2]; WIDE]; 2],
    /// Kinds with minima: the factor of a minimum, as f32. Other kinds: the integer that cancels the bias.
    of_rows: [[u32; ROWS]; 2],
    /// Unsigned bytes, bias included: [vector][panel][64].
    w: [[[u8; 4 * PANEL]; WIDE]; 8],
}

/// Blocks of a chunk, and sums of the chunks before.
#[repr(C, align(64))]
struct Room {
    blocks: [Unpacked; CHUNK],
    /// Sums of the chunks before: [pair][row][panel][16].
    acc: [[[[f32; PANEL]; WIDE]; ROWS]; PAIRS],
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn matmul<const KIND: u8, const LIKE: u8>(p: &Product<'_>) {
    let mut room = std::mem::MaybeUninit::<Room>::uninit();
    let room = room.as_mut_ptr();
    for first in p.rows.clone().step_by(ROWS) {
        let rows = first..(first + ROWS).min(p.rows.end);
        for first in p.panels.clone().step_by(PAIRS * WIDE) {
            let panels = first..(first + PAIRS * WIDE).min(p.panels.end);
            for b in (0..p.acts.blocks()).step_by(CHUNK) {
                // SAFETY: upheld by the caller; `room` is written before it is read.
                unsafe { chunk::<KIND, LIKE>(p, panels.clone(), rows.clone(), b, room) };
            }
        }
    }
}

/// Adds the products of the chunk of blocks from `b` on, with at most `PAIRS` pairs of panels and `ROWS` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn chunk<const KIND: u8, const LIKE: u8>(
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
        of_rows::<KIND>(&p.acts, rows.clone(), blocks.clone(), room);
        for (pair, panel) in panels.clone().step_by(WIDE).enumerate() {
            let wide = WIDE.min(panels.end - panel);
            let from = weights.add(panel * panel_bytes);
            for i in 0..wide {
                unpack::<KIND>(from.add(i * panel_bytes), blocks.clone(), i, room);
            }
            // The blocks to unpack next: of the next panels, or the next ones of the first panels.
            let next = match panel + WIDE < panels.end {
                true => from.wrapping_add(WIDE * panel_bytes + b * block_bytes(KIND)),
                false => weights.wrapping_add(panels.start * panel_bytes + blocks.end * block_bytes(KIND)),
            };
            let mut t = Tile {
                p,
                room,
                blocks: blocks.clone(),
                panel,
                row: rows.start,
                at: 0,
                acc: (&raw mut (*room).acc[pair]).cast(),
            };
            // Tiles of like height: 8 rows are 4 and 4, not 6 and 2.
            let tiles = rows.len().div_ceil(TALL);
            let (height, taller) = (rows.len() / tiles, rows.len() % tiles);
            let lines = const { (CHUNK * block_bytes(KIND)).div_ceil(64) }.div_ceil(tiles);
            for tile in 0..tiles {
                for line in tile * lines..(tile + 1) * lines {
                    _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(line * 64).cast());
                    _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(panel_bytes + line * 64).cast());
                }
                let height = height + usize::from(tile < taller);
                match wide {
                    1 => t.rows::<LIKE, 1>(height),
                    _ => t.rows::<LIKE, WIDE>(height),
                }
                t.row += height;
                t.at += height;
                t.acc = t.acc.add(height * WIDE * PANEL);
            }
        }
    }
}

/// Writes what a block's integer sums need of each row: the factor of its minimum, or what cancels the bias.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn of_rows<const KIND: u8>(acts: &ActsPtr, rows: Range<usize>, blocks: Range<usize>, room: *mut Room) {
    let layout = const { layout(KIND) };
    for (i, b) in blocks.enumerate() {
        for sub in 0..layout.subs {
            // SAFETY: the caller guarantees the rows and the blocks.
            unsafe {
                let to: *mut u32 = (&raw mut (*room).blocks[i].of_rows[sub]).cast();
                for r in 0..rows.len() {
                    *to.add(r) = if layout.min {
                        scaled_sum(acts, layout.subs, b, sub, rows.start + r).to_bits()
                    } else {
                        let offset = *offsets(acts, layout.subs, b, sub, rows.start + r);
                        (offset / 128 * i32::from(layout.bias)) as u32
                    };
                }
            }
        }
    }
}

/// Unpacks the `blocks` of the panel at `from` into panel index `at` of `room`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<const KIND: u8>(from: *const u8, blocks: Range<usize>, at: usize, room: *mut Room) {
    let layout = const { layout(KIND) };
    for (i, b) in blocks.enumerate() {
        // SAFETY: the caller guarantees the blocks, for which `room` has space.
        unsafe {
            let block = Place::of::<KIND>(from, b);
            let room = &raw mut (*room).blocks[i];
            for j in 0..8 {
                let to = &raw mut (*room).w[j][at];
                _mm512_store_si512(to.cast(), biased::<KIND>(block.codes, j));
            }
            for sub in 0..layout.subs {
                let to: *mut f32 = (&raw mut (*room).scales[sub][at]).cast();
                _mm512_store_ps(to, scale::<KIND>(block, sub));
                if layout.min {
                    _mm512_store_ps(to.add(PANEL), min::<KIND>(block, sub));
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
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn rows<const KIND: u8, const P: usize>(&self, rows: usize) {
        // SAFETY: upheld by the caller.
        unsafe {
            match rows {
                1 => self.run::<KIND, P, 1>(),
                2 => self.run::<KIND, P, 2>(),
                3 => self.run::<KIND, P, 3>(),
                4 => self.run::<KIND, P, 4>(),
                5 => self.run::<KIND, P, 5>(),
                _ => self.run::<KIND, P, TALL>(),
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn run<const KIND: u8, const P: usize, const R: usize>(&self) {
        let layout = const { layout(KIND) };
        let acts = &self.p.acts;
        let (first, last) = (self.blocks.start == 0, self.blocks.end == acts.blocks());
        let mut acc = [[_mm512_setzero_ps(); P]; R];
        // SAFETY: the caller guarantees unpacked blocks, prepared rows, room for their sums.
        unsafe {
            let keep = if first { 0 } else { !0 };
            for r in 0..R {
                for i in 0..P {
                    acc[r][i] = _mm512_maskz_load_ps(keep, self.acc.add((r * WIDE + i) * PANEL));
                }
            }
            let room = self.room.cast::<Unpacked>();
            for (at, b) in self.blocks.clone().enumerate() {
                let cell = cell(acts, b, self.row);
                let (q, d) = (acts.q.add(cell * BLOCK).cast_const(), acts.d.add(cell).cast_const());
                // An index would tell the compiler how few blocks there are, and it would unroll this loop beyond the
                // cache of decoded instructions.
                let block = room.wrapping_add(at);
                for sub in 0..layout.subs {
                    let of_rows = (&raw const (*block).of_rows[sub]).cast::<u32>().add(self.at);
                    let w = (&raw const (*block).w[sub * (8 / layout.subs)]).cast();
                    let s = sums::<KIND, P, R>(w, q.add(sub * (BLOCK / layout.subs)), of_rows.cast());
                    let scales: *const f32 = (&raw const (*block).scales[sub]).cast();
                    for r in 0..R {
                        let dx = _mm512_set1_ps(*d.add(r));
                        for i in 0..P {
                            let by = _mm512_mul_ps(_mm512_load_ps(scales.add(2 * PANEL * i)), dx);
                            acc[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(s[r][i]), by, acc[r][i]);
                        }
                        if layout.min {
                            let ds = _mm512_set1_ps(*of_rows.cast::<f32>().add(r));
                            for i in 0..P {
                                let m = _mm512_load_ps(scales.add(2 * PANEL * i + PANEL));
                                acc[r][i] = _mm512_fmadd_ps(m, ds, acc[r][i]);
                            }
                        }
                    }
                }
            }
            for r in 0..R {
                for i in 0..P {
                    if last {
                        put(self.p, self.panel + i, self.row + r, acc[r][i]);
                    } else {
                        _mm512_store_ps(self.acc.add((r * WIDE + i) * PANEL), acc[r][i]);
                    }
                }
            }
        }
    }
}

/// Returns the integer sums of a sub-block, from its first vector of weights and activations on; they begin with
/// `start` unless the kind has minima.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn sums<const KIND: u8, const P: usize, const R: usize>(
    w: *const u8,
    q: *const i8,
    start: *const i32,
) -> [[__m512i; P]; R] {
    let layout = const { layout(KIND) };
    let mut s = [[_mm512_setzero_si512(); P]; R];
    // SAFETY: the caller guarantees an unpacked block and `R` cells.
    unsafe {
        if !layout.min {
            for r in 0..R {
                s[r] = [_mm512_set1_epi32(*start.add(r)); P];
            }
        }
        for j in 0..8 / layout.subs {
            let mut v = [_mm512_setzero_si512(); P];
            for i in 0..P {
                v[i] = _mm512_load_si512(w.add((j * WIDE + i) * 64).cast());
            }
            for r in 0..R {
                let x = four(q.add(r * BLOCK + 4 * j));
                for i in 0..P {
                    s[r][i] = _mm512_dpbusd_epi32(s[r][i], v[i], x);
                }
            }
        }
    }
    s
}
