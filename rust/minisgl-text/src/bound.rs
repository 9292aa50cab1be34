//! Lower bound of a text's token count without encoding it: its bytes over the maximum bytes of each kind in one token.
//!
//! Invariants: [`Bound::min_tokens`] never exceeds the encoded count. That requires that some token covers every
//! counted byte of the normalized text, so a bound exists only for tokenizers that guarantee it: byte-level BPE (bytes
//! missing in the vocabulary do not count), BPE with byte fallback or one unknown token for each character, Unigram
//! with byte fallback, with normalizers and pre-tokenizers that drop nothing else. An added token that absorbs spaces
//! around it covers any number of them: a text that contains one has bound 0.

use serde_json::Value;
use tokenizers::{Model as _, ModelWrapper, NormalizedString, Normalizer as _};

use super::bytes::{char_to_byte, push_byte_level, type_of};
use super::normalize::Backend;
use super::pieces::Parts;

const CHUNK_BYTES: usize = 1 << 16;
/// Bytes that a separately normalized chunk may have in excess of its share of the whole: marks that would join the
/// last character of the chunk before (at most four parts of four bytes), and a prefix for each chunk.
const JOINED_BYTES: usize = 32;
const MAX_PREFIX_BYTES: usize = 16;
const KEEPING_NORMALIZERS: [&str; 6] = ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "ByteLevel"];
const KEEPING_PRE_TOKENIZERS: [&str; 6] = [
    "ByteLevel",
    "Metaspace",
    "Digits",
    "Split",
    "Punctuation",
    "UnicodeScripts",
];

/// Byte counts of a text by kind: all bytes, ASCII letters, spaces, other alphabets, others.
type Kinds = [usize; 5];

/// Index in `Kinds` (above 0) of each byte value; `NOT_COUNTED` for bytes that may have no token.
type KindOf = [usize; 256];
const NOT_COUNTED: usize = 0;

fn kind_of(byte: u8) -> usize {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' => 1,
        b' ' | b'\t' | b'\n' | b'\r' => 2,
        0x80.. => 3,
        _ => 4,
    }
}

pub(super) struct Bound {
    kinds: KindOf,
    /// Maximum number of bytes in one token, by kind.
    longest: Kinds,
    normalizes: bool,
    /// Added tokens that absorb spaces around them.
    swallowing: Vec<String>,
}

impl Bound {
    /// Returns the bound of a tokenizer, or `None` if a token can stand for text of any length.
    pub(super) fn of(backend: &Backend, parts: &Parts) -> Option<Self> {
        let is_byte_level = |step: &Value| type_of(step) == "ByteLevel";
        let steps = || parts.normalizers.iter().chain(&parts.pre_tokenizers);
        let (pieces, lacks) = pieces_of_vocab(backend, steps().any(is_byte_level))?;
        let normalizes = parts.normalizers.len() > 1 || parts.normalizers.iter().any(|step| !is_byte_level(step));
        if !parts.normalizers.iter().all(keeps_all)
            || !parts.pre_tokenizers.iter().all(splits_only)
            || (normalizes && parts.normalizers.iter().any(is_byte_level))
        {
            return None;
        }
        let swallowing = || parts.tokens.iter().filter(|token| token.lstrip || token.rstrip);
        if !parts.normalizers.is_empty() && swallowing().any(|token| token.normalized) {
            return None;
        }
        let mut kinds = [NOT_COUNTED; 256];
        for byte in (0..=u8::MAX).filter(|byte| !lacks.contains(byte)) {
            kinds[usize::from(byte)] = kind_of(byte);
        }
        let mut bound = Self {
            kinds,
            longest: [1; 5],
            normalizes,
            swallowing: swallowing().map(|token| token.content.clone()).collect(),
        };
        for piece in &pieces {
            bound.include(piece);
        }
        for token in &parts.tokens {
            bound.include(token.content.as_bytes());
            let normal = bound.normalized(backend, &token.content)?;
            bound.include(normal.as_bytes());
        }
        if parts.pre_tokenizers.iter().any(|step| type_of(step) == "Metaspace") {
            bound.longest = [bound.longest[0]; 5]; // spaces become longer characters of another kind
        }
        Some(bound)
    }

    fn count(&self, data: &[u8]) -> Kinds {
        let mut counts = [0; 5];
        for &byte in data {
            counts[self.kinds[usize::from(byte)]] += 1;
        }
        counts[0] = counts[1..].iter().sum();
        counts
    }

    fn include(&mut self, piece: &[u8]) {
        if self.longest.iter().any(|&longest| piece.len() > longest) {
            let counts = self.count(piece);
            for (longest, count) in self.longest.iter_mut().zip(counts) {
                *longest = count.max(*longest);
            }
        }
    }

    fn normalized<'a>(&self, backend: &Backend, text: &'a str) -> Option<std::borrow::Cow<'a, str>> {
        let Some(normalizer) = backend.get_normalizer().filter(|_| self.normalizes) else {
            return Some(text.into());
        };
        let mut normal = NormalizedString::from(text);
        normalizer.normalize(&mut normal).ok()?;
        Some(normal.get().to_owned().into())
    }

    /// Returns a lower bound of the token count of `text`, or 0 without one. Stops once it exceeds `limit`.
    pub(super) fn min_tokens(&self, backend: &Backend, text: &str, limit: usize) -> usize {
        if text.len() <= limit || self.swallowing.iter().any(|token| text.contains(token)) {
            return 0;
        }
        let (mut totals, mut found, mut rest) = ([0; 5], 0, text);
        while !rest.is_empty() && found <= limit {
            let is_end = |at: &usize| rest.is_char_boundary(*at);
            let end = (CHUNK_BYTES.min(rest.len())..=rest.len())
                .find(is_end)
                .unwrap_or(rest.len());
            let (chunk, after) = rest.split_at(end);
            rest = after;
            let Some(normal) = self.normalized(backend, chunk) else {
                return found;
            };
            let joined = if self.normalizes { JOINED_BYTES } else { 0 };
            for (total, count) in totals.iter_mut().zip(self.count(normal.as_bytes())) {
                *total += count.saturating_sub(joined);
            }
            let least = totals
                .iter()
                .zip(self.longest)
                .map(|(total, longest)| total.div_ceil(longest));
            found = least.max().unwrap_or(0);
        }
        found
    }
}

/// Returns true if a normalizer drops no character and maps each by its neighbours at most.
fn keeps_all(normalizer: &Value) -> bool {
    match type_of(normalizer) {
        "Replace" => {
            let is_one = |text: &Value| text.as_str().is_some_and(|text| text.chars().count() == 1);
            is_one(&normalizer["pattern"]["String"]) && is_one(&normalizer["content"])
        }
        "Prepend" => normalizer["prepend"]
            .as_str()
            .is_some_and(|text| text.len() <= MAX_PREFIX_BYTES),
        other => KEEPING_NORMALIZERS.contains(&other),
    }
}

fn splits_only(pre_tokenizer: &Value) -> bool {
    KEEPING_PRE_TOKENIZERS.contains(&type_of(pre_tokenizer)) && pre_tokenizer["behavior"] != "Removed"
}

/// Returns the bytes of each token, and the byte values that may have no token. `None` if other text may have none.
fn pieces_of_vocab(backend: &Backend, is_byte_level: bool) -> Option<(Vec<Vec<u8>>, Vec<u8>)> {
    let model = backend.get_model();
    let has = |token: &str| model.token_to_id(token).is_some();
    let pieces = || model.get_vocab().into_keys().map(String::into_bytes).collect();
    let bpe = match model {
        ModelWrapper::BPE(bpe) => Some(bpe),
        _ => None,
    };
    if bpe.is_some() && is_byte_level {
        let alphabet = char_to_byte();
        let bytes_of = |token: String| {
            let mut bytes = Vec::new();
            push_byte_level(&token, &alphabet, &mut bytes);
            bytes
        };
        let is_lacking = |&at: &usize| char_at(at).is_some_and(|char| !has(char.encode_utf8(&mut [0; 4])));
        let lacks = (0..512).filter(is_lacking).filter_map(|at| alphabet[at]).collect();
        return Some((model.get_vocab().into_keys().map(bytes_of).collect(), lacks));
    }
    let falls_back = match model {
        ModelWrapper::BPE(bpe) => bpe.byte_fallback,
        ModelWrapper::Unigram(unigram) => unigram.byte_fallback(),
        _ => false,
    };
    if falls_back && (0..=u8::MAX).all(|byte| has(&format!("<0x{byte:02X}>"))) {
        return Some((pieces(), Vec::new()));
    }
    if bpe.is_some_and(|bpe| bpe.unk_token.is_some() && !bpe.fuse_unk) {
        let mut all_pieces: Vec<Vec<u8>> = pieces();
        all_pieces.extend([b'a', b' ', 0x80, b'.'].map(|byte| vec![byte; 4])); // an unknown character
        return Some((all_pieces, Vec::new()));
    }
    None
}

fn char_at(at: usize) -> Option<char> {
    u32::try_from(at).ok().and_then(char::from_u32)
}
