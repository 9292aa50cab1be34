//! Quantization of weights to blocks of 8 or 4 bits, for `--quantization q8|q4`.
//!
//! Invariants: blocks of 32 elements equal ggml's reference Q8_0 and Q4_1 bit for bit, rounded to nearest.
//!
//! Error of an element: with q8 at most 1/254 of the largest magnitude in its block; with q4 at most 1/30 of the range
//! of its block; plus the rounding of scale and minimum to half precision.

use minisgl_kernels::blocks::f32_to_f16;
use minisgl_kernels::{Kind, TensorView};

use crate::{Error, Result};

const BLOCK: usize = 32;
const INFINITE: u16 = 0x7c00;

/// Weight quantization that the server was started with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// Quantization to blocks of 8 bits (Q8_0).
    Q8,
    /// 4-bit blocks (Q4_1); embedding and LM head in Q8_0.
    Q4,
}

impl Quantization {
    /// Parses the value of `--quantization`: "q8" or "q4".
    pub fn parse(text: &str) -> Result<Self> {
        match text {
            "q8" => Ok(Self::Q8),
            "q4" => Ok(Self::Q4),
            _ => Err(Error::setting(format!("quantization: {text:?}: must be q8 or q4"))),
        }
    }

    /// Returns the block format of most weight matrices.
    #[must_use]
    pub fn kind(self) -> Kind {
        match self {
            Self::Q8 => Kind::Q8_0,
            Self::Q4 => Kind::Q4_1,
        }
    }

    /// Returns the format that `tensor` is stored in. Vectors, routers and tensors that are quantized already keep
    /// their format. Embedding and LM head have at least 8 bits, since every token depends on them.
    #[must_use]
    pub fn kind_of(self, tensor: &TensorView<'_>) -> Kind {
        let full = matches!(tensor.kind(), Kind::F32 | Kind::F16 | Kind::BF16);
        let matrix = tensor.shape().len() > 1 && tensor.k().is_multiple_of(BLOCK);
        let name = tensor.name();
        let small = ["norm.weight", ".mlp.gate.weight", ".ffn_gate_inp.weight"];
        if !full || !matrix || small.iter().any(|end| name.ends_with(end)) {
            tensor.kind()
        } else if matches!(name, "token_embd.weight" | "output.weight" | "lm_head.weight")
            || name.ends_with("embed_tokens.weight")
        {
            Kind::Q8_0
        } else {
            self.kind()
        }
    }
}

/// Quantizes `values` to blocks in `out`. Returns false if a value is not finite or too large for a scale.
///
/// # Panics
/// If `out` has the wrong length, or `kind` is neither Q8_0 nor Q4_1.
#[must_use]
pub fn encode(kind: Kind, values: &[f32], out: &mut [u8]) -> bool {
    assert_eq!(kind.bytes_of(values.len()), Some(out.len()), "{kind:?}");
    let blocks = values.chunks_exact(BLOCK).zip(out.chunks_exact_mut(kind.block_bytes()));
    let each: fn(&[f32], &mut [u8]) -> bool = match kind {
        Kind::Q8_0 => q8_0,
        Kind::Q4_1 => q4_1,
        _ => panic!("no blocks of {kind:?} are made"),
    };
    // no early exit: nearly all weights are finite
    blocks.fold(true, |sound, (x, y)| each(x, y) & sound)
}

fn q8_0(x: &[f32], out: &mut [u8]) -> bool {
    // magnitudes of floats order like their bits, and infinities and NaN come last
    let most = x.iter().fold(0, |most, v| (v.abs().to_bits() as i32).max(most));
    let d = f32::from_bits(most as u32) / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    let half = f32_to_f16(d);
    out[..2].copy_from_slice(&half.to_le_bytes());
    for (y, v) in out[2..].iter_mut().zip(x) {
        *y = round(v * inverse);
    }
    half < INFINITE
}

fn q4_1(x: &[f32], out: &mut [u8]) -> bool {
    let least = x.iter().fold(f32::INFINITY, |least, &v| least.min(v));
    let most = x.iter().fold(f32::NEG_INFINITY, |most, &v| most.max(v));
    let d = (most - least) / 15.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    let halves = (f32_to_f16(d), f32_to_f16(least));
    out[..2].copy_from_slice(&halves.0.to_le_bytes());
    out[2..4].copy_from_slice(&halves.1.to_le_bytes());
    let quant = |v: f32| (((v - least) * inverse + 0.5) as u8).min(15);
    for (i, y) in out[4..].iter_mut().enumerate() {
        *y = quant(x[i]) | quant(x[BLOCK / 2 + i]) << 4;
    }
    finite(x) && halves.0 < INFINITE && halves.1 & 0x7fff < INFINITE
}

/// Rounds to nearest, ties away from zero like C's `roundf`, for values within +-127. The loop vectorizes, unlike
/// `trunc` or a saturating cast, which took most of a Q6_K file's load time.
fn round(value: f32) -> u8 {
    /// 1.5 * 2^23: adding it rounds a float to an integer (ties to even) in its low mantissa bits.
    const WHOLE: f32 = 12_582_912.0;
    let even = value + WHOLE;
    let rest = value - (even - WHOLE);
    let tie = i32::from(rest == 0.5 && value > 0.0) - i32::from(rest == -0.5 && value < 0.0);
    (even.to_bits() as i32 + tie) as u8
}

fn finite(x: &[f32]) -> bool {
    x.iter().fold(true, |sound, v| sound & v.is_finite())
}

#[cfg(test)]
mod tests {
    use super::round;

    #[test]
    fn rounding_is_half_away_from_zero() {
        for quarter in -508..=508i32 {
            let near = (quarter as f32 / 4.0).to_bits();
            for value in [near.saturating_sub(1), near, near + 1].map(f32::from_bits) {
                if value.abs() <= 127.0 {
                    assert_eq!(round(value), value.round() as i8 as u8, "{value}");
                }
            }
        }
    }
}
