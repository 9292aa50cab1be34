//! Token masks: one bit for each token that may be sampled.
//!
//! Invariants: allowed logits keep their bits, all others become minus infinity; uniform words are cheap.

/// Tokens per mask word.
const WORD: usize = 32;
/// Bit of each token in a word. A table, since compilers vectorize comparisons with it better than shifts.
const BITS: [u32; WORD] = {
    let mut bits = [0; WORD];
    let mut i = 0;
    while i < WORD {
        bits[i] = 1 << i;
        i += 1;
    }
    bits
};

/// Returns the number of words of a mask over `vocab` tokens.
pub fn words(vocab: usize) -> usize {
    vocab.div_ceil(WORD)
}

/// Sets the logits of banned tokens to minus infinity. Token i is allowed if bit i % 32 of word i / 32 is set.
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

/// Keeps the logits whose bits are set and sets all others to minus infinity.
#[inline(always)]
fn keep(word: u32, logits: &mut [f32]) {
    for (x, bit) in logits.iter_mut().zip(BITS) {
        *x = if word & bit == 0 { f32::NEG_INFINITY } else { *x };
    }
}
