//! Loads keys and values of a chunk from the KV pool's pages, converted to f32.
//!
//! Invariants: elements are exactly the pool's, whatever the page size; only pages of the requested positions are read.

use super::kernel::CHUNK;
use crate::blocks::f16_to_f32;
use crate::kv::{BLOCK, KvDtype, KvPool, Layout};
use crate::lanes::{LANES, Lanes};

/// Bytes of a 4-bit block: byte i packs elements i and i + `HALF`. Equals one vector.
const HALF: usize = BLOCK / 2;

/// KV head of one layer of the pool, addressed through a page table.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub kv: &'a KvPool,
    pub layer: usize,
    pub head: usize,
    pub pages: &'a [u32],
}

/// Chunk of the same head and layer that is likely to be read next, to be prefetched.
#[derive(Clone, Copy)]
pub(super) struct Ahead<'a> {
    pub pages: &'a [u32],
    /// First position of the chunk; `end` is the position after its last.
    pub first: usize,
    pub end: usize,
}

impl Ahead<'_> {
    /// Returns the address of the keys `at` positions after `first` (values: `Layout::v` bytes on), `None` past `end`.
    #[inline(always)]
    fn group(&self, source: Source<'_>, at: usize) -> Option<*const u8> {
        let l = source.kv.layout(source.layer);
        let position = self.first + at;
        if position >= self.end {
            return None;
        }
        let page = self.pages[position / l.page_size] as usize;
        // SAFETY: a page of the table, as the positions below `end` have.
        let head = unsafe { source.kv.head(source.layer, page, source.head) };
        Some(head.wrapping_add(l.bytes(position % l.page_size)).cast_const())
    }
}

/// Loads the keys of the positions `from..to` of the chunk that begins at `first`, as `[head_dim][CHUNK]` f32. Other
/// elements of whole vectors of 16 positions are unspecified. Prefetches the chunk `ahead`.
///
/// # Safety
/// `pages` covers `first + to` positions with pages of the pool, and `ahead.pages` covers `ahead.end`; `keys` has
/// `head_dim * CHUNK` elements; the processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn keys<V: Lanes>(
    source: Source<'_>,
    first: usize,
    (from, to): (usize, usize),
    ahead: Option<Ahead<'_>>,
    keys: *mut f32,
) {
    let l = source.kv.layout(source.layer);
    let mut at = from / l.group * l.group;
    let (mut page, mut offset) = ((first + at) / l.page_size, (first + at) % l.page_size);
    while at < to {
        // SAFETY: the page is in the table by the contract; the group lies in the head's part of it, and groups of
        // sixteen are whole vectors of the chunk.
        unsafe {
            let head = source.kv.head(source.layer, source.pages[page] as usize, source.head);
            if l.group == LANES {
                let ahead = ahead.and_then(|ahead| ahead.group(source, at));
                group_of_lanes::<V>(l, head, offset, ahead, keys.add(at));
            } else {
                small_group(l, head, offset, keys.add(at));
            }
        }
        at += l.group;
        offset += l.group;
        if offset == l.page_size {
            (page, offset) = (page + 1, 0);
        }
    }
}

/// Loads the keys of a group of 16 positions to column `to`, under the conditions of [`keys`]; prefetches `ahead`.
#[inline(always)]
unsafe fn group_of_lanes<V: Lanes>(l: &Layout, head: *const u8, offset: usize, ahead: Option<*const u8>, to: *mut f32) {
    let dim = l.head_dim;
    // Prefetches one cache line of the next group for each line read of this group.
    let fetch = |vector: usize, size: usize| {
        let byte = vector * LANES * size;
        if let Some(ahead) = ahead
            && byte.is_multiple_of(64)
        {
            V::prefetch(ahead.wrapping_add(byte));
        }
    };
    // SAFETY: upheld by the caller.
    unsafe {
        match l.dtype {
            KvDtype::F16 => {
                let from = head.cast::<u16>().add(offset * dim);
                for d in 0..dim {
                    fetch(d, 2);
                    V::load_f16(from.add(d * LANES)).store(to.add(d * CHUNK));
                }
            }
            KvDtype::F32 => {
                let from = head.cast::<f32>().add(offset * dim);
                for d in 0..dim {
                    fetch(d, 4);
                    V::load(from.add(d * LANES)).store(to.add(d * CHUNK));
                }
            }
            KvDtype::Q8 => {
                let from = head.cast::<i8>().add(offset * dim);
                let scales = head.add(l.k_scales).cast::<u16>().add(offset * l.blocks());
                for b in 0..l.blocks() {
                    let scale = V::load_f16(scales.add(b * LANES));
                    for d in b * BLOCK..dim.min((b + 1) * BLOCK) {
                        fetch(d, 1);
                        V::load_i8(from.add(d * LANES)).mul(scale).store(to.add(d * CHUNK));
                    }
                }
            }
            KvDtype::Q4 => {
                let from = head.add(l.bytes(offset));
                let scales = head.add(l.k_scales).cast::<u16>().add(offset * l.blocks());
                for b in 0..l.blocks() {
                    let scale = V::load_f16(scales.add(b * LANES));
                    for i in b * HALF..(b + 1) * HALF {
                        fetch(i, 1);
                        let [low, high] = V::load_i4(from.add(i * LANES));
                        let to = to.add((i + b * HALF) * CHUNK);
                        low.mul(scale).store(to);
                        high.mul(scale).store(to.add(HALF * CHUNK));
                    }
                }
            }
        }
    }
}

/// Loads the keys of a group of fewer than 16 positions to column `to`, under the conditions of [`keys`].
#[inline(always)]
unsafe fn small_group(l: &Layout, head: *const u8, offset: usize, to: *mut f32) {
    let (dim, group) = (l.head_dim, l.group);
    // SAFETY: upheld by the caller.
    unsafe {
        for d in 0..dim {
            for i in 0..group {
                let number = offset * dim + d * group + i;
                *to.add(d * CHUNK + i) = match l.dtype {
                    KvDtype::F16 => f16_to_f32(*head.cast::<u16>().add(number)),
                    KvDtype::F32 => *head.cast::<f32>().add(number),
                    KvDtype::Q8 => {
                        let scales = head.add(l.k_scales).cast::<u16>();
                        let block = offset * l.blocks() + d / BLOCK * group + i;
                        f32::from(*head.cast::<i8>().add(number)) * f16_to_f32(*scales.add(block))
                    }
                    KvDtype::Q4 => {
                        let (b, at) = (d / BLOCK, d % BLOCK);
                        let scales = head.add(l.k_scales).cast::<u16>();
                        let scale = f16_to_f32(*scales.add(offset * l.blocks() + b * group + i));
                        let pair = *head.add(l.bytes(offset) + (b * HALF + at % HALF) * group + i);
                        (f32::from(pair >> (at / HALF * 4) & 15) - 8.0) * scale
                    }
                };
            }
        }
    }
}

/// Prefetch distance in groups of 16 positions.
const PREFETCH_GROUPS: usize = 4;

/// Addresses of a chunk's f16 groups of 16 positions in reading order: keys, values, the first keys of the next chunk.
pub(super) struct F16Groups {
    at: [*const u16; 2 * CHUNK / LANES + PREFETCH_GROUPS],
    count: usize,
}

impl F16Groups {
    /// Collects the addresses for the positions `from..to` of the chunk that begins at `first`.
    ///
    /// # Safety
    /// The conditions of [`keys`] hold; the pool stores f16 in groups of 16.
    #[inline(always)]
    pub unsafe fn new(source: Source<'_>, first: usize, (from, to): (usize, usize), ahead: Option<Ahead<'_>>) -> Self {
        let l = source.kv.layout(source.layer);
        let mut at = [std::ptr::null(); 2 * CHUNK / LANES + PREFETCH_GROUPS];
        let starts = from / LANES * LANES..to;
        let count = starts.len().div_ceil(LANES);
        for (i, start) in starts.step_by(LANES).enumerate() {
            let position = first + start;
            let page = source.pages[position / l.page_size] as usize;
            // SAFETY: as in `keys`; values lie as far from the keys of their group as V from K.
            unsafe {
                let head = source.kv.head(source.layer, page, source.head).cast_const();
                let group = head.cast::<u16>().add(position % l.page_size * l.head_dim);
                (at[i], at[count + i]) = (group, group.byte_add(l.v));
            }
        }
        for i in 0..PREFETCH_GROUPS {
            let next = ahead.and_then(|ahead| ahead.group(source, i * LANES));
            at[2 * count + i] = next.map_or(at[2 * count - 1], <*const u8>::cast);
        }
        Self { at, count }
    }

    /// Returns the address of each group's keys, and for each the address to prefetch.
    #[inline(always)]
    pub fn keys(&self) -> (&[*const u16], &[*const u16]) {
        (&self.at[..self.count], &self.at[PREFETCH_GROUPS..])
    }

    /// Returns the address of the values of group `i`, and the address to prefetch with it.
    #[inline(always)]
    pub fn values(&self, i: usize) -> (*const u16, *const u16) {
        (self.at[self.count + i], self.at[self.count + i + PREFETCH_GROUPS])
    }
}

/// Loads the values of the positions `from..to` of the chunk that begins at `first`, as `[CHUNK][width]` f32, `width`
/// being `head_dim` rounded up to 16. The padding of a row is unspecified.
///
/// # Safety
/// The conditions of [`keys`] hold, with `CHUNK * width` elements in `values`.
#[inline(always)]
pub(super) unsafe fn values<V: Lanes>(
    source: Source<'_>,
    first: usize,
    (from, to): (usize, usize),
    ahead: Option<Ahead<'_>>,
    values: *mut f32,
) {
    let l = source.kv.layout(source.layer);
    let (dim, width) = (l.head_dim, l.head_dim.next_multiple_of(LANES));
    let (mut page, mut offset) = ((first + from) / l.page_size, (first + from) % l.page_size);
    let mut at = from;
    while at < to {
        let count = (l.page_size - offset).min(to - at);
        // SAFETY: the page is in the table by the contract and has `count` tokens from `offset`; the vector that ends a
        // row reads past it by less than 64 bytes, as the pool allows.
        unsafe {
            let head = source.kv.head(source.layer, source.pages[page] as usize, source.head);
            let ahead = ahead.and_then(|ahead| ahead.group(source, at));
            for i in 0..count {
                if let Some(ahead) = ahead {
                    let line = l.v / l.page_size;
                    for byte in (0..line).step_by(64) {
                        V::prefetch(ahead.wrapping_add(l.v + i * line + byte));
                    }
                }
                let row = values.add((at + i) * width);
                let token = (offset + i) * dim;
                match l.dtype {
                    KvDtype::F16 => {
                        let from = head.add(l.v).cast::<u16>().add(token);
                        for d in (0..dim).step_by(LANES) {
                            V::load_f16(from.add(d)).store(row.add(d));
                        }
                    }
                    KvDtype::F32 => {
                        let from = head.add(l.v).cast::<f32>().add(token);
                        for d in (0..dim).step_by(LANES) {
                            V::load(from.add(d)).store(row.add(d));
                        }
                    }
                    KvDtype::Q8 => {
                        let from = head.add(l.v).cast::<i8>().add(token);
                        let scales = head.add(l.v_scales).cast::<u16>();
                        let scales = scales.add((offset + i) * l.blocks());
                        for d in (0..dim).step_by(LANES) {
                            let scale = V::splat(f16_to_f32(*scales.add(d / BLOCK)));
                            V::load_i8(from.add(d)).mul(scale).store(row.add(d));
                        }
                    }
                    KvDtype::Q4 => {
                        let from = head.add(l.v + l.bytes(offset + i));
                        let scales = head.add(l.v_scales).cast::<u16>();
                        let scales = scales.add((offset + i) * l.blocks());
                        for b in 0..l.blocks() {
                            let scale = V::splat(f16_to_f32(*scales.add(b)));
                            let [low, high] = V::load_i4(from.add(b * HALF));
                            low.mul(scale).store(row.add(b * BLOCK));
                            high.mul(scale).store(row.add(b * BLOCK + HALF));
                        }
                    }
                }
            }
        }
        at += count;
        (page, offset) = (page + 1, 0);
    }
}

/// Transposes the first `width` elements of the keys, `[head_dim][CHUNK]`, to values, `[CHUNK][width]`, for the
/// positions `from..to` rounded out to multiples of 16 (MLA, whose values are part of the keys).
///
/// # Safety
/// `keys` and `values` have these sizes; `width` is a multiple of 16.
#[inline(always)]
pub(super) unsafe fn transpose_values(keys: *const f32, (from, to): (usize, usize), width: usize, values: *mut f32) {
    for first in (from / LANES * LANES..to).step_by(LANES) {
        for d in (0..width).step_by(LANES) {
            let mut tile = [[0.0_f32; LANES]; LANES];
            // SAFETY: a square of sixteen within both.
            unsafe {
                for (i, row) in tile.iter_mut().enumerate() {
                    let from = keys.add((d + i) * CHUNK + first).cast::<[f32; LANES]>();
                    *row = from.read_unaligned();
                }
                for j in 0..LANES {
                    let mut column = [0.0_f32; LANES];
                    for (to, row) in column.iter_mut().zip(&tile) {
                        *to = row[j];
                    }
                    let to = values.add((first + j) * width + d).cast::<[f32; LANES]>();
                    to.write_unaligned(column);
                }
            }
        }
    }
}
