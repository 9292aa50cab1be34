//! Matmul kernels on AMX tiles; everything else uses the AVX-512 kernels.
//!
//! int8 results have the same bits as on every instruction set (`shares`). Other matmuls (also `bf16`) sum in their own
//! order, the same for every number of rows: a row's bits depend on the row alone, but differ from other sets'.
//!
//! Invariants: no tile outlives a matmul; f32 activations lose nothing when split into bf16.

mod bf16;
mod expand;
mod shares;
mod tile;

use std::ops::Range;

use super::place::{by_kind, like};
use super::{ActsPtr, Mode, Product, Table, avx512};
use crate::Kind;

pub(super) use tile::missing;

pub(super) static TABLE: Table = Table {
    prepare,
    matmul,
    rms_norm: avx512::TABLE.rms_norm,
    silu_mul: avx512::TABLE.silu_mul,
    gelu_mul: avx512::TABLE.gelu_mul,
    add: avx512::TABLE.add,
    rotate: avx512::TABLE.rotate,
    argmax: avx512::TABLE.argmax,
    finite: avx512::TABLE.finite,
};

/// Function table for decode rows.
pub(super) static DECODING: Table = Table {
    prepare: prepare_decoding,
    matmul: matmul_decoding,
    rms_norm: avx512::TABLE.rms_norm,
    silu_mul: avx512::TABLE.silu_mul,
    gelu_mul: avx512::TABLE.gelu_mul,
    add: avx512::TABLE.add,
    rotate: avx512::TABLE.rotate,
    argmax: avx512::TABLE.argmax,
    finite: avx512::TABLE.finite,
};

/// Number of rows from which byte tiles are faster than vectors (the bits are the same).
const INT8_ROWS: usize = 16;

/// Prepares a row of activations for tiles: bf16 parts and bytes.
unsafe fn prepare(x: *const f32, acts: ActsPtr, row: usize, blocks: Range<usize>) {
    // SAFETY: upheld by the caller; the CPU has AVX-512.
    unsafe { avx512::small::prepare_as::<false, true>(x, acts, row, blocks) }
}

/// Prepares a decode row as bf16 parts (for tiles, if weights are bf16) and as f32 (for vectors, otherwise).
unsafe fn prepare_decoding(x: *const f32, acts: ActsPtr, row: usize, blocks: Range<usize>) {
    // SAFETY: as above.
    unsafe { avx512::small::prepare_as::<true, true>(x, acts, row, blocks) }
}

/// Multiplies decode rows. For few rows AVX-512 is faster than tiles, except for bf16 weights, which are stored as
/// tiles; int8 results have the same bits in either.
unsafe fn matmul_decoding(p: &Product<'_>) {
    // SAFETY: upheld by the caller; the table is only for CPUs with tiles.
    unsafe {
        if p.acts.mode.int8_with(p.w.kind()) || p.w.kind() == Kind::BF16 {
            matmul(p);
        } else {
            (avx512::TABLE.matmul)(p);
        }
    }
}

unsafe fn matmul(p: &Product<'_>) {
    // SAFETY: upheld by the caller; the table is only for CPUs with tiles.
    unsafe {
        let int8 = p.acts.mode.int8_with(p.w.kind());
        match p.acts.mode {
            _ if int8 && p.rows.len() < INT8_ROWS => (avx512::TABLE.matmul)(p), // the same bits
            Mode::Bf16 => bf16::rounded(p),
            _ => by_kind!(
                p.w.kind(),
                KIND,
                match int8 {
                    true => shares::matmul::<KIND, { like(KIND) }, true>(p),
                    false => shares::matmul::<KIND, { like(KIND) }, false>(p),
                },
                bf16::exact::<KIND, { bf16::parts_of(KIND) }>(p)
            ),
        }
    }
}

#[cfg(test)]
mod tests;
