//! Kernels of attention over chunks of keys, written once over [`Lanes`].
//!
//! Invariants: each element is computed by one sequence of operations, whatever rows and columns are computed with it:
//! a matmul sums over its inner index in order, one fused multiply-add each; a row of scores by lanes, then by a tree.

use crate::lanes::{LANES, Lanes, OnLanes, exp2, exp2_one};

/// Positions in a chunk. A row's softmax is computed chunk by chunk, so this constant affects the results' bits.
pub(super) const CHUNK: usize = 128;

/// Matrix in memory: a pointer to its first element (`at`) and the elements from one row to the next (`ld`).
#[derive(Clone, Copy)]
pub(super) struct Strided<T> {
    pub at: T,
    pub ld: usize,
}

/// Right operand of a matmul: one row of 16-element vectors for each step of the inner index.
pub(super) trait RightOperand: Copy {
    /// Element type in memory (`f32`, or `u16` for f16).
    type Element: Copy;

    /// Returns the operand without its first `n` vectors.
    ///
    /// # Safety
    /// The operand has at least `n` vectors.
    unsafe fn skip(self, n: usize) -> Self;
    /// Returns the addresses of the first row's first N vectors, and those to prefetch along with them, if any.
    ///
    /// # Safety
    /// The operand has at least N vectors.
    unsafe fn first<const N: usize>(self) -> ([*const Self::Element; N], Option<[*const Self::Element; N]>);
    /// Returns the elements from one row to the next.
    fn step(self) -> usize;
    /// Loads 16 elements at `at` as f32.
    ///
    /// # Safety
    /// 16 elements are readable at `at`, and the processor has the instructions of `V`.
    unsafe fn load<V: Lanes>(at: *const Self::Element) -> V;
}

impl RightOperand for Strided<*const f32> {
    type Element = f32;

    #[inline(always)]
    unsafe fn skip(self, n: usize) -> Self {
        // SAFETY: upheld by the caller.
        let at = unsafe { self.at.add(n * LANES) };
        Self { at, ..self }
    }
    #[inline(always)]
    unsafe fn first<const N: usize>(self) -> ([*const f32; N], Option<[*const f32; N]>) {
        // SAFETY: upheld by the caller.
        (std::array::from_fn(|n| unsafe { self.at.add(n * LANES) }), None)
    }
    #[inline(always)]
    fn step(self) -> usize {
        self.ld
    }
    #[inline(always)]
    unsafe fn load<V: Lanes>(at: *const f32) -> V {
        // SAFETY: upheld by the caller.
        unsafe { V::load(at) }
    }
}

/// Right operand of f16 vectors as stored in the KV pool, since converting them first does not pay for few rows.
/// Element 0 of row i of vector n is at `from[n] + i * step`. With each row the matmul prefetches row i of `ahead`.
#[derive(Clone, Copy)]
pub(super) struct F16Vectors<'a> {
    pub from: &'a [*const u16],
    pub ahead: &'a [*const u16],
    pub step: usize,
}

impl RightOperand for F16Vectors<'_> {
    type Element = u16;

    #[inline(always)]
    unsafe fn skip(self, n: usize) -> Self {
        let (from, ahead) = (&self.from[n..], &self.ahead[n..]);
        Self { from, ahead, ..self }
    }
    #[inline(always)]
    unsafe fn first<const N: usize>(self) -> ([*const u16; N], Option<[*const u16; N]>) {
        let (from, ahead) = (&self.from[..N], &self.ahead[..N]);
        (
            std::array::from_fn(|n| from[n]),
            Some(std::array::from_fn(|n| ahead[n])),
        )
    }
    #[inline(always)]
    fn step(self) -> usize {
        self.step
    }
    #[inline(always)]
    unsafe fn load<V: Lanes>(at: *const u16) -> V {
        // SAFETY: upheld by the caller.
        unsafe { V::load_f16(at) }
    }
}

/// Matmul `c[r][16 * n ..] = (more ? c : 0) + sum over i < k, in order, of a[r][i] * b[i][16 * n ..]`.
pub(super) struct Matmul<B> {
    pub a: Strided<*const f32>,
    pub b: B,
    pub k: usize,
    pub c: Strided<*mut f32>,
    pub rows: usize,
    pub vectors: usize,
    pub more: bool,
}

impl<B: RightOperand> Matmul<B> {
    /// Returns the matmul restricted to the `rows` rows from `r` and the vectors from `n`, which must lie within it.
    #[inline(always)]
    unsafe fn part(&self, (r, rows): (usize, usize), n: usize) -> Self {
        // SAFETY: upheld by the caller: the rows and vectors are within this matmul.
        let (a, b, c) = unsafe {
            (
                self.a.at.add(r * self.a.ld),
                self.b.skip(n),
                self.c.at.add(r * self.c.ld + n * LANES),
            )
        };
        Self {
            a: Strided { at: a, ..self.a },
            b,
            c: Strided { at: c, ..self.c },
            rows,
            ..*self
        }
    }

    /// Computes the matmul for exactly R rows and N vectors, with the sums in registers.
    #[inline(always)]
    unsafe fn tile<V: Lanes, const R: usize, const N: usize>(self) {
        let Self { a, b, k, c, more, .. } = self;
        // SAFETY: upheld by the caller.
        unsafe {
            let mut sums = [[V::splat(0.0); N]; R];
            if more {
                for (r, row) in sums.iter_mut().enumerate() {
                    for (n, sum) in row.iter_mut().enumerate() {
                        *sum = V::load(c.at.add(r * c.ld + n * LANES));
                    }
                }
            }
            let (from, ahead) = b.first::<N>();
            for i in 0..k {
                let mut right = [V::splat(0.0); N];
                for (n, right) in right.iter_mut().enumerate() {
                    *right = B::load(from[n].add(i * b.step()));
                    if let Some(ahead) = ahead {
                        V::prefetch(ahead[n].wrapping_add(i * b.step()).cast());
                    }
                }
                for (r, row) in sums.iter_mut().enumerate() {
                    let left = V::splat(*a.at.add(r * a.ld + i));
                    for (n, sum) in row.iter_mut().enumerate() {
                        *sum = right[n].fma(left, *sum);
                    }
                }
            }
            for (r, row) in sums.iter().enumerate() {
                for (n, sum) in row.iter().enumerate() {
                    sum.store(c.at.add(r * c.ld + n * LANES));
                }
            }
        }
    }

    /// Computes the matmul for `self.rows` rows (at most [`MAX_TILE_ROWS`]) of N vectors.
    #[inline(always)]
    unsafe fn rows_of<V: Lanes, const N: usize>(self) {
        // SAFETY: upheld by the caller.
        unsafe {
            match self.rows {
                1 => self.tile::<V, 1, N>(),
                2 => self.tile::<V, 2, N>(),
                3 => self.tile::<V, 3, N>(),
                4 => self.tile::<V, 4, N>(),
                5 => self.tile::<V, 5, N>(),
                6 => self.tile::<V, 6, N>(),
                _ => {}
            }
        }
    }
}

/// Rows of the largest matmul tile.
pub(super) const MAX_TILE_ROWS: usize = 6;

impl<B: RightOperand> OnLanes for Matmul<B> {
    /// Computes the whole matmul, tile by tile.
    ///
    /// # Safety
    /// The three matrices have the sizes given; the processor has the instructions of `V`.
    #[inline(always)]
    unsafe fn on<V: Lanes>(self) {
        let mut n = 0;
        while n < self.vectors {
            let wide = match self.vectors - n {
                4.. if V::ACCUMULATORS >= 24 || self.rows == 1 => 4,
                2.. if V::ACCUMULATORS >= 24 || self.rows < 4 => 2,
                _ => 1,
            };
            let most = (V::ACCUMULATORS / wide).clamp(1, MAX_TILE_ROWS);
            let mut r = 0;
            while r < self.rows {
                let tall = most.min(self.rows - r);
                // SAFETY: rows r..r + tall and vectors n..n + wide are within the caller's matrices.
                unsafe {
                    let part = self.part((r, tall), n);
                    match wide {
                        4 => part.rows_of::<V, 4>(),
                        2 => part.rows_of::<V, 2>(),
                        _ => part.rows_of::<V, 1>(),
                    }
                }
                r += tall;
            }
            n += wide;
        }
    }
}

/// Replaces the scores `from..to` of a chunk (logarithms to base 2) by the weights 2^(score - largest) in place; the
/// other elements of their vectors become 0. Returns the largest score and the sum of the weights.
///
/// # Safety
/// `scores` has [`CHUNK`] elements, `from < to <= CHUNK`; the processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn softmax_weights<V: Lanes>(scores: *mut f32, from: usize, to: usize) -> (f32, f32) {
    let vectors = from / LANES..to.div_ceil(LANES);
    // SAFETY: the vectors are within the chunk.
    unsafe {
        let nothing = V::splat(f32::NEG_INFINITY);
        let mut most = nothing;
        for i in vectors.clone() {
            let at = scores.add(i * LANES);
            let mut x = V::load(at);
            let (first, end) = (i * LANES, (i + 1) * LANES);
            if from > first || to < end {
                x = x.keep(from.max(first) - first, to.min(end) - first, nothing);
                x.store(at);
            }
            most = x.max(most);
        }
        let most = most.largest();
        let shift = V::splat(most);
        let mut sum = V::splat(0.0);
        for i in vectors {
            let at = scores.add(i * LANES);
            let weight = exp2(V::load(at).sub(shift));
            weight.store(at);
            sum = sum.add(weight);
        }
        (most, sum.total())
    }
}

/// Online softmax state of a row after some chunks, without the weighted values: the largest score, the sum of weights.
#[derive(Clone, Copy, Debug)]
pub(super) struct Softmax {
    pub most: f32,
    pub sum: f32,
}

/// Merges the next chunk into the chunks so far: `values = values * 2^(before.most - m) + chunk * 2^(next.most - m)`, m
/// being the larger `most`. Returns the merged softmax state.
///
/// # Safety
/// `values` and `chunk` have `vectors` vectors; the processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn merge_chunk<V: Lanes>(
    before: Softmax,
    values: *mut f32,
    next: Softmax,
    chunk: *const f32,
    vectors: usize,
) -> Softmax {
    let most = if before.most > next.most {
        before.most
    } else {
        next.most
    };
    let (old, new) = (exp2_one(before.most - most), exp2_one(next.most - most));
    // SAFETY: upheld by the caller.
    unsafe {
        let (a, b) = (V::splat(old), V::splat(new));
        for i in 0..vectors {
            let at = values.add(i * LANES);
            let x = V::load(at).mul(a);
            V::load(chunk.add(i * LANES)).fma(b, x).store(at);
        }
    }
    Softmax {
        most,
        sum: next.sum.mul_add(new, before.sum * old),
    }
}

/// Divides `values` by the sum of weights and writes `count` elements to `out`.
///
/// # Safety
/// `values` has whole vectors for `count` elements, `out` has `count`; the processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn normalize<V: Lanes>(sums: Softmax, values: *const f32, out: *mut f32, count: usize) {
    let inverse = 1.0 / sums.sum;
    // SAFETY: upheld by the caller.
    unsafe {
        let by = V::splat(inverse);
        for i in 0..count / LANES {
            V::load(values.add(i * LANES)).mul(by).store(out.add(i * LANES));
        }
        for i in count / LANES * LANES..count {
            *out.add(i) = *values.add(i) * inverse;
        }
    }
}

/// Multiplies the weights `from..to` of each row by those rows of `b`; writes the sums to `c`, or adds them if `more`.
///
/// # Safety
/// The matrices have the sizes that [`Matmul`] requires, for a chunk; the processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn span<V: Lanes>(
    a: Strided<*const f32>,
    b: Strided<*const f32>,
    (from, to): (usize, usize),
    c: Strided<*mut f32>,
    (rows, vectors): (usize, usize),
    more: bool,
) {
    // SAFETY: upheld by the caller.
    unsafe {
        let a = Strided {
            at: a.at.add(from),
            ld: a.ld,
        };
        let b = Strided {
            at: b.at.add(from * b.ld),
            ld: b.ld,
        };
        let k = to - from;
        V::run(Matmul {
            a,
            b,
            k,
            c,
            rows,
            vectors,
            more,
        });
    }
}

/// Computes [`span`] for rows with different `limits`. Positions common to [`MAX_TILE_ROWS`] rows are one matmul; those
/// before and after are added row by row, so each row goes through its own positions in order.
///
/// # Safety
/// The conditions of [`span`] hold.
#[inline(always)]
pub(super) unsafe fn ragged<V: Lanes>(
    a: Strided<*const f32>,
    b: Strided<*const f32>,
    c: Strided<*mut f32>,
    (rows, vectors): (usize, usize),
    limits: impl Fn(usize) -> (usize, usize),
) {
    let mut start = 0;
    while start < rows {
        let tall = MAX_TILE_ROWS.min(rows - start);
        let from = (start..start + tall).map(|r| limits(r).0).max().unwrap_or(0);
        let to = (start..start + tall).map(|r| limits(r).1).min().unwrap_or(0);
        // SAFETY: rows start..start + tall exist, by the caller's contract.
        unsafe {
            let row = |r: usize| {
                let a = Strided {
                    at: a.at.add(r * a.ld),
                    ld: a.ld,
                };
                (
                    a,
                    Strided {
                        at: c.at.add(r * c.ld),
                        ld: c.ld,
                    },
                )
            };
            if from >= to {
                for r in start..start + tall {
                    let (a, c) = row(r);
                    span::<V>(a, b, limits(r), c, (1, vectors), false);
                }
            } else {
                let mut more = false;
                for r in start..start + tall {
                    let ((a, c), lo) = (row(r), limits(r).0);
                    if from > lo || tall > 1 {
                        span::<V>(a, b, (lo, from), c, (1, vectors), false);
                        more = true;
                    }
                }
                let (first, sums) = row(start);
                span::<V>(first, b, (from, to), sums, (tall, vectors), more);
                for r in start..start + tall {
                    let ((a, c), hi) = (row(r), limits(r).1);
                    if hi > to {
                        span::<V>(a, b, (to, hi), c, (1, vectors), true);
                    }
                }
            }
        }
        start += tall;
    }
}
