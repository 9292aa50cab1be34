//! Matmul for 128-bit ARM vectors: plain loops over 16 lanes, which the compiler vectorizes (every 64-bit ARM has a
//! fused multiply-add). No instruction is named here, so tests run on any machine.
//!
//! Invariants: every lane runs the operations of `scalar`, in the same order.

#![allow(clippy::needless_range_loop)] // lanes of several arrays at once

use super::scalar::{self, input, input_sums, scaled_sum};
use super::{Product, Table};
use crate::Kind;
use crate::panels::{BLOCK, Block, PANEL, plain};

/// Array of one value for each of a panel's 16 rows.
type Lanes<T> = [T; PANEL];

/// Rows of activations that share one unpacking of a block.
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
            // SAFETY: the caller guarantees the rows are prepared, `out` has room.
            unsafe {
                let mut sums = [[0.0; PANEL]; ROWS];
                if p.acts.mode.int8_with(p.w.kind()) {
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

/// Writes a panel's 16 sums for a row to the output, or adds them if `p.add` is set.
unsafe fn put(p: &Product<'_>, panel: usize, row: usize, sums: &Lanes<f32>) {
    let at = (row - p.rows.start) * p.stride + (panel - p.panels.start) * PANEL;
    // SAFETY: the caller guarantees `out` has room for every row and panel of the product.
    let out = unsafe { &mut *p.out.add(at).cast::<Lanes<f32>>() };
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = if p.add { *out + sum } else { *sum };
    }
}

/// Computes the products of a panel with f32 activation rows from `first` on into `sums`.
unsafe fn exact(p: &Product<'_>, panel: usize, first: usize, sums: &mut [Lanes<f32>]) {
    let kind = p.w.kind();
    let layout = kind.layout();
    for b in 0..p.w.blocks() {
        let block = p.w.block(panel, b);
        let w = unpack(kind, block);
        let scales = Scales::of(block, layout.subs);
        for (row, acc) in (first..).zip(sums.iter_mut()) {
            let cell = b * p.acts.rows + row;
            // SAFETY: the caller guarantees the row is prepared, and nobody writes to it meanwhile.
            let x: &[f32; BLOCK] = unsafe { &*p.acts.x.add(cell * BLOCK).cast() };
            let share = BLOCK / layout.subs.max(1);
            for sub in 0..layout.subs.max(1) {
                let mut s = [0.0f32; PANEL];
                for step in sub * share..(sub + 1) * share {
                    let i = input(layout.by_halves(), step);
                    for lane in 0..PANEL {
                        s[lane] = w[i][lane].mul_add(x[i], s[lane]);
                    }
                }
                if layout.subs == 0 {
                    (0..PANEL).for_each(|lane| acc[lane] += s[lane]);
                    continue;
                }
                (0..PANEL).for_each(|lane| acc[lane] = s[lane].mul_add(scales.d[sub][lane], acc[lane]));
                if layout.min {
                    // SAFETY: as above.
                    let sum = unsafe { *input_sums(&p.acts, layout.subs, b, sub, row) };
                    (0..PANEL).for_each(|lane| acc[lane] = scales.m[sub][lane].mul_add(sum, acc[lane]));
                }
            }
        }
    }
}

/// Computes the products of a panel with int8 activation rows from `first` on into `sums`.
unsafe fn int8(p: &Product<'_>, panel: usize, first: usize, sums: &mut [Lanes<f32>]) {
    let (kind, acts) = (p.w.kind(), p.acts);
    let layout = kind.layout();
    let share = BLOCK / layout.subs;
    for b in 0..p.w.blocks() {
        let block = p.w.block(panel, b);
        let w = integers(block);
        let scales = Scales::of(block, layout.subs);
        for (row, acc) in (first..).zip(sums.iter_mut()) {
            let cell = b * acts.rows + row;
            // SAFETY: the caller guarantees the row is prepared in int8.
            let (q, d) = unsafe { (&*acts.q.add(cell * BLOCK).cast::<[i8; BLOCK]>(), *acts.d.add(cell)) };
            for sub in 0..layout.subs {
                let mut s = [0i32; PANEL];
                for i in sub * share..(sub + 1) * share {
                    for lane in 0..PANEL {
                        s[lane] += i32::from(w[i][lane] * i16::from(q[i]));
                    }
                }
                for lane in 0..PANEL {
                    acc[lane] = (s[lane] as f32).mul_add(scales.d[sub][lane] * d, acc[lane]);
                }
                if layout.min {
                    // SAFETY: as above.
                    let ds = unsafe { scaled_sum(&acts, layout.subs, b, sub, row) };
                    (0..PANEL).for_each(|lane| acc[lane] = scales.m[sub][lane].mul_add(ds, acc[lane]));
                }
            }
        }
    }
}

/// Scales and minima of a block, for each sub-block of its inputs.
struct Scales {
    d: [Lanes<f32>; 2],
    m: [Lanes<f32>; 2],
}

impl Scales {
    fn of(block: Block<'_>, subs: usize) -> Self {
        let each = |number: &dyn Fn(usize, usize) -> f32| {
            std::array::from_fn(|sub| std::array::from_fn(|lane| if sub < subs { number(lane, sub) } else { 0.0 }))
        };
        Self {
            d: each(&|lane, sub| block.scale(lane, sub)),
            m: each(&|lane, sub| block.min(lane, sub)),
        }
    }
}

/// Returns a quantized block as integers without scales: [input][16 rows].
fn integers(block: Block<'_>) -> [Lanes<i16>; BLOCK] {
    let mut all = [[0; PANEL]; BLOCK];
    for (j, four) in all.chunks_exact_mut(4).enumerate() {
        for (at, value) in block.values(j).into_iter().enumerate() {
            four[at % 4][at / 4] = value;
        }
    }
    all
}

/// Returns a block as unscaled f32: [input][16 rows].
fn unpack(kind: Kind, block: Block<'_>) -> [Lanes<f32>; BLOCK] {
    if kind.is_quantized() {
        return integers(block).map(|lanes| lanes.map(f32::from));
    }
    std::array::from_fn(|i| std::array::from_fn(|lane| plain(kind, block.codes(), lane, i)))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Case, bits};
    use crate::Kind;
    use crate::kernels::{Isa, Mode};

    #[test]
    fn lanes_have_the_bits_of_scalar() {
        for kind in Kind::ALL {
            for mode in [Mode::Exact, Mode::Bf16, Mode::Both] {
                for rows in [1, 2, 4, 5, 9] {
                    let case = Case::new(kind, mode, (37, 160, rows), rows as u64, rows > 1);
                    let (got, want) = (case.all(Isa::Neon), case.all(Isa::Scalar));
                    assert_eq!(bits(&got), bits(&want), "{kind:?} {mode:?} {rows}");
                }
            }
        }
    }
}
