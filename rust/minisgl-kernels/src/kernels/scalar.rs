//! Definition of every kernel result, in plain Rust, one operation at a time.
//!
//! Invariants: `mul_add` is one fused operation with one rounding, nothing else is fused or reordered.

use std::ops::Range;

use super::{ActsPtr, Mode, Product, Table};
use crate::Kind;
use crate::panels::{BLOCK, Block, PANEL, plain};

pub(super) static TABLE: Table = Table {
    prepare,
    matmul,
    rms_norm,
    silu_mul,
    gelu_mul,
    add,
    rotate,
    argmax,
    finite,
};

/// Bits of 2^-100: a block whose maximum is below it is quantized to zero, because its inverse scale would overflow.
pub(super) const TINY: u32 = (127 - 100) << 23;
/// Bits of infinity: absolute values from here on are not finite.
pub(super) const INFINITE: u32 = 0x7f80_0000;

/// Returns the input index of step `step` in f32 sums over a block. `by_halves`: both nibbles of each byte in turn.
pub(super) const fn input(by_halves: bool, step: usize) -> usize {
    if by_halves { step / 2 + step % 2 * 16 } else { step }
}

/// Returns the index of half `sub` of block `b` of a row in the activations' [block][half][row] arrays.
pub(super) const fn cell16(acts: &ActsPtr, b: usize, sub: usize, row: usize) -> usize {
    (2 * b + sub) * acts.rows + row
}

/// Sums 16 elements in a fixed tree: i and i + 8, then i + 4, i + 2, i + 1.
pub(super) fn tree(mut v: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            v[i] += v[i + half];
        }
    }
    v[0]
}

unsafe fn prepare(x: *const f32, acts: ActsPtr, row: usize, blocks: Range<usize>) {
    for b in blocks {
        let mut v = [0.0; BLOCK];
        let len = BLOCK.min(acts.k - b * BLOCK);
        // SAFETY: the caller guarantees `k` elements.
        unsafe { std::ptr::copy_nonoverlapping(x.add(b * BLOCK), v.as_mut_ptr(), len) };
        if acts.mode == Mode::Bf16 {
            v = v.map(to_bf16);
        }
        let cell = b * acts.rows + row;
        if acts.mode.has_f32() {
            // SAFETY: the caller guarantees the row, of which every block has a cell.
            unsafe {
                std::ptr::copy_nonoverlapping(v.as_ptr(), acts.x.add(cell * BLOCK), BLOCK);
            }
        }
        if acts.mode.has_sums() {
            // SAFETY: as above.
            unsafe {
                *acts.sum.add(cell) = tree(std::array::from_fn(|i| v[i] + v[i + 16]));
                for sub in 0..2 {
                    *acts.sum16.add(cell16(&acts, b, sub, row)) = tree(std::array::from_fn(|i| v[16 * sub + i]));
                }
            }
        }
        if acts.mode.has_int8() {
            let (q, d) = quantize(&v);
            let sum16 = [0, 16].map(|at| q[at..at + 16].iter().map(|&q| i32::from(q)).sum::<i32>());
            let sum = sum16[0] + sum16[1];
            // SAFETY: as above.
            unsafe {
                std::ptr::copy_nonoverlapping(q.as_ptr(), acts.q.add(cell * BLOCK), BLOCK);
                *acts.d.add(cell) = d;
                *acts.ds.add(cell) = d * sum as f32;
                *acts.offset.add(cell) = -128 * sum;
                for (sub, sum) in sum16.into_iter().enumerate() {
                    *acts.offset16.add(cell16(&acts, b, sub, row)) = -128 * sum;
                }
            }
        }
    }
}

/// Rounds to the nearest bf16 value, ties to even; NaN stays NaN.
fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    if x.is_nan() {
        return x;
    }
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

/// Quantizes a block to integers of -127..=127. Returns them and the scale, which is NaN if an element is not finite.
fn quantize(v: &[f32; BLOCK]) -> ([i8; BLOCK], f32) {
    let max = v.iter().fold(0, |max, x| max.max(x.abs().to_bits()));
    if max >= INFINITE {
        return ([0; BLOCK], f32::NAN);
    }
    if max < TINY {
        return ([0; BLOCK], 0.0);
    }
    let max = f32::from_bits(max);
    let inverse = 127.0 / max;
    (v.map(|x| (x * inverse).round_ties_even() as i8), max / 127.0)
}

unsafe fn matmul(p: &Product<'_>) {
    let int8 = p.acts.mode.int8_with(p.w.kind());
    for panel in p.panels.clone() {
        for row in p.rows.clone() {
            // SAFETY: the caller guarantees the row is prepared, `out` has room.
            unsafe {
                let sums = panel_by_row(p, panel, row, int8);
                let at = (row - p.rows.start) * p.stride + (panel - p.panels.start) * PANEL;
                for (lane, sum) in sums.into_iter().enumerate() {
                    let out = p.out.add(at + lane);
                    *out = if p.add { *out + sum } else { sum };
                }
            }
        }
    }
}

/// Returns the 16 products of a panel's rows with one row of activations.
unsafe fn panel_by_row(p: &Product<'_>, panel: usize, row: usize, int8: bool) -> [f32; PANEL] {
    let (kind, acts) = (p.w.kind(), p.acts);
    let mut sums = [0.0; PANEL];
    for b in 0..p.w.blocks() {
        let block = p.w.block(panel, b);
        for (lane, acc) in sums.iter_mut().enumerate() {
            // SAFETY: the caller guarantees the row is prepared, in the mode that the kind needs.
            unsafe {
                *acc = if int8 {
                    add_int8(*acc, kind, block, lane, acts, b, row)
                } else if kind.is_quantized() {
                    add_exact(*acc, kind, block, lane, acts, b, row)
                } else {
                    let x = &*acts.x.add((b * acts.rows + row) * BLOCK).cast::<[f32; BLOCK]>();
                    let codes = block.codes();
                    *acc + (0..BLOCK).fold(0.0, |s, i| plain(kind, codes, lane, i).mul_add(x[i], s))
                };
            }
        }
    }
    sums
}

/// Returns `acc` plus the product of row `lane` of a block with f32 activations: for each sub-block the sum of value
/// times input, times the scale; plus the minimum times the sum of inputs.
unsafe fn add_exact(
    mut acc: f32,
    kind: Kind,
    block: Block<'_>,
    lane: usize,
    acts: ActsPtr,
    b: usize,
    row: usize,
) -> f32 {
    let layout = kind.layout();
    let (cell, share) = (b * acts.rows + row, BLOCK / layout.subs);
    // SAFETY: the caller guarantees the row is prepared in f32.
    let x = unsafe { &*acts.x.add(cell * BLOCK).cast::<[f32; BLOCK]>() };
    for sub in 0..layout.subs {
        let mut s = 0.0f32;
        for step in sub * share..(sub + 1) * share {
            let i = input(layout.by_halves(), step);
            s = (block.value(lane, i) as f32).mul_add(x[i], s);
        }
        acc = s.mul_add(block.scale(lane, sub), acc);
        if layout.min {
            // SAFETY: as above.
            let sum = unsafe { *input_sums(&acts, layout.subs, b, sub, row) };
            acc = block.min(lane, sub).mul_add(sum, acc);
        }
    }
    acc
}

/// Returns `acc` plus the product of row `lane` of a block with int8 activations, whose sums are integers.
unsafe fn add_int8(
    mut acc: f32,
    kind: Kind,
    block: Block<'_>,
    lane: usize,
    acts: ActsPtr,
    b: usize,
    row: usize,
) -> f32 {
    let layout = kind.layout();
    let (cell, share) = (b * acts.rows + row, BLOCK / layout.subs);
    // SAFETY: the caller guarantees the row is prepared in int8.
    let (q, d) = unsafe { (&*acts.q.add(cell * BLOCK).cast::<[i8; BLOCK]>(), *acts.d.add(cell)) };
    for sub in 0..layout.subs {
        let product = |i: usize| block.value(lane, i) * i32::from(q[i]);
        let sum: i32 = (sub * share..(sub + 1) * share).map(product).sum();
        acc = (sum as f32).mul_add(block.scale(lane, sub) * d, acc);
        if layout.min {
            // SAFETY: as above.
            let sum = unsafe { scaled_sum(&acts, layout.subs, b, sub, row) };
            acc = block.min(lane, sub).mul_add(sum, acc);
        }
    }
    acc
}

/// Returns the address of the sums of inputs of sub-block `sub` for the rows from `row` on.
#[inline]
pub(super) unsafe fn input_sums(acts: &ActsPtr, subs: usize, b: usize, sub: usize, row: usize) -> *const f32 {
    // SAFETY: the caller guarantees the rows are there.
    unsafe {
        match subs {
            1 => acts.sum.add(b * acts.rows + row),
            _ => acts.sum16.add(cell16(acts, b, sub, row)),
        }
    }
}

/// Returns the address of -128 times the integer sums of sub-block `sub` for the rows from `row` on.
#[inline]
pub(super) unsafe fn offsets(acts: &ActsPtr, subs: usize, b: usize, sub: usize, row: usize) -> *const i32 {
    // SAFETY: as above.
    unsafe {
        match subs {
            1 => acts.offset.add(b * acts.rows + row),
            _ => acts.offset16.add(cell16(acts, b, sub, row)),
        }
    }
}

/// Returns the scale of a row's int8 activations times the sum of the integers of sub-block `sub`.
#[inline]
pub(super) unsafe fn scaled_sum(acts: &ActsPtr, subs: usize, b: usize, sub: usize, row: usize) -> f32 {
    let cell = b * acts.rows + row;
    // SAFETY: the caller guarantees the row is prepared in int8.
    unsafe {
        match subs {
            1 => *acts.ds.add(cell),
            _ => *acts.d.add(cell) * (*offsets(acts, subs, b, sub, row) / -128) as f32,
        }
    }
}

/// Computes the RMS norm. Squares are summed in 32 lanes, i in lane i % 32; lanes i and i + 16 are added, then a tree.
unsafe fn rms_norm(x: *const f32, w: *const f32, n: usize, eps: f32, out: *mut f32) {
    let mut lanes = [0.0f32; 32];
    for i in 0..n {
        // SAFETY: the caller guarantees `n` elements.
        let x = unsafe { *x.add(i) };
        lanes[i % 32] = x.mul_add(x, lanes[i % 32]);
    }
    let by = inverse_rms(tree(std::array::from_fn(|i| lanes[i] + lanes[i + 16])), n, eps);
    for i in 0..n {
        // SAFETY: as above.
        unsafe { *out.add(i) = *x.add(i) * by * *w.add(i) };
    }
}

/// Returns the inverse RMS of a row, 1 / sqrt(sum / n + eps), from the sum of its squares.
pub(super) fn inverse_rms(sum: f32, n: usize, eps: f32) -> f32 {
    1.0 / (sum / n as f32 + eps).sqrt()
}

/// Bounds of `exp`'s argument, between which 2^n is a normal float.
pub(super) const EXP_BOUNDS: (f32, f32) = (-87.0, 88.0);
/// High part of ln 2 with few bits, and the remainder.
pub(super) const LN2: (f32, f32) = (0.693_359_4, -2.121_944_4e-4);
/// Coefficients of exp(r) = 1 + r + r^2 (...), highest power first, for |r| <= ln 2 / 2.
pub(super) const EXP_TERMS: [f32; 6] = [
    1.987_569_1e-4,
    1.398_199_9e-3,
    8.333_452e-3,
    4.166_579_6e-2,
    1.666_666_5e-1,
    0.5,
];

/// Returns e^x to about 2e-7, with x clamped to the bounds; NaN for NaN.
#[must_use]
#[inline]
pub fn exp(x: f32) -> f32 {
    let x = if x > EXP_BOUNDS.1 { EXP_BOUNDS.1 } else { x };
    let x = if x < EXP_BOUNDS.0 { EXP_BOUNDS.0 } else { x };
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(-LN2.1, n.mul_add(-LN2.0, x));
    let [first, rest @ ..] = EXP_TERMS;
    let p = rest.iter().fold(first, |p, &term| p.mul_add(r, term));
    let p = p.mul_add(r * r, r + 1.0);
    p * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

unsafe fn silu_mul(gate: *const f32, up: *const f32, next: usize, n: usize, out: *mut f32) {
    for i in 0..n {
        let from = i / PANEL * next + i % PANEL;
        // SAFETY: the caller guarantees `n` elements.
        unsafe {
            let g = *gate.add(from);
            *out.add(i) = g / (1.0 + exp(-g)) * *up.add(from);
        }
    }
}

/// Coefficients (a, b) of GELU's tanh approximation (Hendrycks and Gimpel 2016): gelu(g) = g * sigmoid(a (g + b g^3)).
pub(super) const GELU: (f32, f32) = (1.595_769, 0.044_715);

unsafe fn gelu_mul(gate: *const f32, up: *const f32, next: usize, n: usize, out: *mut f32) {
    for i in 0..n {
        let from = i / PANEL * next + i % PANEL;
        // SAFETY: the caller guarantees `n` elements.
        unsafe {
            let g = *gate.add(from);
            let t = (g * g * GELU.1).mul_add(g, g) * GELU.0;
            *out.add(i) = g / (1.0 + exp(-t)) * *up.add(from);
        }
    }
}

unsafe fn add(x: *mut f32, y: *const f32, n: usize) {
    for i in 0..n {
        // SAFETY: the caller guarantees `n` elements.
        unsafe { *x.add(i) += *y.add(i) };
    }
}

unsafe fn rotate(x: *mut f32, cos: *const f32, sin: *const f32, half: usize) {
    for i in 0..half {
        // SAFETY: the caller guarantees `2 half` and `half` elements.
        unsafe {
            let (a, b, c, s) = (*x.add(i), *x.add(half + i), *cos.add(i), *sin.add(i));
            *x.add(i) = a.mul_add(c, -(b * s));
            *x.add(half + i) = b.mul_add(c, a * s);
        }
    }
}

unsafe fn argmax(x: *const f32, n: usize) -> usize {
    let mut best = (0, f32::NEG_INFINITY);
    for i in 0..n {
        // SAFETY: the caller guarantees `n` elements.
        let x = unsafe { *x.add(i) };
        if x > best.1 {
            best = (i, x);
        }
    }
    best.0
}

unsafe fn finite(x: *const f32, n: usize) -> bool {
    // SAFETY: the caller guarantees `n` elements.
    (0..n).all(|i| unsafe { *x.add(i) }.is_finite())
}
