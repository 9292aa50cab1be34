//! Safe split points of a text: the parts, encoded one by one, have the ids of the whole.
//!
//! There are two kinds: added tokens of the vocabulary (`Cuts`), and in long texts a space between two ASCII letters.
//!
//! Invariants: a tokenizer or a stretch of text for which that is not certain is not split.

use std::ops::Range;

use super::normalize::Backend;
use aho_corasick::{AhoCorasick, Input, MatchKind};
use serde_json::Value;
use tokenizers::normalizers::unicode::NFKC;
use tokenizers::{NormalizedString, Normalizer as _};

use super::bytes::{flat_steps, type_of};

/// Length in bytes above which a text is encoded in pieces.
pub(super) const PIECE_BYTES: usize = 1 << 16;

const SPLITS_BY_CHARACTER: [&str; 2] = ["Digits", "Punctuation"]; // split each character by itself, without context
/// Known pre-tokenizer alternatives. None matches a letter before a space, looks back, or looks ahead but from spaces.
const ALTERNATIVES: [&str; 19] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"'(?i:[sdmt]|ll|ve|re)",
    r"'s|'t|'re|'ve|'m|'ll|'d",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r" ?\p{L}+",
    r" ?\p{N}+",
    r"\p{N}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
];
/// Normalizers whose result for a piece does not depend on its position or its context.
const PURE_NORMALIZERS: [&str; 14] = [
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Lowercase",
    "Replace",
    "Prepend",
    "Strip",
    "StripAccents",
    "ByteLevel",
    "BertNormalizer",
    "Precompiled",
    "Sequence",
];
const PURE_PRE_TOKENIZERS: [&str; 11] = [
    "ByteLevel",
    "Metaspace",
    "Digits",
    "Split",
    "Punctuation",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
    "BertPreTokenizer",
    "CharDelimiterSplit",
    "Sequence",
];

/// Steps of a tokenizer, parsed from its file.
pub(super) struct Parts {
    pub(super) normalizers: Vec<Value>,
    pub(super) pre_tokenizers: Vec<Value>,
    pub(super) tokens: Vec<tokenizers::AddedToken>,
    ids: Vec<u32>,
    is_pure_model: bool,
}

impl Parts {
    pub(super) fn of(backend: &Backend) -> Self {
        let json = |component| flat_steps(component, "normalizers");
        let mut added: Vec<_> = backend.get_added_tokens_decoder().into_iter().collect();
        added.sort_unstable_by_key(|(id, _)| *id);
        let (ids, tokens) = added.into_iter().unzip();
        let is_pure_model = match backend.get_model() {
            tokenizers::ModelWrapper::BPE(model) => model.dropout.is_none(),
            _ => true,
        };
        Self {
            normalizers: json(serde_json::to_value(backend.get_normalizer()).unwrap_or_default()),
            pre_tokenizers: flat_steps(
                serde_json::to_value(backend.get_pre_tokenizer()).unwrap_or_default(),
                "pretokenizers",
            ),
            tokens,
            ids,
            is_pure_model,
        }
    }

    /// Returns the added tokens with their ids.
    pub(super) fn with_ids(&self) -> impl Iterator<Item = (&tokenizers::AddedToken, u32)> {
        self.tokens.iter().zip(self.ids.iter().copied())
    }

    /// Returns true if a split before a space between ASCII letters changes no ids.
    pub(super) fn can_cut(&self) -> bool {
        let keeps = |step: &Value| matches!(type_of(step), "NFC" | "NFD" | "NFKC" | "NFKD");
        if !self.normalizers.iter().all(keeps) {
            return false;
        }
        if self
            .tokens
            .iter()
            .any(|token| reaches(token) || crosses(&token.content))
        {
            return false;
        }
        for part in &self.pre_tokenizers {
            if splits_words(part) {
                return true;
            }
            if !SPLITS_BY_CHARACTER.contains(&type_of(part)) {
                return false;
            }
        }
        false
    }
}

/// Returns true if the match of a token depends on its neighbours, or includes spaces of them.
fn reaches(token: &tokenizers::AddedToken) -> bool {
    token.lstrip || token.rstrip || token.single_word
}

fn crosses(content: &str) -> bool {
    let mut normal = NormalizedString::from(content);
    if NFKC.normalize(&mut normal).is_err() {
        return true;
    }
    let bytes = normal.get().as_bytes();
    bytes.first() == Some(&b' ')
        || bytes
            .windows(2)
            .any(|pair| pair[0].is_ascii_alphabetic() && pair[1] == b' ')
}

fn splits_words(part: &Value) -> bool {
    if type_of(part) == "ByteLevel" {
        return part["use_regex"] == true;
    }
    if type_of(part) != "Split" || part["behavior"] != "Isolated" || part["invert"] != false {
        return false;
    }
    let Some(pattern) = part["pattern"]["Regex"].as_str().filter(|pattern| !pattern.is_empty()) else {
        return false;
    };
    let mut rest = pattern;
    loop {
        let follows = |one: &&&str| {
            rest.strip_prefix(**one)
                .is_some_and(|after| after.is_empty() || after.starts_with('|'))
        };
        let Some(known) = ALTERNATIVES.iter().filter(follows).max_by_key(|one| one.len()) else {
            return false;
        };
        match rest[known.len()..].strip_prefix('|') {
            Some(after) if !after.is_empty() => rest = after,
            _ => return true,
        }
    }
}

/// Splits `text` at safe points into pieces of at least `size` bytes, each as short as possible.
pub(super) fn pieces(text: &str, size: usize) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let left = rest.take()?;
        let bytes = left.as_bytes();
        let is_cut = |at: &usize| {
            bytes[at - 1].is_ascii_alphabetic() && bytes[*at] == b' ' && bytes[at + 1].is_ascii_alphabetic()
        };
        let cut = (size.max(1)..bytes.len().saturating_sub(1)).find(is_cut);
        let (piece, after) = match cut {
            Some(at) => (&left[..at], Some(&left[at..])),
            None => (left, None),
        };
        rest = after;
        Some(piece)
    })
}

/// Returns the byte offset of the character after the one at `at`.
pub(super) fn next_char(text: &str, at: usize) -> usize {
    at + text[at..].chars().next().map_or(1, char::len_utf8)
}

/// Returns true if a guard lies inside the range, not at its ends. `guards` are ascending.
pub(super) fn is_guarded(guards: &[usize], range: &Range<usize>) -> bool {
    let next = guards.partition_point(|&guard| guard <= range.start);
    guards.get(next).is_some_and(|&guard| guard < range.end)
}

/// Returns the leftmost longest unguarded matches in `text`. After a guarded one, continues at its second character.
pub(super) fn unguarded<'a>(
    tokens: &'a AhoCorasick,
    text: &'a str,
    is_guarded: impl Fn(&Range<usize>) -> bool + 'a,
) -> impl Iterator<Item = (usize, Range<usize>)> + 'a {
    let mut at = 0;
    std::iter::from_fn(move || {
        loop {
            let hit = tokens.find(Input::new(text).range(at.min(text.len())..))?;
            if !is_guarded(&hit.range()) {
                at = hit.end();
                return Some((hit.pattern().as_usize(), hit.range()));
            }
            at = next_char(text, hit.start());
        }
    })
}

/// Added tokens that split a text into independently encoded parts, as the library extracts them before any other step.
pub(super) struct Cuts {
    tokens: AhoCorasick,
    ids: Vec<u32>,
}

impl Cuts {
    /// Returns the split tokens of a tokenizer, or `None` if the parts may not be independent.
    ///
    /// The library matches all added tokens that are not `normalized`, leftmost and longest first, and then normalizes,
    /// splits and encodes the text between two of them separately. Encoding it alone gives the same, unless a token
    /// absorbs spaces or depends on its neighbours, or a step depends on the position in the text.
    pub(super) fn of(parts: &Parts) -> Option<Self> {
        let asks_place = |step: &Value| type_of(step) == "Metaspace" && step["prepend_scheme"] == "first";
        let are_of = |steps: &[Value], kinds: &[&str]| steps.iter().all(|step| kinds.contains(&type_of(step)));
        let is_pure = are_of(&parts.normalizers, &PURE_NORMALIZERS)
            && are_of(&parts.pre_tokenizers, &PURE_PRE_TOKENIZERS)
            && !parts.pre_tokenizers.iter().any(asks_place)
            && parts.is_pure_model;
        let all = parts.tokens.iter().zip(&parts.ids);
        let raw = || all.clone().filter(|(token, _)| !token.normalized);
        if !is_pure || raw().any(|(token, _)| reaches(token) || token.content.is_empty()) || raw().next().is_none() {
            return None;
        }
        let tokens = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(raw().map(|(token, _)| token.content.as_str()))
            .ok()?;
        Some(Self {
            tokens,
            ids: raw().map(|(_, &id)| id).collect(),
        })
    }

    /// Splits `text` into the non-empty text between tokens and the tokens' ids, in order. No token is matched across
    /// one of the `guards` (ascending byte offsets).
    pub(super) fn parts<'a>(&'a self, text: &'a str, guards: &'a [usize]) -> impl Iterator<Item = Segment> {
        let is_guarded = |range: &Range<usize>| !guards.is_empty() && is_guarded(guards, range);
        let tokens = unguarded(&self.tokens, text, is_guarded);
        let tokens = tokens.map(|(pattern, range)| (range, self.ids.get(pattern).copied()));
        let mut at = 0;
        let parts = tokens
            .chain([(text.len()..text.len(), None)])
            .flat_map(move |(place, id)| {
                let before = at..place.start;
                at = place.end;
                [
                    (!before.is_empty()).then_some(Segment::Text(before)),
                    id.map(Segment::Token),
                ]
            });
        parts.flatten()
    }
}

/// A part of a split text. See [`Cuts::parts`].
pub(super) enum Segment {
    /// Byte range of the text between two tokens.
    Text(Range<usize>),
    /// Id of an added token.
    Token(u32),
}
