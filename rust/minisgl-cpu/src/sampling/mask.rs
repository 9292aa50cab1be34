//! Which tokens may come at all: a bit for each, packed.
//!
//! Invariants: the logits of tokens that may come keep their bits, all others are minus infinity; what is uniform costs
//! little: nothing where all of 32 neighbours may come, a fill where none may.

/// Tokens of a word.
const WORD: usize = 32;
/// A table, not a shift: every instruction set compares eight or four of these at once.
const BITS: [u32; WORD] = {
    let mut bits = [0; WORD];
    let mut i = 0;
    while i < WORD {
        bits[i] = 1 << i;
        i += 1;
    }
    bits
};

/// The number of words of a mask over `vocab` tokens.
pub fn words(vocab: usize) -> usize {
    vocab.div_ceil(WORD)
}

/// Bit i % 32 of word i / 32 says whether token i may come. Bits beyond the logits mean nothing.
pub(super) fn apply(mask: &[u32], logits: &mut [f32]) {
    let (whole, rest) = logits.as_chunks_mut::<WORD>();
    if let Some(&word) = mask.get(whole.len()) {
        keep(word, rest);
    }
    for (&word, chunk) in mask.iter().zip(whole) {
        match word {
            u32::MAX => {}
            0 => chunk.fill(f32::NEG_INFINITY),
            _ => keep(word, chunk),
        }
    }
}

/// The logits whose bits are set.
#[inline(always)]
fn keep(word: u32, logits: &mut [f32]) {
    for (x, bit) in logits.iter_mut().zip(BITS) {
        *x = if word & bit == 0 { f32::NEG_INFINITY } else { *x };
    }
}
