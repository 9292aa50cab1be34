//! Products on AMX tiles; everything else as AVX-512 does it.
//!
//! int8: the same bits as everywhere (`shares`). Other products have an order of sums of their own (also `bf16`), and it is
//! the same for every number of rows: a row's bits depend on the row alone, but are not those of other instruction sets.
//!
//! Invariants: no tile outlives a product; activations of f32 lose nothing on their way into bf16.

mod bf16;
mod expand;
mod shares;
mod tile;

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

/// For rows that decode.
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

/// Rows from which on tiles of bytes are faster than vectors (the bits are the same).
const INT8_ROWS: usize = 16;

/// Tiles take parts and bytes.
unsafe fn prepare(x: *const f32, acts: ActsPtr, row: usize) {
    // SAFETY: the caller's; the CPU has AVX-512.
    unsafe { avx512::small::prepare_as::<false, true>(x, acts, row) }
}

/// Tiles where weights are bf16, vectors otherwise.
unsafe fn prepare_decoding(x: *const f32, acts: ActsPtr, row: usize) {
    // SAFETY: as above.
    unsafe { avx512::small::prepare_as::<true, true>(x, acts, row) }
}

/// Few rows of AVX-512 are faster than tiles, but where weights are bf16, which are tiles as they lie; many rows of bytes have
/// the same bits in either.
unsafe fn matmul_decoding(p: &Product<'_>) {
    // SAFETY: the caller's; the table is only for CPUs with tiles.
    unsafe {
        if p.acts.mode.int8_with(p.w.kind()) || p.w.kind() == Kind::BF16 {
            matmul(p);
        } else {
            (avx512::TABLE.matmul)(p);
        }
    }
}

unsafe fn matmul(p: &Product<'_>) {
    // SAFETY: the caller's; the table is only for CPUs with tiles.
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
