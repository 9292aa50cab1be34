//! KV pool: keys and values of all layers, in pages that the scheduler hands out.
//!
//! Memory order: `[page][layer][kv head][K of the page | V of the page]`, where layers may differ in their heads. A
//! page's layers are adjacent, so resident memory grows with the pages that were ever used: the memory is mapped at
//! once and touched lazily. V is `[token][head_dim]`. K is in groups of G tokens, G the largest of 16, 8, 4, 2, 1 that
//! divides the page size, each group `[head_dim][G]`: attention has one key in each lane, so a group of 16 is read
//! without a transpose, and smaller ones are interleaved. If values are the first elements of the keys (latent
//! attention, MLA), there is no V.
//!
//! Formats: f32 unchanged; f16 rounded to nearest, ties to even (|error| <= 2^-11 of the value; beyond 65,504 a value
//! becomes infinite and a key NaN, so that the step that reads it reports logits that are not finite); q8: int8 with an
//! f16 scale for each token, head and 32 elements, scale = max / 127, so |error| <= half a scale = 0.4 % of the largest
//! of the 32; q4: integers from -8 to 7 with an f16 scale for 32 elements, after a transform that spreads outliers
//! ([`plain::hadamard_transform`]), so that they share a scale well. Transformed queries and keys have the same
//! products; the result of transformed values is transformed back.
//!
//! Invariants: a slot is `page * page_size + offset`; nothing outside the slots given is written; 64 bytes may be read
//! past the end of any head's part of a page.

use crate::blocks::{f16_to_f32, f32_to_f16};
use crate::error::{Error, Result};
use crate::kernels::plain;
use crate::memory::Reserved;

/// Maximum elements in a head.
pub const MAX_HEAD_DIM: usize = 640;
/// Elements that share a scale in [`KvDtype::Q8`] and [`KvDtype::Q4`].
pub const BLOCK: usize = 32;

/// Storage format of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDtype {
    /// Half-precision floats, the default.
    F16,
    /// Single-precision floats, unchanged.
    F32,
    /// int8 with one f16 scale for each token, head and 32 elements.
    Q8,
    /// 4-bit integers with one f16 scale for 32 elements, after a Hadamard transform.
    Q4,
}

impl KvDtype {
    /// Parses `f16`, `f32`, `q8` or `q4`; fails for any other name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "f16" => Ok(Self::F16),
            "f32" => Ok(Self::F32),
            "q8" => Ok(Self::Q8),
            "q4" => Ok(Self::Q4),
            other => Err(Error::setting(format!(
                "--kv-dtype is {other:?}; it must be f16, f32, q8 or q4"
            ))),
        }
    }

    /// Returns the bits of an element, without scales.
    fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::F16 => 16,
            Self::Q8 => 8,
            Self::Q4 => 4,
        }
    }

    fn has_scales(self) -> bool {
        matches!(self, Self::Q8 | Self::Q4)
    }
}

/// KV heads of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvHeads {
    /// Number of KV heads.
    pub count: usize,
    /// Elements in a head.
    pub dim: usize,
}

/// Sizes of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Heads of each layer that has keys and values of its own.
    pub layers: Vec<KvHeads>,
    /// Number of pages, including a scratch page if there is one.
    pub pages: usize,
    /// Tokens in a page.
    pub page_size: usize,
    /// Elements of a value that are the first ones of the key (latent attention); `None`: values are stored separately.
    pub latent: Option<usize>,
    /// Storage format of keys and values.
    pub dtype: KvDtype,
}

impl KvShape {
    /// Fails if a head size is not supported, or not in this storage format.
    pub fn check(&self) -> Result<()> {
        for heads in &self.layers {
            if !(1..=MAX_HEAD_DIM).contains(&heads.dim) {
                return Err(Error::unsupported(format!(
                    "head_dim is {}; it must be from 1 to {MAX_HEAD_DIM}",
                    heads.dim
                )));
            }
            let whole = |size: &usize| size.is_multiple_of(BLOCK);
            let odd = [Some(heads.dim), self.latent]
                .into_iter()
                .flatten()
                .find(|size| !whole(size));
            if let Some(size) = odd.filter(|_| self.dtype == KvDtype::Q4) {
                return Err(Error::unsupported(format!(
                    "--kv-dtype q4: the model has heads of {size} elements, not a multiple of {BLOCK}: choose q8"
                )));
            }
        }
        Ok(())
    }
}

/// Memory layout of one layer in a page; offsets in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub dtype: KvDtype,
    pub page_size: usize,
    pub head_dim: usize,
    /// True if values are part of the keys, so there is no V.
    pub shared: bool,
    /// Size of the Hadamard transform in elements; 1: none.
    pub hadamard: usize,
    /// Keys in a group.
    pub group: usize,
    /// Offset of the layer in a page; `head` is the distance from one head to the next.
    pub start: usize,
    pub head: usize,
    /// Offsets in a head of its K scales, then of its V and its V scales.
    pub k_scales: usize,
    pub v: usize,
    pub v_scales: usize,
}

impl Layout {
    /// Returns the layouts of all layers and the bytes of a page, or `None` if the size overflows.
    fn all(shape: &KvShape) -> Option<(Vec<Self>, usize)> {
        let mut page = 0_usize;
        let mut layers = Vec::with_capacity(shape.layers.len());
        for heads in &shape.layers {
            let layer = Self::new(shape, *heads, page)?;
            page = page.checked_add(layer.head.checked_mul(heads.count)?)?;
            layers.push(layer);
        }
        Some((layers, page))
    }

    fn new(shape: &KvShape, heads: KvHeads, start: usize) -> Option<Self> {
        let group = [16, 8, 4, 2, 1]
            .into_iter()
            .find(|group| shape.page_size.is_multiple_of(*group))?;
        let numbers = shape.page_size.checked_mul(heads.dim)?;
        let scales = if shape.dtype.has_scales() {
            shape.page_size * heads.dim.div_ceil(BLOCK) * 2
        } else {
            0
        };
        let numbers = (numbers.checked_mul(shape.dtype.bits())? / 8).checked_next_multiple_of(64)?;
        let scales = scales.next_multiple_of(64);
        let shared = shape.latent.is_some();
        let head = numbers.checked_add(scales)?.checked_mul(if shared { 1 } else { 2 })?;
        let hadamard = match shape.dtype {
            // the largest power of two that divides every head size
            KvDtype::Q4 => 1 << (heads.dim | shape.latent.unwrap_or(0)).trailing_zeros(),
            _ => 1,
        };
        Some(Self {
            dtype: shape.dtype,
            page_size: shape.page_size,
            head_dim: heads.dim,
            shared,
            hadamard,
            group,
            start,
            head,
            k_scales: numbers,
            v: numbers + scales,
            v_scales: 2 * numbers + scales,
        })
    }

    /// Returns the scales of one token's key in a head.
    pub(crate) fn blocks(&self) -> usize {
        self.head_dim.div_ceil(BLOCK)
    }

    /// Returns the bytes of the keys of `tokens` tokens in a head, without scales. The values take as many.
    #[inline(always)]
    pub(crate) fn bytes(&self, tokens: usize) -> usize {
        tokens * self.head_dim * self.dtype.bits() / 8
    }
}

/// Pool of the keys and values of all layers.
pub struct KvPool {
    shape: KvShape,
    layouts: Vec<Layout>,
    page_bytes: usize,
    memory: Reserved,
    to_f16: ToF16,
}

impl KvPool {
    /// Creates a pool of zeros whose memory is taken when written. Fails if a size is 0, unsupported or too large.
    /// Without layers its pages have no bytes.
    pub fn new(shape: KvShape) -> Result<Self> {
        let KvShape { pages, page_size, .. } = shape;
        let layers = shape.layers.len();
        if pages == 0 || page_size == 0 || shape.layers.iter().any(|heads| heads.count == 0) {
            return Err(Error::setting(format!(
                "a KV pool of {layers} layers and {pages} pages of {page_size} tokens: every size must be at least 1"
            )));
        }
        shape.check()?;
        let too_large = || {
            Error::setting(format!(
                "a KV pool of {pages} pages of {page_size} tokens does not fit into memory"
            ))
        };
        let (layouts, page_bytes) = Layout::all(&shape).ok_or_else(too_large)?;
        let bytes = page_bytes.checked_mul(pages).ok_or_else(too_large)?;
        // Vector loads of the last row may read past its end.
        let memory = bytes.checked_add(64).and_then(Reserved::new).ok_or_else(too_large)?;
        Ok(Self {
            shape,
            layouts,
            page_bytes,
            memory,
            to_f16: to_f16(),
        })
    }

    /// Zeroes a page, which must not be in use.
    pub fn clear(&mut self, page: usize) {
        assert!(page < self.shape.pages, "page {page} of {}", self.shape.pages);
        // SAFETY: a whole page within the mapping, and `&mut self` excludes other users.
        unsafe { self.head(0, page, 0).write_bytes(0, self.page_bytes) };
    }

    /// Returns the bytes of a page over all layers. They do not depend on the page's index.
    pub fn page(&self, page: usize) -> Vec<u8> {
        assert!(page < self.shape.pages, "page {page} of {}", self.shape.pages);
        // SAFETY: a whole page within the mapping; storing at the same time would break the contract of `store`.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().add(page * self.page_bytes), self.page_bytes) }
            .to_vec()
    }

    /// Overwrites a page with bytes that [`Self::page`] returned, from this pool or one of the same shape.
    pub fn put(&mut self, page: usize, bytes: &[u8]) {
        assert!(page < self.shape.pages, "page {page} of {}", self.shape.pages);
        assert_eq!(bytes.len(), self.page_bytes, "bytes of a page");
        // SAFETY: a whole page within the mapping, and `&mut self` excludes other users.
        unsafe {
            let to = self.memory.as_ptr().add(page * self.page_bytes);
            to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    /// Returns the sizes.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Returns the bytes of a page over all layers, without allocating (to size the pool); `usize::MAX` on overflow.
    pub fn page_bytes(shape: &KvShape) -> usize {
        Layout::all(shape).map_or(usize::MAX, |(_, page)| page)
    }

    #[inline(always)]
    pub(crate) fn layout(&self, layer: usize) -> &Layout {
        &self.layouts[layer]
    }

    /// Returns the address of a head's part of a page.
    ///
    /// # Safety
    /// All three indices are within the shape.
    #[inline(always)]
    pub(crate) unsafe fn head(&self, layer: usize, page: usize, head: usize) -> *mut u8 {
        let l = &self.layouts[layer];
        debug_assert!(page < self.shape.pages && head < self.shape.layers[layer].count);
        // SAFETY: within the mapping, by the contract.
        unsafe {
            self.memory
                .as_ptr()
                .add(page * self.page_bytes + l.start + head * l.head)
        }
    }

    /// Stores the keys and values of some tokens: token i goes to `slots[i]`; its keys are the `count * dim` elements
    /// from `k.add(i * stride)`, its values those from `v.add(i * stride)`, which is not read in latent attention.
    ///
    /// # Safety
    /// `k` and `v` are readable for that many elements; nothing else reads or writes these slots of this layer
    /// meanwhile. Several threads may store to different slots at once.
    ///
    /// # Panics
    /// If a slot or a layer is past the pool.
    pub unsafe fn store(&self, layer: usize, slots: &[u32], k: *const f32, v: *const f32, stride: usize) {
        let KvShape { pages, page_size, .. } = self.shape;
        let KvHeads {
            count: kv_heads,
            dim: head_dim,
        } = self.shape.layers[layer];
        for (i, &slot) in slots.iter().enumerate() {
            let (page, at) = (slot as usize / page_size, slot as usize % page_size);
            assert!(page < pages, "slot {slot} is past {pages} pages");
            for head in 0..kv_heads {
                let from = i * stride + head * head_dim;
                // SAFETY: the caller's elements are readable; page, layer and head were checked, the head's part of
                // a page has room for `page_size` tokens, and nobody else is in this slot.
                unsafe {
                    let to = self.head(layer, page, head);
                    let k = std::slice::from_raw_parts(k.add(from), head_dim);
                    let v = if self.shape.latent.is_some() {
                        &[]
                    } else {
                        std::slice::from_raw_parts(v.add(from), head_dim)
                    };
                    write_token(&self.layouts[layer], self.to_f16, to, at, k, v);
                }
            }
        }
    }
}

/// f16 NaN that replaces a key too large for the format: an infinite score could become a weight of 0 and hide it.
const NOT_A_NUMBER: u16 = 0x7e00;

/// Conversion of a slice to f16, element by element, with the results of [`f32_to_f16`].
pub(crate) type ToF16 = fn(&[f32], &mut [u16]);

/// Returns the fastest f16 conversion of this processor.
pub(crate) fn to_f16() -> ToF16 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if is_x86_feature_detected!("f16c") && is_x86_feature_detected!("avx") {
        // SAFETY: the instructions are there.
        return |x, halves| unsafe { f16c(x, halves) };
    }
    plain
}

fn plain(x: &[f32], halves: &mut [u16]) {
    for (half, x) in halves.iter_mut().zip(x) {
        *half = f32_to_f16(*x);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,f16c")]
fn f16c(x: &[f32], halves: &mut [u16]) {
    use std::arch::x86_64::{_MM_FROUND_TO_NEAREST_INT, _mm256_cvtps_ph, _mm256_loadu_ps};
    let (xs, rest) = x.as_chunks::<8>();
    let (to, rest_to) = halves.as_chunks_mut::<8>();
    for (to, x) in to.iter_mut().zip(xs) {
        // SAFETY: eight of each.
        unsafe {
            let eight = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(x.as_ptr()));
            to.as_mut_ptr()
                .cast::<std::arch::x86_64::__m128i>()
                .write_unaligned(eight);
        }
    }
    plain(rest, rest_to);
}

/// Writes one token's key and value of one head.
///
/// # Safety
/// `to` is the start of a head's part of a page that nothing else uses at offset `at`; `at` is below the page size; `k`
/// and `v` have `head_dim` elements, `v` none if there is no V.
pub(crate) unsafe fn write_token(l: &Layout, to_f16: ToF16, to: *mut u8, at: usize, k: &[f32], v: &[f32]) {
    let dim = l.head_dim;
    // Element d of the key of token `at` is at `first + d * step`.
    let (first, step) = (at / l.group * l.group * dim + at % l.group, l.group);
    // SAFETY: every place computed here is inside the head's part of the page, by the layout.
    unsafe {
        match l.dtype {
            KvDtype::F32 => {
                let (ks, vs) = (to.cast::<f32>(), to.add(l.v).cast::<f32>());
                for (d, number) in k.iter().enumerate() {
                    *ks.add(first + d * step) = if number.is_finite() { *number } else { f32::NAN };
                }
                vs.add(at * dim).copy_from_nonoverlapping(v.as_ptr(), v.len());
            }
            KvDtype::F16 => {
                let mut halves = [0; MAX_HEAD_DIM];
                let halves = &mut halves[..dim];
                to_f16(k, halves);
                let ks = to.cast::<u16>().add(first);
                for (d, half) in halves.iter().enumerate() {
                    let fits = half & 0x7c00 != 0x7c00;
                    *ks.add(d * step) = if fits { *half } else { NOT_A_NUMBER };
                }
                to_f16(v, halves);
                let vs = to.add(l.v).cast::<u16>().add(at * dim);
                vs.copy_from_nonoverlapping(halves.as_ptr(), v.len());
            }
            KvDtype::Q8 => {
                let blocks = l.blocks();
                let scales = to.add(l.k_scales).cast::<u16>();
                let scales = scales.add(at / l.group * l.group * blocks + at % l.group);
                quantize_q8(k, to.cast::<i8>().add(first), step, scales);
                let scales = to.add(l.v_scales).cast::<u16>().add(at * blocks);
                quantize_q8(v, to.add(l.v).cast::<i8>().add(at * dim), 1, scales);
            }
            KvDtype::Q4 => {
                let blocks = l.blocks();
                let scales = to.add(l.k_scales).cast::<u16>();
                let scales = scales.add(at / l.group * l.group * blocks + at % l.group);
                let first = at / l.group * l.group * dim / 2 + at % l.group;
                quantize_q4(k, l.hadamard, to.add(first), step, scales);
                let scales = to.add(l.v_scales).cast::<u16>().add(at * blocks);
                quantize_q4(v, l.hadamard, to.add(l.v + at * dim / 2), 1, scales);
            }
        }
    }
}

/// Quantizes `x` to int8 with an f16 scale for each block of 32, writing every `step`-th element.
///
/// # Safety
/// Every `step`-th element is writable: of `to` for each element of `x`, of `scales` for each block.
unsafe fn quantize_q8(x: &[f32], to: *mut i8, step: usize, scales: *mut u16) {
    for (b, block) in x.chunks(BLOCK).enumerate() {
        let mut max = 0.0f32;
        for &x in block {
            // A NaN must stay one: it makes the scale NaN.
            max = if x.abs() > max || x.is_nan() { x.abs() } else { max };
        }
        let scale = f32_to_f16(max / 127.0);
        let d = f16_to_f32(scale);
        let inverse = if d > 0.0 { 1.0 / d } else { 0.0 };
        // SAFETY: upheld by the caller.
        unsafe {
            *scales.add(b * step) = scale;
            for (i, &x) in block.iter().enumerate() {
                let q = (x * inverse).round_ties_even().clamp(-127.0, 127.0);
                *to.add((b * BLOCK + i) * step) = q as i8;
            }
        }
    }
}

/// Hadamard-transforms `x` and quantizes it to 4 bits: byte i of 16 holds elements i and 16 + i of a block, plus 8.
///
/// # Safety
/// `x` is whole blocks. Every `step`-th byte of `to` is writable for two of its elements, of `scales` for each block.
unsafe fn quantize_q4(x: &[f32], hadamard: usize, to: *mut u8, step: usize, scales: *mut u16) {
    const HALF: usize = BLOCK / 2;
    let mut numbers = [0.0; MAX_HEAD_DIM];
    let numbers = &mut numbers[..x.len()];
    numbers.copy_from_slice(x);
    plain::hadamard_transform(numbers, hadamard);
    for (b, block) in numbers.as_chunks::<BLOCK>().0.iter().enumerate() {
        let (scale, codes) = plain::quantize_q4(block);
        // SAFETY: upheld by the caller.
        unsafe {
            *scales.add(b * step) = scale;
            for i in 0..HALF {
                *to.add((b * HALF + i) * step) = codes[i] | codes[HALF + i] << 4;
            }
        }
    }
}
