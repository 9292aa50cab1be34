//! Products on AMX tiles; everything else as AVX-512 does it.
//!
//! int8: the same bits as everywhere (`int8`). Other products have an order of sums of their own (`bf16`), and it is
//! the same for every number of rows: a row's bits depend on the row alone, but are not those of other instruction sets.
//!
//! Keeps true: no tile outlives a product; activations of f32 lose nothing on their way into bf16.
//! Doesn't know: threads.

mod bf16;
mod expand;
mod int8;
mod tile;

use std::arch::x86_64::*;
use std::cell::RefCell;

use super::{ActsPtr, Product, Table, avx512};
use crate::weights::memory::Zeroed;
use crate::weights::{BLOCK, Form};
use expand::UPPER;

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
const EXPANDED: usize = 768 << 10;
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

/// Writes a prepared row as sums of up to three: what the upper halves of f32 hold of the number, of the rest, of its
/// rest.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn split(acts: ActsPtr, row: usize) {
    let upper = _mm512_set1_epi32(UPPER);
    let parts = acts.mode.parts();
    for b in 0..acts.blocks() {
        let cell = b * acts.rows + row;
        for half in 0..2 {
            // SAFETY: the caller's: the row is prepared, and its own.
            unsafe {
                let mut rest = _mm512_loadu_ps(acts.x.add(cell * BLOCK + 16 * half));
                for part in 0..parts {
                    let bits = _mm512_and_si512(_mm512_castps_si512(rest), upper);
                    rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(bits));
                    let to = acts.parts.add((cell * parts + part) * BLOCK + 16 * half);
                    let words = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(bits));
                    _mm256_storeu_si256(to.cast(), words);
                }
            }
        }
    }
}

/// Few rows of AVX-512 are faster than tiles, but where the weights are tiles as they lie.
unsafe fn matmul_decoding(p: &Product<'_>) {
    // SAFETY: the caller's; the table is only for CPUs with tiles.
    unsafe {
        if p.acts.mode.int8_with(p.w.form()) || p.w.form() == Form::Bf16 {
            matmul(p);
        } else {
            (avx512::TABLE.matmul)(p);
        }
    }
}

unsafe fn matmul(p: &Product<'_>) {
    // SAFETY: the caller's; the table is only for CPUs with tiles.
    unsafe {
        match (p.acts.mode.int8_with(p.w.form()), p.w.form()) {
            (true, _) if p.rows.len() < INT8_ROWS => (avx512::TABLE.matmul)(p),
            (true, Form::Q4) => int8::matmul::<true>(p),
            (true, _) => int8::matmul::<false>(p),
            (false, _) => bf16::matmul(p),
        }
    }
}

thread_local! {
    /// Sums of a group, what waits to be added to them, weights as tiles.
    static SCRATCH: RefCell<Zeroed> = RefCell::new(Zeroed::new(0));
}

#[cfg(test)]
mod tests;
