//! Weights times values for rows that see different positions of a chunk.
//!
//! Invariants: a row goes through its positions in order and through no others.

use super::kernel::{At, TALLEST, product};
use super::lanes::Lanes;

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
