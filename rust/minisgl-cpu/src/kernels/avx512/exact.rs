//! Products with f32 activations.
//!
//! Few rows: weights are turned into f32 in registers and used for all rows at once, block after block in one stream;
//! the sums of a block wait for no other block, which is what fills the pipeline at one row. Many rows: some blocks of
//! two panels are turned into f32 in the L1 cache, and tiles of rows run over them.
//!
//! Keeps true: as `scalar`: a block's sum in the order of its steps, blocks in order.
//! Doesn't know: int8.

use super::*;

/// Rows from which on weights are unpacked into the cache.
const FEW: usize = 8;
/// Blocks that are unpacked at a time.
const CHUNK: usize = 4;
/// Panels that are unpacked at a time.
const WIDE: usize = 2;
/// Rows of a tile.
const TALL: usize = 12;
/// Rows that share what is unpacked once.
const ROWS: usize = 120;

/// Steps of a group: what comes out of registers at once. A block has 4 groups.
const GROUP: usize = 8;

/// The weights of steps `8 g .. 8 g + 8`, as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn group<const FORM: u8>(block: *const u8, g: usize) -> [__m512; GROUP] {
    // SAFETY: the caller's: a whole block, 4 groups.
    unsafe {
        match FORM {
            Q4 => nibbles(_mm512_loadu_si512(block.add(64 + 64 * g).cast())),
            Q8 => {
                let [a, b, c, d] = bytes(_mm512_loadu_si512(block.add(32 + 128 * g).cast()));
                let [e, f, g, h] = bytes(_mm512_loadu_si512(block.add(96 + 128 * g).cast()));
                [a, b, c, d, e, f, g, h]
            }
            F16 => {
                let at = block.add(256 * g);
                let w = |t: usize| halves(at.add(32 * t));
                [w(0), w(1), w(2), w(3), w(4), w(5), w(6), w(7)]
            }
            BF16 => {
                let at = block.add(256 * g);
                let [a, b] = pair(at);
                let [c, d] = pair(at.add(64));
                let [e, f] = pair(at.add(128));
                let [g, h] = pair(at.add(192));
                [a, b, c, d, e, f, g, h]
            }
            _ => {
                let at = block.add(512 * g);
                let w = |t: usize| _mm512_loadu_ps(at.add(64 * t).cast());
                [w(0), w(1), w(2), w(3), w(4), w(5), w(6), w(7)]
            }
        }
    }
}

/// The two upper halves of singles of each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn pair(at: *const u8) -> [__m512; 2] {
    // SAFETY: the caller's: 64 bytes.
    let v = unsafe { _mm512_loadu_si512(at.cast()) };
    let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    [
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(v)),
        _mm512_castsi512_ps(_mm512_and_si512(v, high)),
    ]
}

/// The eight halves of bytes of each lane, lowest first: a table of 16 numbers looks at an index's lowest 4 bits only.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn nibbles(v: __m512i) -> [__m512; GROUP] {
    let table = _mm512_setr_ps(
        0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
    );
    [
        _mm512_permutexvar_ps(v, table),
        _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(v), table),
        _mm512_permutexvar_ps(_mm512_srli_epi32::<8>(v), table),
        _mm512_permutexvar_ps(_mm512_srli_epi32::<12>(v), table),
        _mm512_permutexvar_ps(_mm512_srli_epi32::<16>(v), table),
        _mm512_permutexvar_ps(_mm512_srli_epi32::<20>(v), table),
        _mm512_permutexvar_ps(_mm512_srli_epi32::<24>(v), table),
        _mm512_permutexvar_ps(_mm512_srli_epi32::<28>(v), table),
    ]
}

/// The four signed bytes of each lane, lowest first.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn bytes(v: __m512i) -> [__m512; 4] {
    [
        _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(v))),
        _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<16>(v))),
        _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<8>(v))),
        _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(v)),
    ]
}

/// Which input step `t` of group `g` takes.
#[inline]
const fn input<const FORM: u8>(g: usize, t: usize) -> usize {
    if FORM == Q4 {
        4 * g + t / 2 + t % 2 * 16
    } else {
        GROUP * g + t
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn matmul<const FORM: u8>(p: &Product<'_>) {
    // SAFETY: the caller's.
    unsafe {
        if p.rows.len() > FEW {
            return many::<FORM>(p);
        }
        let row = p.rows.start;
        for panel in p.panels.clone() {
            match p.rows.len() {
                0 => {}
                1 => few::<FORM, 1, 4>(p, panel, row),
                2 => few::<FORM, 2, 4>(p, panel, row),
                3 => few::<FORM, 3, 2>(p, panel, row),
                4 => few::<FORM, 4, 2>(p, panel, row),
                5 => few::<FORM, 5, 2>(p, panel, row),
                6 => few::<FORM, 6, 1>(p, panel, row),
                7 => few::<FORM, 7, 1>(p, panel, row),
                _ => few::<FORM, 8, 1>(p, panel, row),
            }
        }
    }
}

/// `R` rows from `row` on, `B` blocks at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn few<const FORM: u8, const R: usize, const B: usize>(
    p: &Product<'_>,
    panel: usize,
    row: usize,
) {
    let (weights, blocks) = (p.w.panel(panel).as_ptr(), p.acts.blocks());
    let mut acc = [_mm512_setzero_ps(); R];
    let mut b = 0;
    // SAFETY: the caller's: every block of the panel and of the rows is there.
    unsafe {
        while b + B <= blocks {
            few_blocks::<FORM, R, B>(p, weights.add(b * block_bytes(FORM)), b, row, &mut acc);
            b += B;
        }
        while b < blocks {
            few_blocks::<FORM, R, 1>(p, weights.add(b * block_bytes(FORM)), b, row, &mut acc);
            b += 1;
        }
        for (r, acc) in acc.into_iter().enumerate() {
            put(p, panel, row + r, acc);
        }
    }
}

/// Adds what `B` blocks from `b` on give.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn few_blocks<const FORM: u8, const R: usize, const B: usize>(
    p: &Product<'_>,
    weights: *const u8,
    b: usize,
    row: usize,
    acc: &mut [__m512; R],
) {
    // SAFETY: the caller's: `B` blocks of weights and activations.
    unsafe {
        let x: [*const f32; B] =
            std::array::from_fn(|i| p.acts.x.add(cell(&p.acts, b + i, row) * BLOCK).cast_const());
        let mut s = [[_mm512_setzero_ps(); R]; B];
        for i in 0..B {
            prefetch::<FORM>(weights.add(i * block_bytes(FORM)));
        }
        for g in 0..4 {
            for i in 0..B {
                let w = group::<FORM>(weights.add(i * block_bytes(FORM)), g);
                for (t, w) in w.into_iter().enumerate() {
                    for r in 0..R {
                        let x = _mm512_set1_ps(*x[i].add(r * BLOCK + input::<FORM>(g, t)));
                        s[i][r] = _mm512_fmadd_ps(w, x, s[i][r]);
                    }
                }
            }
        }
        for i in 0..B {
            let block = weights.add(i * block_bytes(FORM));
            let sums = p.acts.sum.add(cell(&p.acts, b + i, row)).cast_const();
            for r in 0..R {
                acc[r] = match FORM {
                    Q4 => {
                        let acc = _mm512_fmadd_ps(s[i][r], halves(block), acc[r]);
                        _mm512_fmadd_ps(halves(block.add(32)), _mm512_set1_ps(*sums.add(r)), acc)
                    }
                    Q8 => _mm512_fmadd_ps(s[i][r], halves(block), acc[r]),
                    _ => _mm512_add_ps(acc[r], s[i][r]),
                };
            }
        }
    }
}

/// Asks for what comes some blocks later: a panel's bytes go on into the next panel's.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn prefetch<const FORM: u8>(block: *const u8) {
    for line in 0..block_bytes(FORM).div_ceil(64) {
        _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(AHEAD + line * 64).cast());
    }
}

/// How far ahead weights are asked for.
const AHEAD: usize = 4096;

/// Unpacked weights: [block][panel][step][16] and [block][panel] scales and minima.
#[repr(C, align(64))]
struct Unpacked {
    w: [[[[f32; PANEL]; BLOCK]; WIDE]; CHUNK],
    scales: [[[[f32; PANEL]; 2]; WIDE]; CHUNK],
    acc: [[[f32; PANEL]; WIDE]; ROWS],
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn many<const FORM: u8>(p: &Product<'_>) {
    let mut room = std::mem::MaybeUninit::<Unpacked>::uninit();
    let room = room.as_mut_ptr();
    for first in p.rows.clone().step_by(ROWS) {
        let rows = first..(first + ROWS).min(p.rows.end);
        for panel in p.panels.clone().step_by(WIDE) {
            // SAFETY: the caller's; `room` is written before it is read.
            unsafe {
                if panel + 1 < p.panels.end {
                    panels_by_rows::<FORM, 2>(p, panel, rows.clone(), room);
                } else {
                    panels_by_rows::<FORM, 1>(p, panel, rows.clone(), room);
                }
            }
        }
    }
}

/// `P` panels from `panel` on by at most `ROWS` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn panels_by_rows<const FORM: u8, const P: usize>(
    p: &Product<'_>,
    panel: usize,
    rows: std::ops::Range<usize>,
    room: *mut Unpacked,
) {
    let blocks = p.acts.blocks();
    // SAFETY: the caller's.
    unsafe {
        let acc: *mut f32 = (&raw mut (*room).acc).cast();
        for r in 0..rows.len() {
            for panel in 0..P {
                _mm512_store_ps(acc.add((r * WIDE + panel) * PANEL), _mm512_setzero_ps());
            }
        }
        for b in (0..blocks).step_by(CHUNK) {
            let chunk = CHUNK.min(blocks - b);
            for i in 0..P {
                let from = p.w.panel(panel + i).as_ptr().add(b * block_bytes(FORM));
                unpack::<FORM>(from, chunk, i, room);
            }
            let tiles = rows.len().div_ceil(TALL);
            for tile in 0..tiles {
                // Tiles of like height: 16 rows are 8 and 8, not 12 and 4.
                let (from, to) = (tile * rows.len() / tiles, (tile + 1) * rows.len() / tiles);
                let t = Tile {
                    acts: &p.acts,
                    room,
                    b,
                    chunk,
                    row: rows.start + from,
                    acc: acc.add(from * WIDE * PANEL),
                };
                match to - from {
                    1 => t.run::<FORM, 1, P>(),
                    2 => t.run::<FORM, 2, P>(),
                    3 => t.run::<FORM, 3, P>(),
                    4 => t.run::<FORM, 4, P>(),
                    5 => t.run::<FORM, 5, P>(),
                    6 => t.run::<FORM, 6, P>(),
                    7 => t.run::<FORM, 7, P>(),
                    8 => t.run::<FORM, 8, P>(),
                    9 => t.run::<FORM, 9, P>(),
                    10 => t.run::<FORM, 10, P>(),
                    11 => t.run::<FORM, 11, P>(),
                    _ => t.run::<FORM, 12, P>(),
                }
            }
        }
        for (r, row) in rows.enumerate() {
            for i in 0..P {
                put(
                    p,
                    panel + i,
                    row,
                    _mm512_load_ps(acc.add((r * WIDE + i) * PANEL)),
                );
            }
        }
    }
}

/// Unpacks `chunk` blocks of a panel to place `at`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<const FORM: u8>(from: *const u8, chunk: usize, at: usize, room: *mut Unpacked) {
    for b in 0..chunk {
        // SAFETY: the caller's: `chunk` blocks to read, which `room` has room for.
        unsafe {
            let block = from.add(b * block_bytes(FORM));
            let to: *mut f32 = (&raw mut (*room).w[b][at]).cast();
            for g in 0..4 {
                for (t, w) in group::<FORM>(block, g).into_iter().enumerate() {
                    _mm512_store_ps(to.add((g * GROUP + t) * PANEL), w);
                }
            }
            if FORM == Q4 || FORM == Q8 {
                let to: *mut f32 = (&raw mut (*room).scales[b][at]).cast();
                _mm512_store_ps(to, halves(block));
                if FORM == Q4 {
                    _mm512_store_ps(to.add(PANEL), halves(block.add(32)));
                }
            }
        }
    }
}

/// Some rows by the blocks that are unpacked.
struct Tile<'a> {
    acts: &'a ActsPtr,
    room: *const Unpacked,
    b: usize,
    chunk: usize,
    row: usize,
    acc: *mut f32,
}

impl Tile<'_> {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn run<const FORM: u8, const R: usize, const P: usize>(&self) {
        for b in 0..self.chunk {
            // SAFETY: the caller's: unpacked blocks, prepared rows, room for their sums.
            unsafe {
                let cell = cell(self.acts, self.b + b, self.row);
                let x = self.acts.x.add(cell * BLOCK).cast_const();
                let w: *const f32 = (&raw const (*self.room).w[b]).cast();
                let mut s = [[_mm512_setzero_ps(); P]; R];
                for g in 0..4 {
                    for t in 0..GROUP {
                        let mut v = [_mm512_setzero_ps(); P];
                        for i in 0..P {
                            v[i] = _mm512_load_ps(w.add((i * BLOCK + g * GROUP + t) * PANEL));
                        }
                        for r in 0..R {
                            let x = _mm512_set1_ps(*x.add(r * BLOCK + input::<FORM>(g, t)));
                            for i in 0..P {
                                s[r][i] = _mm512_fmadd_ps(v[i], x, s[r][i]);
                            }
                        }
                    }
                }
                let scales: *const f32 = (&raw const (*self.room).scales[b]).cast();
                for r in 0..R {
                    for i in 0..P {
                        let acc = self.acc.add((r * WIDE + i) * PANEL);
                        let scales = scales.add(i * 2 * PANEL);
                        let sum = self.acts.sum.add(cell + r);
                        _mm512_store_ps(
                            acc,
                            total::<FORM>(_mm512_load_ps(acc), s[r][i], scales, sum),
                        );
                    }
                }
            }
        }
    }
}

/// `acc` and a block's sum.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn total<const FORM: u8>(
    acc: __m512,
    s: __m512,
    scales: *const f32,
    sum: *const f32,
) -> __m512 {
    // SAFETY: the caller's: scales and sum are there if the form has them.
    unsafe {
        match FORM {
            Q4 => {
                let acc = _mm512_fmadd_ps(s, _mm512_load_ps(scales), acc);
                _mm512_fmadd_ps(_mm512_load_ps(scales.add(PANEL)), _mm512_set1_ps(*sum), acc)
            }
            Q8 => _mm512_fmadd_ps(s, _mm512_load_ps(scales), acc),
            _ => _mm512_add_ps(acc, s),
        }
    }
}
