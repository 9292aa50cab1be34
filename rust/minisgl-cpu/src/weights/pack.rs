//! From tensors to panels.
//!
//! Invariants: what fits a `Form` without loss is copied bit by bit; the rest goes through f32 and is quantized by
//! one rule a form.

use super::matrix::{BLOCK, Form, Matrix, PANEL};
use crate::files::blocks::{decode, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::files::quantize::encode;
use crate::files::{Kind, TensorView};
use crate::{Error, Result};

/// Rows of a tensor for a matrix.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// The tensor; all its dimensions but the last count as rows.
    pub tensor: TensorView<'a>,
    /// Row i of the part is row `order(i)` of the tensor; without it, row i.
    pub order: Option<&'a (dyn Fn(usize) -> usize + Sync)>,
}

impl<'a> Part<'a> {
    /// All rows as they lie.
    #[must_use]
    pub fn new(tensor: TensorView<'a>) -> Self {
        Self { tensor, order: None }
    }

    /// All rows in another order.
    #[must_use]
    pub fn ordered(tensor: TensorView<'a>, order: &'a (dyn Fn(usize) -> usize + Sync)) -> Self {
        Self {
            tensor,
            order: Some(order),
        }
    }

    /// Row i of the part, as it is stored.
    fn row(&self, i: usize) -> Result<&'a [u8]> {
        let row = self.order.map_or(i, |order| order(i));
        if row >= self.tensor.rows() {
            let (name, rows) = (self.tensor.name(), self.tensor.rows());
            return Err(Error::file(format!(
                "tensor {name} has {rows} rows, not one numbered {row}"
            )));
        }
        Ok(self.tensor.row(row))
    }
}

impl Form {
    /// The form that holds a kind with the least loss.
    #[must_use]
    pub fn of(kind: Kind) -> Self {
        match kind {
            Kind::F16 => Self::F16,
            Kind::BF16 => Self::Bf16,
            Kind::Q4_0 | Kind::Q4_1 | Kind::Q4_K => Self::Q4,
            Kind::Q8_0 | Kind::Q5_0 | Kind::Q5_1 | Kind::Q5_K | Kind::Q6_K => Self::Q8,
            Kind::F32 | Kind::Q2_K | Kind::Q3_K | Kind::IQ4_NL | Kind::IQ4_XS => Self::F32,
            Kind::TQ1_0 | Kind::TQ2_0 | Kind::MXFP4 | Kind::NVFP4 | Kind::Q1_0 | Kind::Q2_0 => Self::F32,
        }
    }

    /// The form that holds both with the least loss: 8 bits for 4 and 8; F32 for all else that differs.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        if self == other {
            self
        } else if self.is_quantized() && other.is_quantized() {
            Self::Q8
        } else {
            Self::F32
        }
    }
}

impl Matrix {
    /// Stacks `parts` one below the other, or (`interleave`) panel by panel in turns, every part padded to whole
    /// panels by itself. `form`: another one than the parts' own. Several threads may pack different matrices at once.
    pub fn pack(parts: &[Part<'_>], interleave: bool, form: Option<Form>) -> Result<Self> {
        let Some(first) = parts.first() else {
            return Err(Error::setting("a matrix without parts"));
        };
        let k = first.tensor.k();
        if let Some(part) = parts.iter().find(|part| part.tensor.k() != k) {
            let (name, other) = (part.tensor.name(), part.tensor.k());
            let text = format!("tensor {name} has rows of {other}, {} of {k}", first.tensor.name());
            return Err(Error::file(text));
        }
        let own = parts.iter().map(|part| Form::of(part.tensor.kind()));
        let form = form.or_else(|| own.reduce(Form::with)).unwrap_or(Form::F32);
        if interleave {
            return Self::pack_interleaved(parts, form, k);
        }
        let n = parts.iter().map(|part| part.tensor.rows()).sum();
        let mut matrix = Self::zeroed(form, n, n.div_ceil(PANEL), k);
        let mut at = 0;
        for part in parts {
            for i in 0..part.tensor.rows() {
                matrix.put(at, part.tensor.kind(), part.row(i)?);
                at += 1;
            }
        }
        Ok(matrix)
    }

    fn pack_interleaved(parts: &[Part<'_>], form: Form, k: usize) -> Result<Self> {
        let rows = parts[0].tensor.rows();
        if let Some(part) = parts.iter().find(|part| part.tensor.rows() != rows) {
            let (name, other) = (part.tensor.name(), part.tensor.rows());
            let text = format!("tensor {name} has {other} rows, {} has {rows}", parts[0].tensor.name());
            return Err(Error::file(text));
        }
        let panels = rows.div_ceil(PANEL) * parts.len();
        let mut matrix = Self::zeroed(form, panels * PANEL, panels, k);
        for (turn, part) in parts.iter().enumerate() {
            for i in 0..rows {
                let panel = i / PANEL * parts.len() + turn;
                matrix.put(panel * PANEL + i % PANEL, part.tensor.kind(), part.row(i)?);
            }
        }
        Ok(matrix)
    }

    /// Row `r` from its stored bytes.
    fn put(&mut self, r: usize, kind: Kind, row: &[u8]) {
        let (form, k, lane) = (self.form(), self.k(), r % PANEL);
        let blocks = self.panel_mut(r / PANEL).chunks_exact_mut(form.block_bytes());
        match (kind, form) {
            (Kind::Q4_0, Form::Q4) => row.chunks_exact(18).zip(blocks).for_each(|(from, to)| {
                let d = u16::from_le_bytes([from[0], from[1]]);
                let m = f32_to_f16(-8.0 * f16_to_f32(d));
                put_q4(to, lane, [from[0], from[1]], m.to_le_bytes(), &from[2..]);
            }),
            (Kind::Q4_1, Form::Q4) => row.chunks_exact(20).zip(blocks).for_each(|(from, to)| {
                put_q4(to, lane, [from[0], from[1]], [from[2], from[3]], &from[4..]);
            }),
            (Kind::Q8_0, Form::Q8) => row.chunks_exact(34).zip(blocks).for_each(|(from, to)| {
                put_q8(to, lane, [from[0], from[1]], &from[2..]);
            }),
            (Kind::Q5_0, Form::Q8) => row.chunks_exact(22).zip(blocks).for_each(|(from, to)| {
                put_q8(to, lane, [from[0], from[1]], &fives(&from[2..6], &from[6..]));
            }),
            (Kind::Q4_K, Form::Q4) => {
                let subs = (0..k / BLOCK).map(|b| fours(&row[b / 8 * 144..][..144], b % 8));
                for ((d, m, q), to) in subs.zip(blocks) {
                    put_q4(to, lane, d.to_le_bytes(), m.to_le_bytes(), &q);
                }
            }
            _ => {
                let mut numbers = vec![0.0; k.next_multiple_of(BLOCK)];
                decode(kind, row, &mut numbers[..k]);
                for (from, to) in numbers.chunks_exact(BLOCK).zip(blocks) {
                    put_numbers(to, lane, form, from);
                }
            }
        }
    }
}

fn put_q4(to: &mut [u8], lane: usize, d: [u8; 2], m: [u8; 2], bytes: &[u8]) {
    to[2 * lane..][..2].copy_from_slice(&d);
    to[32 + 2 * lane..][..2].copy_from_slice(&m);
    for (j, bytes) in bytes.chunks_exact(4).enumerate() {
        to[64 + 64 * j + 4 * lane..][..4].copy_from_slice(bytes);
    }
}

fn put_q8(to: &mut [u8], lane: usize, d: [u8; 2], bytes: &[u8]) {
    to[2 * lane..][..2].copy_from_slice(&d);
    for (j, bytes) in bytes.chunks_exact(4).enumerate() {
        to[32 + 64 * j + 4 * lane..][..4].copy_from_slice(bytes);
    }
}

fn put_numbers(to: &mut [u8], lane: usize, form: Form, from: &[f32]) {
    match form {
        // what is not finite shows in the numbers of the first step
        Form::Q4 => {
            let mut block = [0; 20];
            let _ = encode(Kind::Q4_1, from, &mut block);
            put_q4(to, lane, [block[0], block[1]], [block[2], block[3]], &block[4..]);
        }
        Form::Q8 => {
            let mut block = [0; 34];
            let _ = encode(Kind::Q8_0, from, &mut block);
            put_q8(to, lane, [block[0], block[1]], &block[2..]);
        }
        Form::F16 => (0..BLOCK).for_each(|i| {
            to[i * 32 + lane * 2..][..2].copy_from_slice(&f32_to_f16(from[i]).to_le_bytes());
        }),
        Form::Bf16 => (0..BLOCK).for_each(|i| {
            let bytes = f32_to_bf16(from[i]).to_le_bytes();
            to[i / 2 * 64 + lane * 4 + i % 2 * 2..][..2].copy_from_slice(&bytes);
        }),
        Form::F32 => (0..BLOCK).for_each(|i| {
            to[i * 64 + lane * 4..][..4].copy_from_slice(&from[i].to_le_bytes());
        }),
    }
}

/// 32 numbers of five bits, less 16.
fn fives(high: &[u8], low: &[u8]) -> [u8; BLOCK] {
    let fifth = |i: usize| high[i / 8] >> (i % 8) & 1;
    std::array::from_fn(|i| {
        let four = low[i % 16] >> (i / 16 * 4) & 15;
        (four | fifth(i) << 4).wrapping_sub(16)
    })
}

/// The `j`-th 32 numbers of a K-block of 4 bits: scale, minimum, and the halves as Q4 has them.
fn fours(block: &[u8], j: usize) -> (u16, u16, [u8; 16]) {
    let super_scale = |at: usize| f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]));
    let packed = &block[4..16];
    let (scale, min) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (
            packed[j + 4] & 15 | packed[j - 4] >> 6 << 4,
            packed[j + 4] >> 4 | packed[j] >> 6 << 4,
        )
    };
    let d = f32_to_f16(super_scale(0) * f32::from(scale));
    let m = f32_to_f16(-super_scale(2) * f32::from(min));
    let four = |i: usize| block[16 + j / 2 * 32 + i] >> (j % 2 * 4) & 15;
    (d, m, std::array::from_fn(|i| four(i) | four(16 + i) << 4))
}
