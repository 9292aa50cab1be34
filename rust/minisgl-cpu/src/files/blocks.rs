//! Numbers of every stored kind as `f32`: the exact values that ggml's formats stand for.
//!
//! Invariants: each number is computed by the operations, in the order and with the roundings, of ggml's own
//! dequantization; conversions between 16 and 32 bits round to nearest, ties to even.

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)] // ggml's names
pub enum Kind {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    BF16,
    /// 32 numbers of 4 bits, less 8, times a scale.
    Q4_0,
    /// 32 numbers of 4 bits times a scale, plus a minimum.
    Q4_1,
    /// 32 numbers of 5 bits, less 16, times a scale.
    Q5_0,
    /// 32 numbers of 5 bits times a scale, plus a minimum.
    Q5_1,
    /// 32 numbers of 8 bits times a scale.
    Q8_0,
    /// 256 numbers of 4 bits; a scale and a minimum of 6 bits for 32 of them.
    Q4_K,
    /// 256 numbers of 5 bits; a scale and a minimum of 6 bits for 32 of them.
    Q5_K,
    /// 256 numbers of 6 bits, less 32; a scale of 8 bits for 16 of them.
    Q6_K,
}

impl Kind {
    /// All there are.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
    ];

    /// As ggml spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.traits().0
    }

    /// Numbers in a block.
    #[must_use]
    pub fn block_len(self) -> usize {
        self.traits().1
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        self.traits().2
    }

    /// The kind that ggml spells so.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Bytes of `len` numbers, or nothing if they do not fill blocks or do not fit into memory.
    #[must_use]
    pub fn bytes_of(self, len: usize) -> Option<usize> {
        let (_, block_len, block_bytes) = self.traits();
        if !len.is_multiple_of(block_len) {
            return None;
        }
        (len / block_len).checked_mul(block_bytes)
    }

    fn traits(self) -> (&'static str, usize, usize) {
        match self {
            Self::F32 => ("F32", 1, 4),
            Self::F16 => ("F16", 1, 2),
            Self::BF16 => ("BF16", 1, 2),
            Self::Q4_0 => ("Q4_0", 32, 18),
            Self::Q4_1 => ("Q4_1", 32, 20),
            Self::Q5_0 => ("Q5_0", 32, 22),
            Self::Q5_1 => ("Q5_1", 32, 24),
            Self::Q8_0 => ("Q8_0", 32, 34),
            Self::Q4_K => ("Q4_K", 256, 144),
            Self::Q5_K => ("Q5_K", 256, 176),
            Self::Q6_K => ("Q6_K", 256, 210),
        }
    }
}

/// Numbers of a K-block.
const QK_K: usize = 256;

/// Decodes whole blocks. `out` has to have as many numbers as `data` holds.
///
/// # Panics
/// If the two do not fit: a caller's mistake, which `TensorView` rules out for files.
pub fn decode(kind: Kind, data: &[u8], out: &mut [f32]) {
    assert_eq!(kind.bytes_of(out.len()), Some(data.len()), "{kind:?}");
    let (bytes, len) = (kind.block_bytes(), kind.block_len());
    let blocks = data.chunks_exact(bytes).zip(out.chunks_exact_mut(len));
    match kind {
        Kind::F32 => blocks.for_each(|(b, y)| y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        Kind::F16 => blocks.for_each(|(b, y)| y[0] = half(b, 0)),
        Kind::BF16 => blocks.for_each(|(b, y)| y[0] = bf16_to_f32(u16::from_le_bytes([b[0], b[1]]))),
        Kind::Q4_0 => blocks.for_each(|(b, y)| q4_0(b, y)),
        Kind::Q4_1 => blocks.for_each(|(b, y)| q4_1(b, y)),
        Kind::Q5_0 => blocks.for_each(|(b, y)| q5_0(b, y)),
        Kind::Q5_1 => blocks.for_each(|(b, y)| q5_1(b, y)),
        Kind::Q8_0 => blocks.for_each(|(b, y)| q8_0(b, y)),
        Kind::Q4_K => blocks.for_each(|(b, y)| q4_k(b, y)),
        Kind::Q5_K => blocks.for_each(|(b, y)| q5_k(b, y)),
        Kind::Q6_K => blocks.for_each(|(b, y)| q6_k(b, y)),
    }
}

/// d, then 16 bytes: number i in the low, number 16 + i in the high half of byte i.
fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (i, &q) in block[2..18].iter().enumerate() {
        out[i] = d * (f32::from(q & 15) - 8.0);
        out[16 + i] = d * (f32::from(q >> 4) - 8.0);
    }
}

/// d, m, then as `q4_0`.
fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (i, &q) in block[4..20].iter().enumerate() {
        out[i] = d * f32::from(q & 15) + m;
        out[16 + i] = d * f32::from(q >> 4) + m;
    }
}

/// d, 32 fifth bits, then as `q4_0`.
fn q5_0(block: &[u8], out: &mut [f32]) {
    let (d, high) = (half(block, 0), word(block, 2));
    for (i, &q) in block[6..22].iter().enumerate() {
        let (low, top) = fives(q, high, i);
        out[i] = d * (low - 16.0);
        out[16 + i] = d * (top - 16.0);
    }
}

/// d, m, 32 fifth bits, then as `q4_0`.
fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m, high) = (half(block, 0), half(block, 2), word(block, 4));
    for (i, &q) in block[8..24].iter().enumerate() {
        let (low, top) = fives(q, high, i);
        out[i] = d * low + m;
        out[16 + i] = d * top + m;
    }
}

/// Numbers i and 16 + i of five bits each.
fn fives(q: u8, high: u32, i: usize) -> (f32, f32) {
    let fifth = |at: usize| (((high >> at) & 1) as u8) << 4;
    (f32::from(q & 15 | fifth(i)), f32::from(q >> 4 | fifth(16 + i)))
}

/// d, then 32 signed bytes.
fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (y, &q) in out.iter_mut().zip(&block[2..34]) {
        *y = f32::from(q as i8) * d;
    }
}

/// d, m, 8 scales and minima of 6 bits; 4 x 32 bytes: 32 numbers in the low halves, then 32 in the high ones.
fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, m, scales) = (half(block, 0), half(block, 2), &block[4..16]);
    let quants = block[16..144].chunks_exact(32);
    for (pair, (qs, y)) in quants.zip(out.chunks_exact_mut(64)).enumerate() {
        for side in 0..2 {
            let (scale, min) = scale_and_min(scales, 2 * pair + side);
            let (d, m) = (d * scale, m * min);
            for (y, &q) in y[32 * side..][..32].iter_mut().zip(qs) {
                *y = d * f32::from(q >> (4 * side) & 15) - m;
            }
        }
    }
}

/// As `q4_k`, with 32 bytes of fifth bits before the quants: bit j of byte i belongs to number 32 j + i.
fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, m, scales) = (half(block, 0), half(block, 2), &block[4..16]);
    let (high, quants) = (&block[16..48], block[48..176].chunks_exact(32));
    for (pair, (qs, y)) in quants.zip(out.chunks_exact_mut(64)).enumerate() {
        for side in 0..2 {
            let j = 2 * pair + side;
            let (scale, min) = scale_and_min(scales, j);
            let (d, m) = (d * scale, m * min);
            for (y, (&q, &h)) in y[32 * side..][..32].iter_mut().zip(qs.iter().zip(high)) {
                let q = q >> (4 * side) & 15 | (h >> j & 1) << 4;
                *y = d * f32::from(q) - m;
            }
        }
    }
}

/// Of the j-th 32 numbers of a K-block. The first four lie in 6 bits of a byte, the others in 4 bits of another and
/// the 2 bits that the first four leave.
fn scale_and_min(scales: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (scales[j] & 63, scales[j + 4] & 63)
    } else {
        (
            scales[j + 4] & 15 | scales[j - 4] >> 6 << 4,
            scales[j + 4] >> 4 | scales[j] >> 6 << 4,
        )
    };
    (f32::from(scale), f32::from(min))
}

/// 128 bytes of low halves, 64 of upper two bits, 16 scales, d. Each half of the block: 4 x 32 numbers, of which the
/// first two share the low, the last two the high halves of 64 bytes, and all four 32 bytes of upper bits.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales, d) = (&block[..128], &block[128..192], &block[192..208], half(block, 208));
    for (at, y) in out[..QK_K].chunks_exact_mut(32).enumerate() {
        let (side, j) = (at / 4, at % 4);
        let low = &low[64 * side + 32 * (j % 2)..][..32];
        let high = &high[32 * side..][..32];
        for (i, y) in y.iter_mut().enumerate() {
            let q = low[i] >> (4 * (j / 2)) & 15 | (high[i] >> (2 * j) & 3) << 4;
            let scale = f32::from(scales[2 * at + i / 16] as i8);
            *y = d * scale * (f32::from(q) - 32.0);
        }
    }
}

fn half(bytes: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Exact.
#[must_use]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// To nearest, ties to even; NaN stays NaN.
#[must_use]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Exact.
#[must_use]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let rest = u32::from(bits & 0x7fff) << 13; // exponent and mantissa where a single has them
    let value = match bits & 0x7c00 {
        // The smallest are multiples of 2^-24, which a single holds.
        0 => {
            return f32::from_bits(sign | (f32::from(bits & 0x3ff) * f32::from_bits(0x3380_0000)).to_bits());
        }
        0x7c00 => rest | 0x7f80_0000,
        _ => rest + ((127 - 15) << 23),
    };
    f32::from_bits(sign | value)
}

/// To nearest, ties to even; beyond the largest: infinity; NaN stays NaN.
#[must_use]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let rest = bits & 0x7fff_ffff;
    if rest > 0x7f80_0000 {
        return sign | 0x7e00;
    }
    if rest >= 0x4780_0000 {
        return sign | 0x7c00; // 65536 and more
    }
    if rest < 0x3880_0000 {
        // Below the smallest normal one. Added to 0.5, whose last bit is 2^-24, it is rounded just there.
        let rounded = f32::from_bits(rest) + 0.5;
        return sign | (rounded.to_bits() - 0.5f32.to_bits()) as u16;
    }
    let rounded = rest + 0xfff + (rest >> 13 & 1); // may carry into the exponent, up to infinity: as it should
    sign | ((rounded - ((127 - 15) << 23)) >> 13) as u16
}
