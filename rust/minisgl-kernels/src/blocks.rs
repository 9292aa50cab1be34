//! Decoding of every stored quantization format to `f32`: the exact values that ggml's formats define.
//!
//! Invariants: each value is computed by the operations of ggml's own dequantization, in their order and with their
//! roundings; conversions between 16 and 32 bits round to nearest, ties to even.

macro_rules! kinds {
    ($($name:ident $id:literal $len:literal $bytes:literal $decode:expr, $doc:literal;)*) => {
        /// Storage format of a tensor's elements: a ggml type.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(non_camel_case_types)] // ggml's names
        pub enum Kind { $(#[doc = $doc] $name,)* }

        impl Kind {
            /// All formats.
            pub const ALL: [Self; [$($id),*].len()] = [$(Self::$name),*];

            fn traits(self) -> (&'static str, u32, usize, usize) {
                match self { $(Self::$name => (stringify!($name), $id, $len, $bytes),)* }
            }
        }

        /// Decodes whole blocks of `data` into `out`, which must have exactly as many elements as `data` holds.
        ///
        /// # Panics
        /// If the two sizes do not match: a caller's mistake, which `TensorView` rules out for files.
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

// ggml's name and id, elements in a block, bytes of a block, decoder
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
    /// Returns ggml's name of the format, such as `Q4_K`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.traits().0
    }

    /// Returns ggml's numeric id of the format.
    #[must_use]
    pub fn id(self) -> u32 {
        self.traits().1
    }

    /// Returns the elements in a block.
    #[must_use]
    pub fn block_len(self) -> usize {
        self.traits().2
    }

    /// Returns the bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        self.traits().3
    }

    /// Returns the format with ggml's name `name`, or `None` if there is none.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Returns the bytes of `len` elements, or `None` if they do not fill whole blocks or the size overflows.
    #[must_use]
    pub fn bytes_of(self, len: usize) -> Option<usize> {
        if !len.is_multiple_of(self.block_len()) {
            return None;
        }
        (len / self.block_len()).checked_mul(self.block_bytes())
    }
}

/// Values of the 4-bit codes of `IQ4_NL` and `IQ4_XS`.
pub(crate) const UNEVEN: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Values of the 4-bit codes of `MXFP4` and `NVFP4`, doubled so that they are integers.
pub(crate) const FLOATS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Decodes a `Q4_0` block: scale d, then 16 bytes with element i in the low and 16 + i in the high nibble of byte i.
fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half(block, 0);
    for (i, &q) in block[2..18].iter().enumerate() {
        out[i] = d * (f32::from(q & 15) - 8.0);
        out[16 + i] = d * (f32::from(q >> 4) - 8.0);
    }
}

/// Decodes a `Q4_1` block: scale d, minimum m, then 16 bytes of nibbles laid out like `q4_0`.
fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (i, &q) in block[4..20].iter().enumerate() {
        out[i] = d * f32::from(q & 15) + m;
        out[16 + i] = d * f32::from(q >> 4) + m;
    }
}

/// Decodes a `Q5_0` block: scale d, 32 fifth bits, then 16 bytes of nibbles laid out like `q4_0`.
fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let (d, high) = (half(block, 0), word(block, 2));
    for (i, &q) in block[6..22].iter().enumerate() {
        let (low, top) = fives(q, high, i);
        out[i] = d * (low - 16.0);
        out[16 + i] = d * (top - 16.0);
    }
}

/// Decodes a `Q5_1` block: scale d, minimum m, 32 fifth bits, then 16 bytes of nibbles laid out like `q4_0`.
fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m, high) = (half(block, 0), half(block, 2), word(block, 4));
    for (i, &q) in block[8..24].iter().enumerate() {
        let (low, top) = fives(q, high, i);
        out[i] = d * low + m;
        out[16 + i] = d * top + m;
    }
}

/// Returns the 5-bit codes of elements i and 16 + i, from the nibbles of `q` and the fifth bits `high`.
fn fives(q: u8, high: u32, i: usize) -> (f32, f32) {
    let fifth = |at: usize| (((high >> at) & 1) as u8) << 4;
    (f32::from(q & 15 | fifth(i)), f32::from(q >> 4 | fifth(16 + i)))
}

/// Decodes a `Q8_0` block: scale d, then 32 signed bytes.
fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half(block, 0);
    for (y, &q) in out.iter_mut().zip(&block[2..34]) {
        *y = f32::from(q as i8) * d;
    }
}

/// Decodes a `Q4_K` block: d, m, 8 scales and minima of 6 bits; 4 x 32 bytes, 32 elements in low, 32 in high nibbles.
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

/// Decodes a `Q5_K` block: `Q4_K` with 32 bytes of fifth bits before the nibbles; bit j of byte i: element 32 j + i.
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

/// Returns scale and minimum of the j-th 32 elements of a K-quant block as f32.
fn scale_and_min(scales: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = scale_and_min_codes(scales, j);
    (f32::from(scale), f32::from(min))
}

/// Returns the 6-bit codes of scale and minimum of the j-th 32 elements of a K-quant block. The first four lie in the
/// low 6 bits of a byte; the others in 4 bits of another byte and the 2 bits that the first four leave free.
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

/// Decodes a `Q6_K` block: 128 bytes of low nibbles, 64 of upper 2 bits, 16 scales, d. Each half of the block is 4 x 32
/// elements: two take the low, two the high nibbles of 64 bytes, and all four share 32 bytes of upper bits.
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

/// Writes `d * values[code]` to `y` for the 4-bit `codes`: first all low nibbles, then all high ones.
fn looked_up(values: &[i8; 16], d: f32, codes: &[u8], y: &mut [f32]) {
    let (low, high) = y.split_at_mut(codes.len());
    for (i, &q) in codes.iter().enumerate() {
        low[i] = d * f32::from(values[usize::from(q & 15)]);
        high[i] = d * f32::from(values[usize::from(q >> 4)]);
    }
}

/// Decodes an `IQ4_NL` block: scale d, then 16 bytes of codes laid out like `q4_0`.
fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    looked_up(&UNEVEN, half(block, 0), &block[2..], out);
}

/// Decodes an `IQ4_XS` block: d, 8 x 2 upper bits of scales, 8 x 4 lower ones, then 8 x 16 bytes like `iq4_nl`.
fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let (d, high) = (half(block, 0), u16::from_le_bytes([block[2], block[3]]));
    for (j, (codes, y)) in block[8..].chunks_exact(16).zip(out.chunks_exact_mut(32)).enumerate() {
        let scale = block[4 + j / 2] >> (4 * (j % 2)) & 15 | ((high >> (2 * j) & 3) as u8) << 4;
        looked_up(&UNEVEN, d * (f32::from(scale) - 32.0), codes, y);
    }
}

/// Decodes an `MXFP4` block: an e8m0 exponent, then 16 bytes of codes laid out like `iq4_nl`.
fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    looked_up(&FLOATS, half_of_e8m0(block[0]), &block[1..], out);
}

/// Returns 2^(e - 127) / 2 for an e8m0 exponent (code values are doubled); the two smallest are subnormal.
pub(crate) fn half_of_e8m0(e: u8) -> f32 {
    f32::from_bits(match e {
        0..2 => 0x0020_0000 << e,
        _ => u32::from(e - 1) << 23,
    })
}

/// Decodes an `NVFP4` block: 4 e4m3 scales, then 4 x 8 bytes: of 16 elements, 8 in the low, 8 in the high nibbles.
fn nvfp4(block: &[u8; 36], out: &mut [f32; 64]) {
    for (i, (codes, y)) in block[4..].chunks_exact(8).zip(out.chunks_exact_mut(16)).enumerate() {
        looked_up(&FLOATS, half_of_e4m3(block[i]), codes, y);
    }
}

/// Returns half the value of an 8-bit e4m3 float; its sign bit is ignored.
pub(crate) fn half_of_e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (bits >> 3 & 15, f32::from(bits & 7));
    match exponent {
        _ if bits == 0x7f => 0.0, // NaN
        0 => mantissa * f32::from_bits((127 - 10) << 23),
        e => (8.0 + mantissa) * f32::from_bits((u32::from(e) + 127 - 11) << 23),
    }
}

/// Decodes a `Q2_K` block: 16 scales and minima in nibbles; 2 x 32 bytes of 4 x 32 elements, 2 bits each; d, m.
fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (quants, d, m) = (&block[16..80], half(block, 80), half(block, 82));
    for (at, y) in out.chunks_exact_mut(16).enumerate() {
        let (d, m) = (d * f32::from(block[at] & 15), m * f32::from(block[at] >> 4));
        for (y, q) in y.iter_mut().zip(twos(quants, at)) {
            *y = d * f32::from(q) - m;
        }
    }
}

/// Decodes a `Q3_K` block: 32 bytes of upper bits (a clear bit subtracts 4); 64 bytes like `q2_k`; 16 scales; d.
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

/// Returns the `at`-th of 16 packed 6-bit scales: the lower 4 bits of scales i and 8 + i are the nibbles of a byte;
/// bytes 8 to 11 have the upper 2 bits of scales i, 4 + i, and so on.
pub(crate) fn scale_of_six(scales: &[u8], at: usize) -> u8 {
    scales[at % 8] >> (4 * (at / 8)) & 15 | (scales[8 + at % 4] >> (2 * (at / 4)) & 3) << 4
}

/// Returns the `at`-th 16 elements of 2 bits each; the lowest bits of 32 bytes are the first 32 elements.
fn twos(quants: &[u8], at: usize) -> impl Iterator<Item = u8> {
    let (start, shift) = (at / 8 * 32 + at % 2 * 16, at % 8 / 2 * 2);
    quants[start..][..16].iter().map(move |&q| q >> shift & 3)
}

/// Decodes a `TQ1_0` block (ternary): 32 bytes of 5 x 32 elements, 16 of 5 x 16, 4 of 4 x 4; d.
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

/// Returns digit `place` in base 3, the highest first, of a fraction of 256.
pub(crate) fn digit(q: u8, place: usize) -> u8 {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    ((u16::from(q.wrapping_mul(POWERS[place])) * 3) >> 8) as u8
}

/// Decodes a `TQ2_0` block (ternary): 64 bytes of 2-bit elements laid out like `q2_k`; d.
fn tq2_0(block: &[u8; 66], out: &mut [f32; 256]) {
    let d = half(block, 64);
    for (at, y) in out.chunks_exact_mut(16).enumerate() {
        for (y, q) in y.iter_mut().zip(twos(block, at)) {
            *y = d * (f32::from(q) - 1.0);
        }
    }
}

/// Decodes a `Q1_0` block: d, then 128 bits; a set bit is d, a clear one -d.
fn q1_0(block: &[u8; 18], out: &mut [f32; 128]) {
    let d = half(block, 0);
    for (i, y) in out.iter_mut().enumerate() {
        *y = if block[2 + i / 8] >> (i % 8) & 1 == 1 { d } else { -d };
    }
}

/// Decodes a `Q2_0` block: d, then 16 bytes of 4 elements each.
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

/// Converts bf16 to f32, exactly.
#[must_use]
#[inline]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Converts f32 to bf16, rounding to nearest, ties to even; NaN stays NaN.
#[must_use]
#[inline]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Converts f16 to f32, exactly.
#[must_use]
#[inline]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let rest = u32::from(bits & 0x7fff) << 13; // exponent and mantissa at their place in an f32
    let value = match bits & 0x7c00 {
        // Subnormal values are multiples of 2^-24, exact in f32.
        0 => {
            return f32::from_bits(sign | (f32::from(bits & 0x3ff) * f32::from_bits(0x3380_0000)).to_bits());
        }
        0x7c00 => rest | 0x7f80_0000,
        _ => rest + ((127 - 15) << 23),
    };
    f32::from_bits(sign | value)
}

/// Converts f32 to f16, rounding to nearest, ties to even; values beyond the largest become infinity; NaN stays NaN.
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
        // Below the smallest normal f16: adding 0.5, whose last bit is 2^-24, rounds at that bit.
        let rounded = f32::from_bits(rest) + 0.5;
        return sign | (rounded.to_bits() - 0.5f32.to_bits()) as u16;
    }
    let rounded = rest + 0xfff + (rest >> 13 & 1); // may carry into the exponent, up to infinity, correctly
    sign | ((rounded - ((127 - 15) << 23)) >> 13) as u16
}

#[cfg(test)]
mod tests;
