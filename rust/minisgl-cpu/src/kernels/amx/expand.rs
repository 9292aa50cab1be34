//! Blocks of weights as tiles: integers in the order that a tile product wants its second operand.
//!
//! A tile of bytes has row j = inputs 4j..4j+4 of each output (the very layout of Q8), a tile of bf16 row j = inputs
//! 2j and 2j + 1.
//!
//! Keeps true: integers are exact in bf16 (8 bits of mantissa hold -128..=128 times a power of two).
//! Doesn't know: scales.

use std::arch::x86_64::*;

/// Integers of Q8 come out times 2^24: a byte in the upper end of a word needs no sign extension.
pub(super) const Q8_UNIT: f32 = 1.0 / (1 << 24) as f32;

/// Registers that the expansions want.
#[derive(Clone, Copy)]
pub(super) struct Tables {
    /// bf16 of 0..16, twice.
    numbers: __m512i,
    /// Bytes 0 and 1, 2 and 3 of each 32 bits as words.
    words: [__m512i; 2],
    /// Bytes 1 and 2 of each 32 bits as their upper ends.
    tops: [__m512i; 2],
    /// The odd words of two vectors.
    odd: __m512i,
}

impl Tables {
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn new() -> Self {
        let bytes = |of: &dyn Fn(usize, u8) -> [u8; 4]| {
            let mut all = [0u8; 64];
            for (n, four) in all.chunks_exact_mut(4).enumerate() {
                four.copy_from_slice(&of(n, (n % 4 * 4) as u8));
            }
            // SAFETY: 64 bytes.
            unsafe { _mm512_loadu_si512(all.as_ptr().cast()) }
        };
        let bf16 = |i: usize| ((i as f32).to_bits() >> 16) as u16;
        let pair = |a: u16, b: u16| {
            let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
            [a[0], a[1], b[0], b[1]]
        };
        const NONE: u8 = 0x80;
        Self {
            numbers: bytes(&|n, _| pair(bf16(2 * n % 16), bf16(2 * n % 16 + 1))),
            words: [
                bytes(&|_, at| [at, NONE, at + 1, NONE]),
                bytes(&|_, at| [at + 2, NONE, at + 3, NONE]),
            ],
            tops: [
                bytes(&|_, at| [NONE, NONE, NONE, at + 1]),
                bytes(&|_, at| [NONE, NONE, NONE, at + 2]),
            ],
            odd: bytes(&|n, _| pair(2 * n as u16 + 1, 32 + 2 * n as u16 + 1)),
        }
    }
}

/// The 16 rows of bf16 pairs of a Q4 block whose numbers are at `from`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn q4_to_bf16(tables: &Tables, from: *const u8, to: *mut u8) {
    for j in 0..4 {
        // SAFETY: the caller's: 256 bytes at `from`, 1024 aligned ones at `to`.
        unsafe {
            let bytes = _mm512_loadu_si512(from.add(64 * j).cast());
            for (half, &words) in tables.words.iter().enumerate() {
                // Only the low bits of a word choose a number, so nothing needs to be masked.
                let low = _mm512_shuffle_epi8(bytes, words);
                let high = _mm512_srli_epi16::<4>(low);
                let row = to.add(64 * (2 * j + half));
                _mm512_store_si512(row.cast(), _mm512_permutexvar_epi16(low, tables.numbers));
                _mm512_store_si512(
                    row.add(512).cast(),
                    _mm512_permutexvar_epi16(high, tables.numbers),
                );
            }
        }
    }
}

/// The 16 rows of bf16 pairs of a Q8 block whose numbers are at `from`, times 2^24.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn q8_to_bf16(tables: &Tables, from: *const u8, to: *mut u8) {
    let top = _mm512_set1_epi32(0xff00_0000_u32 as i32);
    for j in 0..8 {
        // SAFETY: the caller's: 512 bytes at `from`, 1024 aligned ones at `to`.
        unsafe {
            let bytes = _mm512_loadu_si512(from.add(64 * j).cast());
            let tops = [
                _mm512_slli_epi32::<24>(bytes),
                _mm512_shuffle_epi8(bytes, tables.tops[0]),
                _mm512_shuffle_epi8(bytes, tables.tops[1]),
                _mm512_and_si512(bytes, top),
            ];
            for half in 0..2 {
                let first = _mm512_castps_si512(_mm512_cvtepi32_ps(tops[2 * half]));
                let second = _mm512_castps_si512(_mm512_cvtepi32_ps(tops[2 * half + 1]));
                let pairs = _mm512_permutex2var_epi16(first, tables.odd, second);
                _mm512_store_si512(to.add(64 * (2 * j + half)).cast(), pairs);
            }
        }
    }
}

/// The 8 rows of bytes of a Q4 block whose numbers are at `from`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn q4_to_bytes(from: *const u8, to: *mut u8) {
    let four = _mm512_set1_epi8(15);
    for j in 0..4 {
        // SAFETY: the caller's: 256 bytes at `from`, 512 aligned ones at `to`.
        unsafe {
            let bytes = _mm512_loadu_si512(from.add(64 * j).cast());
            let high = _mm512_srli_epi16::<4>(bytes);
            let row = to.add(64 * j);
            _mm512_store_si512(row.cast(), _mm512_and_si512(bytes, four));
            _mm512_store_si512(row.add(256).cast(), _mm512_and_si512(high, four));
        }
    }
}
