//! From tensors to panels.
//!
//! Invariants: what is held as it is keeps its bits; held as another kind, numbers are taken, and quantized by one rule a
//! kind where it has fewer bits than they need.

use std::borrow::Cow;

use super::layout::{BLOCK, PANEL};
use super::matrix::Matrix;
use crate::files::blocks::{decode, digit, f32_to_bf16, f32_to_f16, scale_and_min_codes, scale_of_six};
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
    fn row(&self, i: usize) -> Result<Cow<'a, [u8]>> {
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

impl Matrix {
    /// Stacks `parts` one below the other, or (`interleave`) panel by panel in turns, every part padded to whole
    /// panels by itself. `held`: as another kind than the parts' own. Several threads may pack different matrices at once.
    pub fn pack(parts: &[Part<'_>], interleave: bool, held: Option<Kind>) -> Result<Self> {
        let Some(first) = parts.first() else {
            return Err(Error::setting("a matrix without parts"));
        };
        let k = first.tensor.k();
        if let Some(part) = parts.iter().find(|part| part.tensor.k() != k) {
            let (name, other) = (part.tensor.name(), part.tensor.k());
            let text = format!("tensor {name} has rows of {other}, {} of {k}", first.tensor.name());
            return Err(Error::file(text));
        }
        let own = first.tensor.kind().held();
        let alike = parts.iter().all(|part| part.tensor.kind().held() == own);
        let held = held.unwrap_or(if alike { own } else { Kind::F32 });
        if interleave {
            return Self::pack_interleaved(parts, held, k);
        }
        let n = parts.iter().map(|part| part.tensor.rows()).sum();
        let mut matrix = Self::zeroed(held, n, n.div_ceil(PANEL), k);
        let mut at = 0;
        for part in parts {
            for i in 0..part.tensor.rows() {
                matrix.put(at, part.tensor.kind(), &part.row(i)?);
                at += 1;
            }
        }
        Ok(matrix)
    }

    fn pack_interleaved(parts: &[Part<'_>], held: Kind, k: usize) -> Result<Self> {
        let rows = parts[0].tensor.rows();
        if let Some(part) = parts.iter().find(|part| part.tensor.rows() != rows) {
            let (name, other) = (part.tensor.name(), part.tensor.rows());
            let text = format!("tensor {name} has {other} rows, {} has {rows}", parts[0].tensor.name());
            return Err(Error::file(text));
        }
        let panels = rows.div_ceil(PANEL) * parts.len();
        let mut matrix = Self::zeroed(held, panels * PANEL, panels, k);
        for (turn, part) in parts.iter().enumerate() {
            for i in 0..rows {
                let panel = i / PANEL * parts.len() + turn;
                matrix.put(panel * PANEL + i % PANEL, part.tensor.kind(), &part.row(i)?);
            }
        }
        Ok(matrix)
    }

    /// Row `r` from its stored bytes.
    fn put(&mut self, r: usize, kind: Kind, row: &[u8]) {
        let (held, k, lane) = (self.kind(), self.k(), r % PANEL);
        let layout = held.layout();
        let units = self.panel_mut(r / PANEL).chunks_exact_mut(layout.unit_bytes());
        if held.is_quantized() && held == kind.held() {
            let inputs = layout.unit * BLOCK;
            let stored = inputs / kind.block_len() * kind.block_bytes();
            for (from, to) in row.chunks_exact(stored).zip(units) {
                let (head, codes) = to.split_at_mut(layout.head);
                put_head(kind, from, head, lane);
                for (j, to) in codes.chunks_exact_mut(layout.codes()).enumerate() {
                    put_codes(layout.bits, &codes_of(kind, from, j), to, lane);
                }
            }
            return;
        }
        assert_eq!(layout.unit, 1, "numbers become {held:?}");
        let mut numbers = vec![0.0; k.next_multiple_of(BLOCK)];
        decode(kind, row, &mut numbers[..k]);
        for (from, to) in numbers.chunks_exact(BLOCK).zip(units) {
            put_numbers(to, lane, held, from);
        }
    }
}

/// The scales of row `lane` of a unit, from the blocks that are stored for it.
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

/// The codes of the `j`-th 32 numbers of a unit, as their kind stores them.
fn codes_of(kind: Kind, from: &[u8], j: usize) -> [u8; BLOCK] {
    let nibbles = |qs: usize, i: usize| from[qs + i % 16] >> (i / 16 * 4) & 15;
    let fifth = |at: usize, i: usize| (from[at + i / 8] >> (i % 8) & 1) << 4;
    let fours = |qs: usize, i: usize| from[qs + j / 2 * 32 + i] >> (j % 2 * 4) & 15;
    let twos = |qs: usize, i: usize| from[qs + j / 4 * 32 + i] >> (j % 4 * 2) & 3;
    let (side, turn) = (j / 4, j % 4);
    match kind {
        Kind::Q4_0 | Kind::IQ4_NL => std::array::from_fn(|i| nibbles(2, i)),
        Kind::MXFP4 => std::array::from_fn(|i| nibbles(1, i)),
        Kind::Q4_1 => std::array::from_fn(|i| nibbles(4, i)),
        Kind::IQ4_XS => std::array::from_fn(|i| nibbles(8 + 16 * j, i)),
        Kind::Q5_0 => std::array::from_fn(|i| nibbles(6, i) | fifth(2, i)),
        Kind::Q5_1 => std::array::from_fn(|i| nibbles(8, i) | fifth(4, i)),
        Kind::Q8_0 => std::array::from_fn(|i| from[2 + i]),
        Kind::Q2_K => std::array::from_fn(|i| twos(16, i)),
        Kind::Q3_K => std::array::from_fn(|i| twos(32, i) | (from[i] >> j & 1) << 2),
        Kind::Q4_K => std::array::from_fn(|i| fours(16, i)),
        Kind::Q5_K => std::array::from_fn(|i| fours(48, i) | (from[16 + i] >> j & 1) << 4),
        Kind::Q6_K => std::array::from_fn(|i| {
            let low = from[64 * side + 32 * (turn % 2) + i] >> (4 * (turn / 2)) & 15;
            low | (from[128 + 32 * side + i] >> (2 * turn) & 3) << 4
        }),
        Kind::TQ1_0 => std::array::from_fn(|i| match 32 * j + i {
            at @ 0..160 => digit(from[at % 32], at / 32),
            at @ 160..240 => digit(from[32 + at % 16], at / 16 - 10),
            at => digit(from[48 + at % 4], at / 4 - 60),
        }),
        Kind::TQ2_0 => std::array::from_fn(|i| twos(0, i)),
        Kind::NVFP4 => std::array::from_fn(|i| {
            let at = 32 * j + i;
            from[4 + at / 16 * 8 + at % 8] >> (at % 16 / 8 * 4) & 15
        }),
        Kind::Q1_0 => std::array::from_fn(|i| from[2 + 4 * j + i / 8] >> (i % 8) & 1),
        Kind::Q2_0 => std::array::from_fn(|i| from[2 + 8 * j + i / 4] >> (i % 4 * 2) & 3),
        Kind::F32 | Kind::F16 | Kind::BF16 => unreachable!("{kind:?} has numbers"),
    }
}

/// Codes of row `lane` into the planes of a block (see `layout`).
fn put_codes(bits: [usize; 2], codes: &[u8; BLOCK], to: &mut [u8], lane: usize) {
    let mut at = 0;
    let mut shift = 0;
    for bits in bits.into_iter().filter(|&bits| bits > 0) {
        let mask = ((1u16 << bits) - 1) as u8;
        for (j, four) in codes.chunks_exact(4).enumerate() {
            let to = &mut to[at + 64 * (j % bits) + 4 * lane..][..4];
            for (to, code) in to.iter_mut().zip(four) {
                *to |= (code >> shift & mask) << (bits * (j / bits));
            }
        }
        at += 64 * bits;
        shift += bits;
    }
}

fn put_numbers(to: &mut [u8], lane: usize, held: Kind, from: &[f32]) {
    match held {
        // what is not finite shows in the numbers of the first step
        Kind::Q4_1 => {
            let mut block = [0; 20];
            let _ = encode(Kind::Q4_1, from, &mut block);
            put_head(Kind::Q4_1, &block, &mut to[..64], lane);
            put_codes([4, 0], &codes_of(Kind::Q4_1, &block, 0), &mut to[64..], lane);
        }
        Kind::Q8_0 => {
            let mut block = [0; 34];
            let _ = encode(Kind::Q8_0, from, &mut block);
            put_head(Kind::Q8_0, &block, &mut to[..32], lane);
            put_codes([8, 0], &codes_of(Kind::Q8_0, &block, 0), &mut to[32..], lane);
        }
        Kind::F16 => (0..BLOCK).for_each(|i| {
            to[i * 32 + lane * 2..][..2].copy_from_slice(&f32_to_f16(from[i]).to_le_bytes());
        }),
        Kind::BF16 => (0..BLOCK).for_each(|i| {
            let bytes = f32_to_bf16(from[i]).to_le_bytes();
            to[i / 2 * 64 + lane * 4 + i % 2 * 2..][..2].copy_from_slice(&bytes);
        }),
        _ => (0..BLOCK).for_each(|i| {
            to[i * 64 + lane * 4..][..4].copy_from_slice(&from[i].to_le_bytes());
        }),
    }
}
