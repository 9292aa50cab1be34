//! Packing of tensors into panels.
//!
//! Invariants: kinds that panels store keep their bits; mixed kinds become F32.
//!
//! A panel is packed from all its rows at once, unit by unit: the part being written stays in the L1 cache. Loops have
//! fixed lengths over adjacent bytes, so that they are vectorized: packing has to keep up with a disk.

use std::borrow::Cow;
use std::sync::Arc;

use super::layout::{BLOCK, Layout, PANEL};
use super::matrix::{Matrix, Panels, Shape};
use crate::blocks::{decode, digit, scale_and_min_codes, scale_of_six};
use crate::memory::Zeroed;
use crate::{Error, Kind, Result, TensorView};

/// Bytes of a block's codes, one byte each.
const CODES: usize = PANEL * BLOCK;

/// Rows of a tensor that become rows of a matrix.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// Tensor, whose dimensions except the last count as rows.
    pub tensor: TensorView<'a>,
    /// Row order: row i of the part is row `order(i)` of the tensor; `None`: row i.
    pub order: Option<&'a (dyn Fn(usize) -> usize + Sync)>,
}

impl<'a> Part<'a> {
    /// Takes all rows of a tensor in order.
    #[must_use]
    pub fn new(tensor: TensorView<'a>) -> Self {
        Self { tensor, order: None }
    }

    /// Takes all rows of a tensor in another order.
    #[must_use]
    pub fn ordered(tensor: TensorView<'a>, order: &'a (dyn Fn(usize) -> usize + Sync)) -> Self {
        Self {
            tensor,
            order: Some(order),
        }
    }

    /// Returns the stored bytes of row i of the part.
    fn row(&self, i: usize) -> Result<Cow<'a, [u8]>> {
        let row = self.order.map_or(i, |order| order(i));
        if row >= self.tensor.rows() {
            let (name, rows) = (self.tensor.name(), self.tensor.rows());
            return Err(Error::file(format!(
                "tensor {name} has {rows} rows; there is no row {row}"
            )));
        }
        Ok(self.tensor.row(row))
    }
}

impl Matrix {
    /// Packs `parts` into one matrix: stacked, or (`interleave`) panel by panel in turns, with every part padded to
    /// whole panels. `held`: the storage kind to use instead of the parts' own. Fails if the parts do not fit. Several
    /// threads may pack different matrices at once.
    pub fn pack(parts: &[Part<'_>], interleave: bool, held: Option<Kind>) -> Result<Self> {
        let shape = shape_of(parts, interleave, held)?;
        Ok(Self::new(shape, packed(shape, parts, interleave)?))
    }
}

/// Packs the panels of a matrix whose `shape` was returned by `shape_of` for the same arguments.
pub fn packed(shape: Shape, parts: &[Part<'_>], interleave: bool) -> Result<Panels> {
    let mut memory = Zeroed::new(shape.bytes());
    let mut panels = memory.as_mut_slice().chunks_exact_mut(shape.panel_bytes().max(1));
    if interleave {
        let rows = parts[0].tensor.rows();
        for (i, panel) in panels.enumerate() {
            let (part, first) = (&parts[i % parts.len()], i / parts.len() * PANEL);
            put(shape, panel, (first..rows.min(first + PANEL)).map(|row| (part, row)))?;
        }
    } else {
        let mut rows = parts
            .iter()
            .flat_map(|part| (0..part.tensor.rows()).map(move |i| (part, i)));
        panels.try_for_each(|panel| put(shape, panel, rows.by_ref().take(PANEL)))?;
    }
    Ok(Panels::Own(Arc::new(memory)))
}

/// Returns the shape of the matrix that `Matrix::pack` makes of `parts`. Fails if their rows or columns do not match.
pub fn shape_of(parts: &[Part<'_>], interleave: bool, held: Option<Kind>) -> Result<Shape> {
    let Some(first) = parts.first().map(|part| part.tensor) else {
        return Err(Error::setting("a matrix must have at least one part"));
    };
    let k = first.k();
    for Part { tensor, .. } in parts {
        let (name, other) = (tensor.name(), first.name());
        if tensor.k() != k {
            let text = format!("tensor {name} has rows of {}, {other} of {k}", tensor.k());
            return Err(Error::file(text));
        }
        if interleave && tensor.rows() != first.rows() {
            let text = format!("tensor {name} has {} rows, {other} has {}", tensor.rows(), first.rows());
            return Err(Error::file(text));
        }
    }
    let own = first.kind().held();
    let alike = parts.iter().all(|part| part.tensor.kind().held() == own);
    let kind = held.unwrap_or(if alike { own } else { Kind::F32 });
    let (n, panels) = if interleave {
        let panels = first.rows().div_ceil(PANEL) * parts.len();
        (panels * PANEL, panels)
    } else {
        let n: usize = parts.iter().map(|part| part.tensor.rows()).sum();
        (n, n.div_ceil(PANEL))
    };
    Ok(Shape { kind, n, panels, k })
}

/// Packs one panel of a matrix of `shape` from at most 16 rows.
fn put<'a>(shape: Shape, panel: &mut [u8], rows: impl Iterator<Item = (&'a Part<'a>, usize)>) -> Result<()> {
    let Shape { kind: held, k, .. } = shape;
    let layout = held.layout();
    let rows = rows
        .map(|(part, i)| Ok(Row::new(part.tensor.kind(), held, part.row(i)?, k)))
        .collect::<Result<Vec<_>>>()?;
    for (i, unit) in panel.chunks_exact_mut(layout.unit_bytes()).enumerate() {
        match held {
            Kind::F16 => put_numbers::<2>(&rows, i, unit),
            Kind::BF16 | Kind::F32 => put_numbers::<4>(&rows, i, unit),
            _ => put_unit(&layout, &rows, i, unit),
        }
    }
    Ok(())
}

/// Row of a panel as stored in the file.
struct Row<'a> {
    kind: Kind,
    /// Bytes of a unit.
    bytes: usize,
    stored: Cow<'a, [u8]>,
}

impl<'a> Row<'a> {
    /// Wraps a stored row of `k` inputs, decoded to floats and padded to whole blocks if `held` is a float kind.
    fn new(kind: Kind, held: Kind, stored: Cow<'a, [u8]>, k: usize) -> Self {
        let (kind, mut stored) = if kind.held() == held {
            (kind, stored)
        } else {
            assert_eq!(held, Kind::F32, "{kind:?} becomes numbers");
            let mut numbers = vec![0.0; k];
            decode(kind, &stored, &mut numbers);
            let bytes = numbers.into_iter().flat_map(f32::to_le_bytes).collect();
            (held, Cow::Owned(bytes))
        };
        let bytes = held.layout().unit * BLOCK / kind.block_len() * kind.block_bytes();
        if stored.len() % bytes != 0 {
            let whole = stored.len().next_multiple_of(bytes);
            stored.to_mut().resize(whole, 0);
        }
        Self { kind, bytes, stored }
    }

    fn unit(&self, i: usize) -> &[u8] {
        &self.stored[i * self.bytes..][..self.bytes]
    }
}

/// Packs unit `i` of quantized rows: scales and codes.
fn put_unit(layout: &Layout, rows: &[Row<'_>], i: usize, to: &mut [u8]) {
    let (head, planes) = to.split_at_mut(layout.head);
    for (lane, row) in rows.iter().enumerate() {
        put_head(row.kind, row.unit(i), head, lane);
    }
    for (j, planes) in planes.chunks_exact_mut(layout.codes()).enumerate() {
        let mut codes = [0; CODES];
        for (lane, row) in rows.iter().enumerate() {
            put_lane::<4>(&codes_of(row.kind, row.unit(i), j), &mut codes, lane);
        }
        let [low, high] = layout.bits;
        let (first, second) = planes.split_at_mut(64 * low);
        put_plane(low, 0, &codes, first);
        put_plane(high, low, &codes, second);
    }
}

/// Packs unit `i` of float rows, in elements (or pairs of elements) of `SIZE` bytes.
fn put_numbers<const SIZE: usize>(rows: &[Row<'_>], i: usize, to: &mut [u8]) {
    for (lane, row) in rows.iter().enumerate() {
        put_lane::<SIZE>(row.unit(i), to, lane);
    }
}

/// Copies `from` to row `lane` of `to`, in chunks of `SIZE` bytes that alternate with those of the other rows.
#[inline(always)]
fn put_lane<const SIZE: usize>(from: &[u8], to: &mut [u8], lane: usize) {
    let (from, _) = from.as_chunks::<SIZE>();
    let (to, _) = to.as_chunks_mut::<SIZE>();
    for (from, to) in from.iter().zip(to.chunks_exact_mut(PANEL)) {
        to[lane] = *from;
    }
}

/// Packs `bits` bits of each code, from bit `shift` on, into a plane (see `layout`).
fn put_plane(bits: usize, shift: usize, codes: &[u8; CODES], to: &mut [u8]) {
    if bits == 0 {
        return;
    }
    let mask = u8::MAX >> (8 - bits);
    for (part, codes) in codes.chunks_exact(64 * bits).enumerate() {
        for (to, code) in to.iter_mut().zip(codes) {
            *to |= (code >> shift & mask) << (bits * part);
        }
    }
}

/// Packs the scales of row `lane` of a unit, from the stored blocks.
fn put_head(kind: Kind, from: &[u8], head: &mut [u8], lane: usize) {
    let mut half = |to: usize, at: usize, sign: u8| {
        head[to + 2 * lane] = from[at];
        head[to + 2 * lane + 1] = from[at + 1] ^ sign;
    };
    match kind {
        Kind::MXFP4 => head[lane] = from[0],
        Kind::NVFP4 => (0..4).for_each(|i| head[16 * i + lane] = from[i]),
        Kind::Q4_1 | Kind::Q5_1 => {
            half(0, 0, 0);
            half(32, 2, 0);
        }
        Kind::Q4_K | Kind::Q5_K => {
            half(0, 0, 0);
            half(32, 2, 0x80); // ggml subtracts it
            for j in 0..8 {
                let (scale, min) = scale_and_min_codes(&from[4..16], j);
                head[64 + 32 * j + lane] = scale;
                head[64 + 32 * j + 16 + lane] = min;
            }
        }
        Kind::Q2_K => {
            half(0, 80, 0);
            half(32, 82, 0x80);
            (0..16).for_each(|i| head[64 + 16 * i + lane] = from[i]);
        }
        Kind::Q3_K => {
            half(0, 108, 0);
            for i in 0..16 {
                let scale = scale_of_six(&from[96..108], i);
                head[32 + 16 * (i / 2) + lane] |= (scale & 15) << (4 * (i % 2));
                head[160 + 16 * (i / 4) + lane] |= scale >> 4 << (2 * (i % 4));
            }
        }
        Kind::Q6_K => {
            half(0, 208, 0);
            (0..16).for_each(|i| head[32 + 16 * i + lane] = from[192 + i]);
        }
        Kind::IQ4_XS => {
            half(0, 0, 0);
            let high = u16::from_le_bytes([from[2], from[3]]);
            for j in 0..8 {
                let scale = from[4 + j / 2] >> (4 * (j % 2)) & 15 | ((high >> (2 * j) & 3) as u8) << 4;
                head[32 + 16 * j + lane] = scale.wrapping_sub(32);
            }
        }
        Kind::TQ1_0 => half(0, 52, 0),
        Kind::TQ2_0 => half(0, 64, 0),
        _ => half(0, 0, 0),
    }
}

/// Returns the code of each element of a block, faster than `array::from_fn`, which is not inlined everywhere.
#[inline(always)]
fn map_codes(code: impl Fn(usize) -> u8) -> [u8; BLOCK] {
    let mut codes = [0; BLOCK];
    for (i, one) in codes.iter_mut().enumerate() {
        *one = code(i);
    }
    codes
}

/// Returns the codes of the `j`-th 32 elements of a unit, as stored by their kind.
fn codes_of(kind: Kind, from: &[u8], j: usize) -> [u8; BLOCK] {
    let nibbles = |qs: usize, i: usize| from[qs + i % 16] >> (i / 16 * 4) & 15;
    let fifth = |at: usize, i: usize| (from[at + i / 8] >> (i % 8) & 1) << 4;
    let fours = |qs: usize, i: usize| from[qs + j / 2 * 32 + i] >> (j % 2 * 4) & 15;
    let twos = |qs: usize, i: usize| from[qs + j / 4 * 32 + i] >> (j % 4 * 2) & 3;
    let (side, turn) = (j / 4, j % 4);
    match kind {
        Kind::Q4_0 | Kind::IQ4_NL => map_codes(|i| nibbles(2, i)),
        Kind::MXFP4 => map_codes(|i| nibbles(1, i)),
        Kind::Q4_1 => map_codes(|i| nibbles(4, i)),
        Kind::IQ4_XS => map_codes(|i| nibbles(8 + 16 * j, i)),
        Kind::Q5_0 => map_codes(|i| nibbles(6, i) | fifth(2, i)),
        Kind::Q5_1 => map_codes(|i| nibbles(8, i) | fifth(4, i)),
        Kind::Q8_0 => map_codes(|i| from[2 + i]),
        Kind::Q2_K => map_codes(|i| twos(16, i)),
        Kind::Q3_K => map_codes(|i| twos(32, i) | (from[i] >> j & 1) << 2),
        Kind::Q4_K => map_codes(|i| fours(16, i)),
        Kind::Q5_K => map_codes(|i| fours(48, i) | (from[16 + i] >> j & 1) << 4),
        Kind::Q6_K => map_codes(|i| {
            let low = from[64 * side + 32 * (turn % 2) + i] >> (4 * (turn / 2)) & 15;
            low | (from[128 + 32 * side + i] >> (2 * turn) & 3) << 4
        }),
        Kind::TQ1_0 => map_codes(|i| match 32 * j + i {
            at @ 0..160 => digit(from[at % 32], at / 32),
            at @ 160..240 => digit(from[32 + at % 16], at / 16 - 10),
            at => digit(from[48 + at % 4], at / 4 - 60),
        }),
        Kind::TQ2_0 => map_codes(|i| twos(0, i)),
        Kind::NVFP4 => map_codes(|i| {
            let at = 32 * j + i;
            from[4 + at / 16 * 8 + at % 8] >> (at % 16 / 8 * 4) & 15
        }),
        Kind::Q1_0 => map_codes(|i| from[2 + 4 * j + i / 8] >> (i % 8) & 1),
        Kind::Q2_0 => map_codes(|i| from[2 + 8 * j + i / 4] >> (i % 4 * 2) & 3),
        Kind::F32 | Kind::F16 | Kind::BF16 => unreachable!("{kind:?} has numbers"),
    }
}
