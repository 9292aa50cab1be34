//! Matrix products for 128-bit vectors of ARM: plain loops over 16 lanes, which the compiler turns into vectors (a
//! fused multiply-add is an instruction of every 64-bit ARM). No instruction is named here, so tests run it anywhere.
//!
//! Invariants: the operations of `scalar`, in its order, in every lane.

#![allow(clippy::needless_range_loop)] // lanes of several arrays at once

use super::scalar::{self, q4_input};
use super::{ActsPtr, Product, Table};
use crate::files::blocks::{bf16_to_f32, f16_to_f32};
use crate::weights::{BLOCK, Form, PANEL};

/// A number for each of a panel's 16 rows.
type Lanes<T> = [T; PANEL];

/// Rows of activations by which a block is multiplied once it is unpacked.
const ROWS: usize = 4;

pub(super) static TABLE: Table = Table {
    prepare: scalar::TABLE.prepare,
    matmul,
    rms_norm: scalar::TABLE.rms_norm,
    silu_mul: scalar::TABLE.silu_mul,
    gelu_mul: scalar::TABLE.gelu_mul,
    add: scalar::TABLE.add,
    rotate: scalar::TABLE.rotate,
    argmax: scalar::TABLE.argmax,
    finite: scalar::TABLE.finite,
};

unsafe fn matmul(p: &Product<'_>) {
    for panel in p.panels.clone() {
        for first in p.rows.clone().step_by(ROWS) {
            let rows = ROWS.min(p.rows.end - first);
            // SAFETY: the caller's: the rows are prepared, `out` has room.
            unsafe {
                let mut sums = [[0.0; PANEL]; ROWS];
                if p.acts.mode.int8_with(p.w.form()) {
                    int8(p, panel, first, &mut sums[..rows]);
                } else {
                    exact(p, panel, first, &mut sums[..rows]);
                }
                for (row, sums) in (first..).zip(&sums[..rows]) {
                    put(p, panel, row, sums);
                }
            }
        }
    }
}

/// Puts (or adds) a panel's 16 sums to where they go.
unsafe fn put(p: &Product<'_>, panel: usize, row: usize, sums: &Lanes<f32>) {
    let at = (row - p.rows.start) * p.stride + (panel - p.panels.start) * PANEL;
    // SAFETY: the caller's: `out` has room for every row and panel of the product.
    let out = unsafe { &mut *p.out.add(at).cast::<Lanes<f32>>() };
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = if p.add { *out + sum } else { *sum };
    }
}

/// Products of a panel with rows of f32, from row `first` on.
unsafe fn exact(p: &Product<'_>, panel: usize, first: usize, sums: &mut [Lanes<f32>]) {
    let form = p.w.form();
    let blocks = p.w.panel(panel).chunks_exact(form.block_bytes());
    for (b, block) in blocks.enumerate() {
        let w = unpack(form, block);
        for (row, acc) in (first..).zip(sums.iter_mut()) {
            // SAFETY: the caller's: the row is prepared.
            let (x, sum) = unsafe { cell(p.acts, b, row) };
            let mut s = [0.0f32; PANEL];
            for step in 0..BLOCK {
                let i = if form == Form::Q4 { q4_input(step) } else { step };
                for lane in 0..PANEL {
                    s[lane] = w[i][lane].mul_add(x[i], s[lane]);
                }
            }
            match form {
                Form::Q4 => {
                    let (d, m) = (halves(block), halves(&block[32..]));
                    for lane in 0..PANEL {
                        acc[lane] = m[lane].mul_add(sum, s[lane].mul_add(d[lane], acc[lane]));
                    }
                }
                Form::Q8 => {
                    let d = halves(block);
                    for lane in 0..PANEL {
                        acc[lane] = s[lane].mul_add(d[lane], acc[lane]);
                    }
                }
                Form::F16 | Form::Bf16 | Form::F32 => {
                    for lane in 0..PANEL {
                        acc[lane] += s[lane];
                    }
                }
            }
        }
    }
}

/// A block's activations of a row, and their sum.
unsafe fn cell<'a>(acts: ActsPtr, b: usize, row: usize) -> (&'a [f32; BLOCK], f32) {
    let cell = b * acts.rows + row;
    // SAFETY: the caller's: the row is prepared in f32, and nobody writes to it meanwhile.
    unsafe { (&*acts.x.add(cell * BLOCK).cast(), *acts.sum.add(cell)) }
}

/// Products of a panel with rows of bytes, from row `first` on.
unsafe fn int8(p: &Product<'_>, panel: usize, first: usize, sums: &mut [Lanes<f32>]) {
    let (form, acts) = (p.w.form(), p.acts);
    let blocks = p.w.panel(panel).chunks_exact(form.block_bytes());
    for (b, block) in blocks.enumerate() {
        let w = integers(form, block);
        let d = halves(block);
        for (row, acc) in (first..).zip(sums.iter_mut()) {
            let cell = b * acts.rows + row;
            // SAFETY: the caller's: the row is prepared in int8.
            let (q, d_x, sum) = unsafe {
                let q: &[i8; BLOCK] = &*acts.q.add(cell * BLOCK).cast();
                (q, *acts.d.add(cell), *acts.ds.add(cell))
            };
            let mut s = [0i32; PANEL];
            for i in 0..BLOCK {
                for lane in 0..PANEL {
                    s[lane] += i32::from(w[i][lane] * i16::from(q[i]));
                }
            }
            for lane in 0..PANEL {
                acc[lane] = (s[lane] as f32).mul_add(d[lane] * d_x, acc[lane]);
            }
            if form == Form::Q4 {
                let m = halves(&block[32..]);
                for lane in 0..PANEL {
                    acc[lane] = m[lane].mul_add(sum, acc[lane]);
                }
            }
        }
    }
}

fn halves(bytes: &[u8]) -> Lanes<f32> {
    std::array::from_fn(|lane| f16_to_f32(u16_at(bytes, 2 * lane)))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// A quantized block without its scales: input by input, 16 rows each.
fn integers(form: Form, block: &[u8]) -> [Lanes<i16>; BLOCK] {
    let mut all = [[0; PANEL]; BLOCK];
    if form == Form::Q4 {
        for (j, vector) in block[64..].chunks_exact(4 * PANEL).enumerate() {
            for (lane, bytes) in vector.chunks_exact(4).enumerate() {
                for (i, byte) in bytes.iter().enumerate() {
                    all[4 * j + i][lane] = i16::from(byte & 15);
                    all[16 + 4 * j + i][lane] = i16::from(byte >> 4);
                }
            }
        }
    } else {
        for (j, vector) in block[32..].chunks_exact(4 * PANEL).enumerate() {
            for (lane, bytes) in vector.chunks_exact(4).enumerate() {
                for (i, byte) in bytes.iter().enumerate() {
                    all[4 * j + i][lane] = i16::from(*byte as i8);
                }
            }
        }
    }
    all
}

/// A block as f32, unscaled: input by input, 16 rows each.
fn unpack(form: Form, block: &[u8]) -> [Lanes<f32>; BLOCK] {
    match form {
        Form::Q4 | Form::Q8 => integers(form, block).map(|lanes| lanes.map(f32::from)),
        Form::Bf16 => std::array::from_fn(|i| {
            let at = |lane: usize| i / 2 * 64 + lane * 4 + i % 2 * 2;
            std::array::from_fn(|lane| bf16_to_f32(u16_at(block, at(lane))))
        }),
        Form::F16 => std::array::from_fn(|i| std::array::from_fn(|lane| f16_to_f32(u16_at(block, i * 32 + lane * 2)))),
        Form::F32 => std::array::from_fn(|i| {
            let at = |lane: usize| i * 64 + lane * 4;
            let number = |at: usize| [block[at], block[at + 1], block[at + 2], block[at + 3]];
            std::array::from_fn(|lane| f32::from_le_bytes(number(at(lane))))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Case, bits};
    use crate::kernels::{Isa, Mode};
    use crate::weights::Form;

    #[test]
    fn lanes_have_the_bits_of_scalar() {
        for form in Form::ALL {
            for mode in [Mode::Exact, Mode::Bf16, Mode::Both] {
                for rows in [1, 2, 4, 5, 9] {
                    let case = Case::new(form, mode, (37, 160, rows), rows as u64, rows > 1);
                    let (got, want) = (case.all(Isa::Neon), case.all(Isa::Scalar));
                    assert_eq!(bits(&got), bits(&want), "{form:?} {mode:?} {rows}");
                }
            }
        }
    }
}
