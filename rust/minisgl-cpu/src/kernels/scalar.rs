//! The definition of every result, in plain Rust, one operation at a time.
//!
//! Invariants: `mul_add` is one fused operation with one rounding, nothing else is fused or reordered.

use super::{ActsPtr, Mode, Product, Table};
use crate::files::blocks::{bf16_to_f32, f16_to_f32};
use crate::weights::{BLOCK, Form, PANEL};

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

/// Blocks whose largest number is below 2^-100 count as zero: the inverse of their scale would overflow.
pub(super) const TINY: u32 = (127 - 100) << 23;
/// Bits of infinity: absolute values from here on are not finite.
pub(super) const INFINITE: u32 = 0x7f80_0000;

/// The order of a block's inputs in the sums of f32 products with Q4: both halves of a byte, byte after byte.
pub(super) const fn q4_input(step: usize) -> usize {
    step / 2 + step % 2 * 16
}

/// A fixed tree over 16 numbers: i and i + 8, then i + 4, i + 2, i + 1.
pub(super) fn tree(mut v: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            v[i] += v[i + half];
        }
    }
    v[0]
}

unsafe fn prepare(x: *const f32, acts: ActsPtr, row: usize) {
    for b in 0..acts.blocks() {
        let mut v = [0.0; BLOCK];
        let len = BLOCK.min(acts.k - b * BLOCK);
        // SAFETY: the caller's: `k` numbers.
        unsafe { std::ptr::copy_nonoverlapping(x.add(b * BLOCK), v.as_mut_ptr(), len) };
        if acts.mode == Mode::Bf16 {
            v = v.map(to_bf16);
        }
        let cell = b * acts.rows + row;
        if acts.mode.has_f32() {
            // SAFETY: the caller's row, of which every block has a cell.
            unsafe {
                std::ptr::copy_nonoverlapping(v.as_ptr(), acts.x.add(cell * BLOCK), BLOCK);
                *acts.sum.add(cell) = tree(std::array::from_fn(|i| v[i] + v[i + 16]));
            }
        }
        if acts.mode.has_int8() {
            let (q, d) = quantize(&v);
            let sum: i32 = q.iter().map(|&q| i32::from(q)).sum();
            // SAFETY: as above.
            unsafe {
                std::ptr::copy_nonoverlapping(q.as_ptr(), acts.q.add(cell * BLOCK), BLOCK);
                *acts.d.add(cell) = d;
                *acts.ds.add(cell) = d * sum as f32;
                *acts.offset.add(cell) = -128 * sum;
            }
        }
    }
}

/// The nearest number that bf16 has, the even one of two; NaN stays one.
fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    if x.is_nan() {
        return x;
    }
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

/// Integers of -127..=127 and their scale, which is NaN if a number is not finite.
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
    let int8 = p.acts.mode.int8_with(p.w.form());
    for panel in p.panels.clone() {
        for row in p.rows.clone() {
            // SAFETY: the caller's: the row is prepared, `out` has room.
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

/// The 16 products of a panel's rows with one row of activations.
unsafe fn panel_by_row(p: &Product<'_>, panel: usize, row: usize, int8: bool) -> [f32; PANEL] {
    let (form, acts) = (p.w.form(), p.acts);
    let mut sums = [0.0; PANEL];
    for (b, block) in p.w.panel(panel).chunks_exact(form.block_bytes()).enumerate() {
        let cell = b * acts.rows + row;
        for (lane, acc) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's: the row is prepared, in the mode that the form needs.
            unsafe {
                *acc = if int8 {
                    add_int8(*acc, form, block, lane, acts, cell)
                } else {
                    let x = &*acts.x.add(cell * BLOCK).cast::<[f32; BLOCK]>();
                    add_exact(*acc, form, block, lane, x, *acts.sum.add(cell))
                };
            }
        }
    }
    sums
}

/// `acc` and what row `lane` of a block adds to it.
fn add_exact(acc: f32, form: Form, block: &[u8], lane: usize, x: &[f32; BLOCK], sum: f32) -> f32 {
    let mut s = 0.0f32;
    for step in 0..BLOCK {
        let i = if form == Form::Q4 { q4_input(step) } else { step };
        s = stored(form, block, lane, i).mul_add(x[i], s);
    }
    match form {
        Form::Q4 => min(block, lane).mul_add(sum, s.mul_add(scale(block, lane), acc)),
        Form::Q8 => s.mul_add(scale(block, lane), acc),
        Form::F16 | Form::Bf16 | Form::F32 => acc + s,
    }
}

unsafe fn add_int8(acc: f32, form: Form, block: &[u8], lane: usize, acts: ActsPtr, cell: usize) -> f32 {
    // SAFETY: the caller's: the cell is prepared in int8.
    let (q, d, ds) = unsafe {
        let q = &*acts.q.add(cell * BLOCK).cast::<[i8; BLOCK]>();
        (q, *acts.d.add(cell), *acts.ds.add(cell))
    };
    let product = |i: usize| stored(form, block, lane, i) as i32 * i32::from(q[i]);
    let sum: i32 = (0..BLOCK).map(product).sum();
    let acc = (sum as f32).mul_add(scale(block, lane) * d, acc);
    if form == Form::Q4 {
        min(block, lane).mul_add(ds, acc)
    } else {
        acc
    }
}

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn scale(block: &[u8], lane: usize) -> f32 {
    f16_to_f32(u16_at(block, 2 * lane))
}

fn min(block: &[u8], lane: usize) -> f32 {
    f16_to_f32(u16_at(block, 32 + 2 * lane))
}

/// Input `i` of row `lane` as it is stored: an integer without its scale, or the number.
fn stored(form: Form, block: &[u8], lane: usize, i: usize) -> f32 {
    match form {
        Form::Q4 => {
            let byte = block[64 + i % 16 / 4 * 64 + lane * 4 + i % 4];
            f32::from(byte >> (i / 16 * 4) & 15)
        }
        Form::Q8 => f32::from(block[32 + i / 4 * 64 + lane * 4 + i % 4] as i8),
        Form::Bf16 => bf16_to_f32(u16_at(block, i / 2 * 64 + lane * 4 + i % 2 * 2)),
        Form::F16 => f16_to_f32(u16_at(block, i * 32 + lane * 2)),
        Form::F32 => {
            let at = i * 64 + lane * 4;
            f32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
        }
    }
}

/// Squares are summed in 32 lanes, number i in lane i % 32; lanes i and i + 16 are added, then `tree`.
unsafe fn rms_norm(x: *const f32, w: *const f32, n: usize, eps: f32, out: *mut f32) {
    let mut lanes = [0.0f32; 32];
    for i in 0..n {
        // SAFETY: the caller's: `n` numbers.
        let x = unsafe { *x.add(i) };
        lanes[i % 32] = x.mul_add(x, lanes[i % 32]);
    }
    let by = inverse_root(tree(std::array::from_fn(|i| lanes[i] + lanes[i + 16])), n, eps);
    for i in 0..n {
        // SAFETY: as above.
        unsafe { *out.add(i) = *x.add(i) * by * *w.add(i) };
    }
}

/// What a row is multiplied by, from the sum of its squares.
pub(super) fn inverse_root(sum: f32, n: usize, eps: f32) -> f32 {
    1.0 / (sum / n as f32 + eps).sqrt()
}

/// Bounds of `exp`'s argument, between which 2^n is a normal number.
pub(super) const EXP_BOUNDS: (f32, f32) = (-87.0, 88.0);
/// ln 2 as a number of few bits, and the rest of it.
pub(super) const LN2: (f32, f32) = (0.693_359_4, -2.121_944_4e-4);
/// exp(r) = 1 + r + r^2 (...), highest power first, for |r| <= ln 2 / 2.
pub(super) const EXP_TERMS: [f32; 6] = [
    1.987_569_1e-4,
    1.398_199_9e-3,
    8.333_452e-3,
    4.166_579_6e-2,
    1.666_666_5e-1,
    0.5,
];

/// exp to about 2e-7, NaN for NaN; beyond the bounds: their exp.
#[must_use]
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

unsafe fn silu_mul(gate: *const f32, up: *const f32, n: usize, out: *mut f32) {
    for i in 0..n {
        // SAFETY: the caller's: `n` numbers.
        unsafe {
            let g = *gate.add(i);
            *out.add(i) = g / (1.0 + exp(-g)) * *up.add(i);
        }
    }
}

/// GELU as its tanh approximation has it (Hendrycks and Gimpel 2016): gelu(g) = g * sigmoid(a (g + b g^3)).
pub(super) const GELU: (f32, f32) = (1.595_769, 0.044_715);

unsafe fn gelu_mul(gate: *const f32, up: *const f32, n: usize, out: *mut f32) {
    for i in 0..n {
        // SAFETY: the caller's: `n` numbers.
        unsafe {
            let g = *gate.add(i);
            let t = (g * g * GELU.1).mul_add(g, g) * GELU.0;
            *out.add(i) = g / (1.0 + exp(-t)) * *up.add(i);
        }
    }
}

unsafe fn add(x: *mut f32, y: *const f32, n: usize) {
    for i in 0..n {
        // SAFETY: the caller's: `n` numbers.
        unsafe { *x.add(i) += *y.add(i) };
    }
}

unsafe fn rotate(x: *mut f32, cos: *const f32, sin: *const f32, half: usize) {
    for i in 0..half {
        // SAFETY: the caller's: `2 half` and `half` numbers.
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
        // SAFETY: the caller's: `n` numbers.
        let x = unsafe { *x.add(i) };
        if x > best.1 {
            best = (i, x);
        }
    }
    best.0
}

unsafe fn finite(x: *const f32, n: usize) -> bool {
    // SAFETY: the caller's: `n` numbers.
    (0..n).all(|i| unsafe { *x.add(i) }.is_finite())
}
