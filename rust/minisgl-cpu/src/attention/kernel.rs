//! The kernels of attention over chunks of keys, written once over [`Lanes`].
//!
//! Invariants: each number is one sequence of operations, whatever rows and columns are computed with it: a product sums
//! over its inner index in order, one fused multiply-add each; a row of scores is reduced lane by lane, then by a tree.

use super::lanes::{LANES, Lanes, exp2, exp2_one};

/// Positions of a chunk. A row's softmax goes chunk by chunk, so this is part of the numbers.
pub(super) const CHUNK: usize = 128;

/// A matrix in memory: its first number and the numbers from one row to the next.
#[derive(Clone, Copy)]
pub(super) struct At<T> {
    pub at: T,
    pub ld: usize,
}

/// `c[r][16 * n ..] = (more ? c : 0) + sum over i < k, in order, of a[r][i] * b[i][16 * n ..]` for R rows and N vectors.
///
/// # Safety
/// The three matrices have these sizes; the processor has the instructions of `V`.
#[inline(always)]
unsafe fn tile<V: Lanes, const R: usize, const N: usize>(
    a: At<*const f32>,
    b: At<*const f32>,
    k: usize,
    c: At<*mut f32>,
    more: bool,
) {
    // SAFETY: the caller's word.
    unsafe {
        let mut sums = [[V::splat(0.0); N]; R];
        if more {
            for (r, row) in sums.iter_mut().enumerate() {
                for (n, sum) in row.iter_mut().enumerate() {
                    *sum = V::load(c.at.add(r * c.ld + n * LANES));
                }
            }
        }
        for i in 0..k {
            let mut right = [V::splat(0.0); N];
            for (n, right) in right.iter_mut().enumerate() {
                *right = V::load(b.at.add(i * b.ld + n * LANES));
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

/// Rows of the tallest tile.
pub(super) const TALLEST: usize = 6;

/// [`tile`] for `rows` rows (up to [`TALLEST`]) of N vectors.
#[inline(always)]
unsafe fn rows_of<V: Lanes, const N: usize>(
    rows: usize,
    a: At<*const f32>,
    b: At<*const f32>,
    k: usize,
    c: At<*mut f32>,
    more: bool,
) {
    // SAFETY: the caller's word.
    unsafe {
        match rows {
            1 => tile::<V, 1, N>(a, b, k, c, more),
            2 => tile::<V, 2, N>(a, b, k, c, more),
            3 => tile::<V, 3, N>(a, b, k, c, more),
            4 => tile::<V, 4, N>(a, b, k, c, more),
            5 => tile::<V, 5, N>(a, b, k, c, more),
            6 => tile::<V, 6, N>(a, b, k, c, more),
            _ => {}
        }
    }
}

/// The product of [`tile`] for any number of rows and of vectors.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
pub(super) unsafe fn product<V: Lanes>(
    a: At<*const f32>,
    b: At<*const f32>,
    k: usize,
    c: At<*mut f32>,
    (rows, vectors): (usize, usize),
    more: bool,
) {
    let mut n = 0;
    while n < vectors {
        let wide = match vectors - n {
            4.. if V::ACCUMULATORS >= 24 || rows == 1 => 4,
            2.. if V::ACCUMULATORS >= 24 || rows < 4 => 2,
            _ => 1,
        };
        let most = (V::ACCUMULATORS / wide).clamp(1, TALLEST);
        let mut r = 0;
        while r < rows {
            let tall = most.min(rows - r);
            // SAFETY: rows r..r + tall and vectors n..n + wide are within what the caller gave.
            unsafe {
                let a = At {
                    at: a.at.add(r * a.ld),
                    ld: a.ld,
                };
                let b = At {
                    at: b.at.add(n * LANES),
                    ld: b.ld,
                };
                let c = At {
                    at: c.at.add(r * c.ld + n * LANES),
                    ld: c.ld,
                };
                match wide {
                    4 => rows_of::<V, 4>(tall, a, b, k, c, more),
                    2 => rows_of::<V, 2>(tall, a, b, k, c, more),
                    _ => rows_of::<V, 1>(tall, a, b, k, c, more),
                }
            }
            r += tall;
        }
        n += wide;
    }
}

/// Vectors of halves on the right of a product: number 0 of row i of vector n is at `from[n] + i * step`. With each row
/// the product prefetches the same row of `ahead`, which is read later.
#[derive(Clone, Copy)]
pub(super) struct Halves<'a> {
    pub from: &'a [*const u16],
    pub ahead: &'a [*const u16],
    pub step: usize,
}

/// [`tile`] with halves on the right.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn half_tile<V: Lanes, const R: usize, const N: usize>(
    a: At<*const f32>,
    b: Halves<'_>,
    k: usize,
    c: At<*mut f32>,
    more: bool,
) {
    // SAFETY: the caller's word.
    unsafe {
        let mut sums = [[V::splat(0.0); N]; R];
        if more {
            for (r, row) in sums.iter_mut().enumerate() {
                for (n, sum) in row.iter_mut().enumerate() {
                    *sum = V::load(c.at.add(r * c.ld + n * LANES));
                }
            }
        }
        let (mut from, mut ahead) = ([b.from[0]; N], [b.from[0]; N]);
        from.copy_from_slice(&b.from[..N]);
        ahead.copy_from_slice(&b.ahead[..N]);
        for i in 0..k {
            let mut right = [V::splat(0.0); N];
            for (n, right) in right.iter_mut().enumerate() {
                *right = V::load_f16(from[n].add(i * b.step));
                V::prefetch(ahead[n].wrapping_add(i * b.step).cast());
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

/// [`half_tile`] for `rows` rows (up to [`TALLEST`]) of N vectors.
#[inline(always)]
unsafe fn half_rows<V: Lanes, const N: usize>(
    rows: usize,
    a: At<*const f32>,
    b: Halves<'_>,
    k: usize,
    c: At<*mut f32>,
    more: bool,
) {
    // SAFETY: the caller's word.
    unsafe {
        match rows {
            1 => half_tile::<V, 1, N>(a, b, k, c, more),
            2 => half_tile::<V, 2, N>(a, b, k, c, more),
            3 => half_tile::<V, 3, N>(a, b, k, c, more),
            4 => half_tile::<V, 4, N>(a, b, k, c, more),
            5 => half_tile::<V, 5, N>(a, b, k, c, more),
            6 => half_tile::<V, 6, N>(a, b, k, c, more),
            _ => {}
        }
    }
}

/// [`product`] for up to [`TALLEST`] rows with halves on the right, as they lie in the pool: for so few rows converting
/// them first costs more than it saves. The numbers are the same.
///
/// # Safety
/// As [`half_tile`], a pointer for each vector.
#[inline(always)]
pub(super) unsafe fn half_product<V: Lanes>(
    a: At<*const f32>,
    b: Halves<'_>,
    k: usize,
    c: At<*mut f32>,
    rows: usize,
    more: bool,
) {
    let (mut n, vectors) = (0, b.from.len());
    while n < vectors {
        let wide = match vectors - n {
            4.. if V::ACCUMULATORS >= 24 || rows == 1 => 4,
            2.. if V::ACCUMULATORS >= 24 || rows < 4 => 2,
            _ => 1,
        };
        // SAFETY: vectors n..n + wide are within what the caller gave.
        unsafe {
            let b = Halves {
                from: &b.from[n..],
                ahead: &b.ahead[n..],
                ..b
            };
            let c = At {
                at: c.at.add(n * LANES),
                ld: c.ld,
            };
            match wide {
                4 => half_rows::<V, 4>(rows, a, b, k, c, more),
                2 => half_rows::<V, 2>(rows, a, b, k, c, more),
                _ => half_rows::<V, 1>(rows, a, b, k, c, more),
            }
        }
        n += wide;
    }
}

/// Turn the scores `from..to` of a chunk (logarithms to base 2) into weights 2^(score - largest), in place; the other
/// places of their vectors become 0. Gives the largest and the sum.
///
/// # Safety
/// `scores` has [`CHUNK`] numbers, `from < to <= CHUNK`; the processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn weights<V: Lanes>(scores: *mut f32, from: usize, to: usize) -> (f32, f32) {
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

/// What is known of a row after some chunks: the largest score and the sum of weights; the weighted sum of values lies
/// elsewhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    pub most: f32,
    pub sum: f32,
}

/// Join the next chunk to what came before: `values = values * 2^(most - m) + chunk * 2^(chunk's most - m)`.
///
/// # Safety
/// `values` and `chunk` have `vectors` vectors; the processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn fold<V: Lanes>(
    before: Sums,
    values: *mut f32,
    next: Sums,
    chunk: *const f32,
    vectors: usize,
) -> Sums {
    let most = if before.most > next.most {
        before.most
    } else {
        next.most
    };
    let (old, new) = (exp2_one(before.most - most), exp2_one(next.most - most));
    // SAFETY: the caller's word.
    unsafe {
        let (a, b) = (V::splat(old), V::splat(new));
        for i in 0..vectors {
            let at = values.add(i * LANES);
            let x = V::load(at).mul(a);
            V::load(chunk.add(i * LANES)).fma(b, x).store(at);
        }
    }
    Sums {
        most,
        sum: next.sum.mul_add(new, before.sum * old),
    }
}

/// Divide by the sum of weights and write `count` numbers.
///
/// # Safety
/// `values` has whole vectors for `count` numbers, `out` has `count`; the processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn finish<V: Lanes>(sums: Sums, values: *const f32, out: *mut f32, count: usize) {
    let inverse = 1.0 / sums.sum;
    // SAFETY: the caller's word.
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

/// Weights `from..to` of each row times those values.
///
/// # Safety
/// As [`product`], for a chunk.
#[inline(always)]
pub(super) unsafe fn span<V: Lanes>(
    a: At<*const f32>,
    b: At<*const f32>,
    (from, to): (usize, usize),
    c: At<*mut f32>,
    size: (usize, usize),
    more: bool,
) {
    // SAFETY: the caller's word.
    unsafe {
        let a = At {
            at: a.at.add(from),
            ld: a.ld,
        };
        let b = At {
            at: b.at.add(from * b.ld),
            ld: b.ld,
        };
        product::<V>(a, b, to - from, c, size, more);
    }
}

/// [`span`] for rows of which each has limits of its own: few rows at once have most positions in common; what comes before
/// and after is added row by row, so that each row still goes through its positions in order and through no others.
///
/// # Safety
/// As [`span`].
#[inline(always)]
pub(super) unsafe fn ragged<V: Lanes>(
    a: At<*const f32>,
    b: At<*const f32>,
    c: At<*mut f32>,
    (rows, vectors): (usize, usize),
    limits: impl Fn(usize) -> (usize, usize),
) {
    let mut start = 0;
    while start < rows {
        let tall = TALLEST.min(rows - start);
        let from = (start..start + tall).map(|r| limits(r).0).max().unwrap_or(0);
        let to = (start..start + tall).map(|r| limits(r).1).min().unwrap_or(0);
        // SAFETY: rows start..start + tall are the caller's.
        unsafe {
            let row = |r: usize| {
                let a = At {
                    at: a.at.add(r * a.ld),
                    ld: a.ld,
                };
                (
                    a,
                    At {
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
