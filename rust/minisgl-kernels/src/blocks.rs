//! Numbers of every stored kind as `f32`: the exact values that ggml's formats stand for.
//!
//! Invariants: each number is computed by the operations, in the order and with the roundings, of ggml's own
//! dequantization; conversions between 16 and 32 bits round to nearest, ties to even.

macro_rules! kinds {
    ($($name:ident $id:literal $len:literal $bytes:literal $decode:expr, $doc:literal;)*) => {
        /// How numbers are stored.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(non_camel_case_types)] // ggml's names
        pub enum Kind { $(#[doc = $doc] $name,)* }

        impl Kind {
            /// All there are.
            pub const ALL: [Self; [$($id),*].len()] = [$(Self::$name),*];

            fn traits(self) -> (&'static str, u32, usize, usize) {
                match self { $(Self::$name => (stringify!($name), $id, $len, $bytes),)* }
            }
        }

        /// Decodes whole blocks. `out` has to have as many numbers as `data` holds.
        ///
        /// # Panics
        /// If the two do not fit: a caller's mistake, which `TensorView` rules out for files.
        pub fn decode(kind: Kind, data: &[u8], out: &mut [f32]) {
            assert_eq!(kind.bytes_of(out.len()), Some(data.len()), "{kind:?}");
            match kind { $(Kind::$name => {
                let decode: fn(&[u8; $bytes], &mut [f32; $len]) = $decode;
                let (blocks, _) = data.as_chunks();
                let (numbers, _) = out.as_chunks_mut();
                blocks.iter().zip(numbers).for_each(|(block, out)| decode(block, out));
            })* }
        }
    };
}

// ggml's name and number, numbers in a block, bytes of it, how one is decoded
kinds! {
    F32 0 1 4 |b, y| y[0] = f32::from_le_bytes(*b), "IEEE single precision.";
    F16 1 1 2 |b, y| y[0] = half(b, 0), "IEEE half precision.";
    BF16 30 1 2 |b, y| y[0] = bf16_to_f32(u16::from_le_bytes(*b)), "The upper half of a single.";
    Q4_0 2 32 18 q4_0, "32 numbers of 4 bits, less 8, times a scale.";
    Q4_1 3 32 20 q4_1, "32 numbers of 4 bits times a scale, plus a minimum.";
    Q5_0 6 32 22 q5_0, "32 numbers of 5 bits, less 16, times a scale.";
    Q5_1 7 32 24 q5_1, "32 numbers of 5 bits times a scale, plus a minimum.";
    Q8_0 8 32 34 q8_0, "32 numbers of 8 bits times a scale.";
    Q2_K 10 256 84 q2_k, "256 numbers of 2 bits; a scale and a minimum of 4 bits for 16 of them.";
    Q3_K 11 256 110 q3_k, "256 numbers of 3 bits, less 4; a scale of 6 bits for 16 of them.";
    Q4_K 12 256 144 q4_k, "256 numbers of 4 bits; a scale and a minimum of 6 bits for 32 of them.";
    Q5_K 13 256 176 q5_k, "256 numbers of 5 bits; a scale and a minimum of 6 bits for 32 of them.";
    Q6_K 14 256 210 q6_k, "256 numbers of 6 bits, less 32; a scale of 8 bits for 16 of them.";
    IQ4_NL 20 32 18 iq4_nl, "32 of 16 uneven values times a scale.";
    IQ4_XS 23 256 136 iq4_xs, "256 of 16 uneven values; a scale of 6 bits for 32 of them.";
    TQ1_0 34 256 54 tq1_0, "256 times -1, 0 or 1, five in a byte, times a scale.";
    TQ2_0 35 256 66 tq2_0, "256 numbers of 2 bits, less 1, times a scale.";
    MXFP4 39 32 17 mxfp4, "32 numbers of 4 bits with an exponent, times a power of two.";
    NVFP4 40 64 36 nvfp4, "64 numbers of 4 bits with an exponent; a scale of 8 bits with an exponent for 16 of them.";
    Q1_0 41 128 18 q1_0, "128 signs of a scale.";
    Q2_0 42 64 18 q2_0, "64 numbers of 2 bits, less 1, times a scale.";
}

impl Kind {
    /// As ggml spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.traits().0
    }

    /// ggml's number of it.
    #[must_use]
    pub fn id(self) -> u32 {
        self.traits().1
    }

    /// Numbers in a block.
    #[must_use]
    pub fn block_len(self) -> usize {
        self.traits().2
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        self.traits().3
    }

    /// The kind that ggml spells so.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Bytes of `len` numbers, or nothing if they do not fill blocks or do not fit into memory.
    #[must_use]
    pub fn bytes_of(self, len: usize) -> Option<usize> {
        if !len.is_multiple_of(self.block_len()) {
            return None;
        }
        (len / self.block_len()).checked_mul(self.block_bytes())
    }
}

/// What the codes of `IQ4_NL` and `IQ4_XS` stand for.
pub(crate) const UNEVEN: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// What the codes of `MXFP4` and `NVFP4` stand for, twice.
pub(crate) const FLOATS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// d, then 16 bytes: number i in the low, number 16 + i in the high half of byte i.
fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half(block, 0);
    for (i, &q) in block[2..18].iter().enumerate() {
        out[i] = d * (f32::from(q & 15) - 8.0);
        out[16 + i] = d * (f32::from(q >> 4) - 8.0);
    }
}

/// d, m, then as `q4_0`.
fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (i, &q) in block[4..20].iter().enumerate() {
        out[i] = d * f32::from(q & 15) + m;
        out[16 + i] = d * f32::from(q >> 4) + m;
    }
}

/// d, 32 fifth bits, then as `q4_0`.
fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let (d, high) = (half(block, 0), word(block, 2));
    for (i, &q) in block[6..22].iter().enumerate() {
        let (low, top) = fives(q, high, i);
        out[i] = d * (low - 16.0);
        out[16 + i] = d * (top - 16.0);
    }
}

/// d, m, 32 fifth bits, then as `q4_0`.
fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
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
fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half(block, 0);
    for (y, &q) in out.iter_mut().zip(&block[2..34]) {
        *y = f32::from(q as i8) * d;
    }
}

/// d, m, 8 scales and minima of 6 bits; 4 x 32 bytes: 32 numbers in the low halves, then 32 in the high ones.
fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
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
fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
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

/// Of the j-th 32 numbers of a K-block.
fn scale_and_min(scales: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = scale_and_min_codes(scales, j);
    (f32::from(scale), f32::from(min))
}

/// Of the j-th 32 numbers of a K-block. The first four lie in 6 bits of a byte, the others in 4 bits of another and
/// the 2 bits that the first four leave.
pub(crate) fn scale_and_min_codes(scales: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (scales[j] & 63, scales[j + 4] & 63)
    } else {
        (
            scales[j + 4] & 15 | scales[j - 4] >> 6 << 4,
            scales[j + 4] >> 4 | scales[j] >> 6 << 4,
        )
    }
}

/// 128 bytes of low halves, 64 of upper two bits, 16 scales, d. Each half of the block: 4 x 32 numbers, of which the
/// first two share the low, the last two the high halves of 64 bytes, and all four 32 bytes of upper bits.
fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let (low, high, scales, d) = (&block[..128], &block[128..192], &block[192..208], half(block, 208));
    for (at, y) in out.chunks_exact_mut(32).enumerate() {
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

/// `y` has the values that `values` has for the codes in the halves of `codes`, times `d`: the low ones first.
fn looked_up(values: &[i8; 16], d: f32, codes: &[u8], y: &mut [f32]) {
    let (low, high) = y.split_at_mut(codes.len());
    for (i, &q) in codes.iter().enumerate() {
        low[i] = d * f32::from(values[usize::from(q & 15)]);
        high[i] = d * f32::from(values[usize::from(q >> 4)]);
    }
}

/// d, then 16 bytes of codes as `q4_0` has them.
fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    looked_up(&UNEVEN, half(block, 0), &block[2..], out);
}

/// d, 8 x 2 upper bits of scales, 8 x 4 lower ones, then 8 x 16 bytes as `iq4_nl`.
fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let (d, high) = (half(block, 0), u16::from_le_bytes([block[2], block[3]]));
    for (j, (codes, y)) in block[8..].chunks_exact(16).zip(out.chunks_exact_mut(32)).enumerate() {
        let scale = block[4 + j / 2] >> (4 * (j % 2)) & 15 | ((high >> (2 * j) & 3) as u8) << 4;
        looked_up(&UNEVEN, d * (f32::from(scale) - 32.0), codes, y);
    }
}

/// An exponent, then as `iq4_nl`.
fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    looked_up(&FLOATS, half_of_e8m0(block[0]), &block[1..], out);
}

/// Half of 2^(e - 127), as the values are doubled; the smallest two are below the normal numbers.
pub(crate) fn half_of_e8m0(e: u8) -> f32 {
    f32::from_bits(match e {
        0..2 => 0x0020_0000 << e,
        _ => u32::from(e - 1) << 23,
    })
}

/// 4 scales, then 4 x 8 bytes: of 16 numbers the first 8 in the low, the last 8 in the high halves.
fn nvfp4(block: &[u8; 36], out: &mut [f32; 64]) {
    for (i, (codes, y)) in block[4..].chunks_exact(8).zip(out.chunks_exact_mut(16)).enumerate() {
        looked_up(&FLOATS, half_of_e4m3(block[i]), codes, y);
    }
}

/// Half of an 8-bit number with 4 bits of exponent and 3 of mantissa; its sign bit is not looked at.
pub(crate) fn half_of_e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (bits >> 3 & 15, f32::from(bits & 7));
    match exponent {
        _ if bits == 0x7f => 0.0, // NaN
        0 => mantissa * f32::from_bits((127 - 10) << 23),
        e => (8.0 + mantissa) * f32::from_bits((u32::from(e) + 127 - 11) << 23),
    }
}

/// 16 scales and minima in the halves of bytes; 2 x 32 bytes of 4 x 32 numbers, 2 bits each; d, m.
fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (quants, d, m) = (&block[16..80], half(block, 80), half(block, 82));
    for (at, y) in out.chunks_exact_mut(16).enumerate() {
        let (d, m) = (d * f32::from(block[at] & 15), m * f32::from(block[at] >> 4));
        for (y, q) in y.iter_mut().zip(twos(quants, at)) {
            *y = d * f32::from(q) - m;
        }
    }
}

/// 32 bytes of upper bits, where a number is less by 4 if it has none; 64 bytes as in `q2_k`; 16 scales; d.
fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let (high, quants, scales, d) = (&block[..32], &block[32..96], &block[96..108], half(block, 108));
    for (at, y) in out.chunks_exact_mut(16).enumerate() {
        let d = d * (f32::from(scale_of_six(scales, at)) - 32.0);
        let high = &high[16 * (at % 2)..];
        for (i, (y, q)) in y.iter_mut().zip(twos(quants, at)).enumerate() {
            *y = d * (f32::from(q | (high[i] >> (at / 2) & 1) << 2) - 4.0);
        }
    }
}

/// The `at`-th of 16 scales of 6 bits: the lower 4 bits of scales i and 8 + i are a byte's halves; bytes 8 to 11 have the
/// upper 2 of i, 4 + i, ..
pub(crate) fn scale_of_six(scales: &[u8], at: usize) -> u8 {
    scales[at % 8] >> (4 * (at / 8)) & 15 | (scales[8 + at % 4] >> (2 * (at / 4)) & 3) << 4
}

/// The `at`-th 16 numbers of 2 bits; of 32 bytes the lowest bits are the first 32 numbers.
fn twos(quants: &[u8], at: usize) -> impl Iterator<Item = u8> {
    let (start, shift) = (at / 8 * 32 + at % 2 * 16, at % 8 / 2 * 2);
    quants[start..][..16].iter().map(move |&q| q >> shift & 3)
}

/// 32 bytes of 5 x 32 numbers, 16 of 5 x 16, 4 of 4 x 4; d.
fn tq1_0(block: &[u8; 54], out: &mut [f32; 256]) {
    let d = half(block, 52);
    let mut out = out.iter_mut();
    for (bytes, digits) in [(&block[..32], 5), (&block[32..48], 5), (&block[48..52], 4)] {
        for place in 0..digits {
            for (&q, y) in bytes.iter().zip(&mut out) {
                *y = d * (f32::from(digit(q, place)) - 1.0);
            }
        }
    }
}

/// A digit of base 3, the highest first, of a fraction of 256.
pub(crate) fn digit(q: u8, place: usize) -> u8 {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    ((u16::from(q.wrapping_mul(POWERS[place])) * 3) >> 8) as u8
}

/// 64 bytes as in `q2_k`; d.
fn tq2_0(block: &[u8; 66], out: &mut [f32; 256]) {
    let d = half(block, 64);
    for (at, y) in out.chunks_exact_mut(16).enumerate() {
        for (y, q) in y.iter_mut().zip(twos(block, at)) {
            *y = d * (f32::from(q) - 1.0);
        }
    }
}

/// d, then 128 bits: without it -d.
fn q1_0(block: &[u8; 18], out: &mut [f32; 128]) {
    let d = half(block, 0);
    for (i, y) in out.iter_mut().enumerate() {
        *y = if block[2 + i / 8] >> (i % 8) & 1 == 1 { d } else { -d };
    }
}

/// d, then 16 bytes of 4 numbers.
fn q2_0(block: &[u8; 18], out: &mut [f32; 64]) {
    let d = half(block, 0);
    for (i, y) in out.iter_mut().enumerate() {
        *y = d * (f32::from(block[2 + i / 4] >> (2 * (i % 4)) & 3) - 1.0);
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
#[inline]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// To nearest, ties to even; NaN stays NaN.
#[must_use]
#[inline]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Exact.
#[must_use]
#[inline]
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
#[inline]
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

#[cfg(test)]
mod tests;
