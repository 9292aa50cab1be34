//! Encoding of texts with guarded offsets: no added token is matched across a guard, so that its characters are
//! ordinary text.
//!
//! A prompt has guards where a text of the request spells a marker, but none where the chat template spells it.
//!
//! Invariants: without guards the ids are the library's. With guards, a marker's ids come only from matches that span
//! no guard.

use std::collections::HashSet;
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::tokenizer::normalizer::Range as Of;
use tokenizers::tokenizer::{OffsetType, Result};
use tokenizers::{
    AddedToken, Model as _, ModelWrapper, NormalizedString, Normalizer as _, PreTokenizedString, PreTokenizer as _,
    Token,
};

use super::TextError;
use super::normalize::Backend;
use super::pieces::{Parts, is_guarded, next_char, unguarded};

/// HTML tags that vocabularies have as added tokens because texts contain them. They are no markers.
const TAGS: &str =
    " table caption thead tbody tfoot tr th td h1 h2 h3 h4 h5 h6 blockquote strong em b i u s sub sup code ";

/// Returns true if client text must not be encoded as this token: it is special, or looks like a marker of turns, calls
/// or reasoning (has a character that is no letter, digit or space, and is no HTML tag). A single character cannot be
/// guarded.
fn is_marker(token: &AddedToken) -> bool {
    let text = token.content.as_str();
    let name = text.trim_start_matches(['<', '/']).trim_end_matches('>');
    let is_tag = text.starts_with('<') && text.ends_with('>') && TAGS.contains(&format!(" {name} "));
    let is_word = text
        .chars()
        .all(|char| char.is_alphanumeric() || char.is_whitespace() || char == '▁');
    text.chars().nth(1).is_some() && (token.special || !(is_tag || is_word))
}

/// Markers: added tokens that a request's text must not become.
pub(super) struct Markers {
    all: AhoCorasick,
    sorted: Vec<String>,
    begins: [bool; 256],
    /// Bytes with which markers begin, if there are at most three.
    few: Option<[u8; 3]>,
    longest: usize,
    ids: HashSet<u32>,
}

impl Markers {
    pub(super) fn of(parts: &Parts) -> Option<Self> {
        let markers = || parts.with_ids().filter(|(token, _)| is_marker(token));
        let mut sorted: Vec<String> = markers().map(|(token, _)| token.content.clone()).collect();
        sorted.sort_unstable();
        let mut begins = [false; 256];
        for byte in sorted.iter().filter_map(|text| text.bytes().next()) {
            begins[usize::from(byte)] = true;
        }
        let bytes: Vec<u8> = (0..=u8::MAX).filter(|&byte| begins[usize::from(byte)]).collect();
        let (&first, &last) = bytes.first().zip(bytes.last())?;
        Some(Self {
            all: AhoCorasick::new(&sorted).ok()?,
            begins,
            few: (bytes.len() <= 3).then(|| [first, bytes[bytes.len() / 2], last]),
            longest: sorted.iter().map(String::len).max().unwrap_or(0),
            ids: markers().map(|(_, id)| id).collect(),
            sorted,
        })
    }

    /// Returns true if `text` contains a marker, or ends with the beginning of one that other text may complete.
    pub(super) fn are_in(&self, text: &str) -> bool {
        let [one, two, three] = self.few.unwrap_or_default();
        let may = self.few.is_none() || memchr::memchr3(one, two, three, text.as_bytes()).is_some();
        may && (self.all.is_match(text) || self.begun(text).next().is_some())
    }

    /// Returns the guards of `text`: ascending offsets after the first character of each marker that is not in `kept`.
    pub(super) fn guards(&self, text: &str, kept: &[String]) -> Vec<usize> {
        let is_kept = |pattern: usize| self.sorted.get(pattern).is_some_and(|marker| kept.contains(marker));
        let matches = self.all.find_overlapping_iter(text);
        let whole = matches
            .filter(|one| !is_kept(one.pattern().as_usize()))
            .map(|one| one.start());
        let mut guards: Vec<usize> = whole.chain(self.begun(text)).map(|at| next_char(text, at)).collect();
        guards.sort_unstable();
        guards.dedup();
        guards
    }

    /// Returns the offsets from which the text, with or without its trailing spaces, ends inside a marker.
    fn begun<'a>(&'a self, text: &'a str) -> impl Iterator<Item = usize> + 'a {
        let trimmed = text.trim_end();
        let texts = [text, trimmed]
            .into_iter()
            .take(if trimmed.len() == text.len() { 1 } else { 2 });
        texts.flat_map(move |text| {
            let from = text.len().saturating_sub(self.longest);
            (from..text.len()).filter(move |&at| {
                self.begins[usize::from(text.as_bytes()[at])] && text.is_char_boundary(at) && self.goes_on(&text[at..])
            })
        })
    }

    fn goes_on(&self, begun: &str) -> bool {
        let next = self.sorted.partition_point(|marker| marker.as_str() <= begun);
        self.sorted.get(next).is_some_and(|marker| marker.starts_with(begun))
    }
}

/// Added tokens of one of the library's two searches: in the raw or in the normalized text.
struct AddedTokens {
    tokens: AhoCorasick,
    added: Vec<(u32, AddedToken)>,
}

impl AddedTokens {
    fn of(parts: &Parts, backend: &Backend, normalized: bool) -> Option<Self> {
        let added = parts.with_ids().filter(|(token, _)| token.normalized == normalized);
        let added: Vec<_> = added.map(|(token, id)| (id, token.clone())).collect();
        let spelled = added.iter().map(|(_, token)| {
            let mut text = NormalizedString::from(token.content.as_str());
            if let Some(normalizer) = backend.get_normalizer().filter(|_| normalized) {
                normalizer.normalize(&mut text).ok()?;
            }
            Some(text.get().to_owned())
        });
        let spelled: Vec<String> = spelled.collect::<Option<_>>()?;
        let mut builder = AhoCorasick::builder();
        let tokens = builder.match_kind(MatchKind::LeftmostLongest).build(spelled).ok()?;
        Some(Self { tokens, added })
    }

    /// Splits `text` at added tokens as the library does, but not across `guards`.
    fn split(&self, text: &NormalizedString, guards: &[usize]) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
        let (spelled, base) = (text.get(), text.offsets_original().0);
        let is_guarded = |range: &Range<usize>| {
            let original = text.convert_offsets(Of::Normalized(range.clone()));
            original.is_some_and(|of| is_guarded(guards, &(base + of.start..base + of.end)))
        };
        let mut parts = Vec::new();
        let mut end = 0;
        let mut add = |range: Range<usize>, id: Option<u32>| {
            if let Some(part) = text.slice(Of::Normalized(range)).filter(|part| !part.is_empty()) {
                let token = id.map(|id| vec![Token::new(id, part.get().to_owned(), (0, part.len()))]);
                parts.push((part, token));
            }
        };
        for (pattern, range) in unguarded(&self.tokens, spelled, is_guarded) {
            let Some((id, token)) = self.added.get(pattern) else {
                continue;
            };
            let (before, after) = (&spelled[..range.start], &spelled[range.end..]);
            let is_word = |char: Option<char>| char.is_some_and(|char| char.is_alphanumeric() || char == '_');
            if token.single_word && (is_word(before.chars().next_back()) || is_word(after.chars().next())) {
                continue;
            }
            let begin = if token.lstrip {
                before.trim_end().len().max(end)
            } else {
                range.start
            };
            add(end..begin, None);
            let rest = if token.rstrip { after.trim_start() } else { after };
            end = spelled.len() - rest.len();
            add(begin..end, Some(*id));
        }
        add(end..spelled.len(), None);
        parts
    }
}

/// Encoder of texts with guards.
pub(super) struct Guarded {
    as_it_is: AddedTokens,
    normalized: AddedTokens,
}

impl Guarded {
    pub(super) fn of(parts: &Parts, backend: &Backend) -> Option<Self> {
        Some(Self {
            as_it_is: AddedTokens::of(parts, backend, false)?,
            normalized: AddedTokens::of(parts, backend, true)?,
        })
    }

    /// Encodes `text` with the library's steps, respecting `guards` (ascending byte offsets).
    pub(super) fn encode(
        &self,
        backend: &Backend,
        markers: &Markers,
        text: &str,
        guards: &[usize],
    ) -> std::result::Result<Vec<u32>, TextError> {
        let mut parts = PreTokenizedString::from(text);
        let mut steps = || -> Result<()> {
            parts.split(|_, text| Ok(self.as_it_is.split(&text, guards)))?;
            parts.split(|_, mut text| {
                if let Some(normalizer) = backend.get_normalizer() {
                    normalizer.normalize(&mut text)?;
                }
                Ok(self.normalized.split(&text, guards))
            })?;
            if let Some(pre_tokenizer) = backend.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut parts)?;
            }
            parts.tokenize(|piece| tokenize_without_markers(backend.get_model(), markers, piece.get()))
        };
        let done = steps().and_then(|()| parts.into_encoding(None, 0, OffsetType::None));
        let encoding = done.map_err(|error| TextError::NotEncodable(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// Tokenizes a piece without marker tokens: if the model itself yields one, splits the piece after its first character.
fn tokenize_without_markers(model: &ModelWrapper, markers: &Markers, piece: &str) -> Result<Vec<Token>> {
    let (mut found, mut rest) = (Vec::new(), piece);
    loop {
        let tokens = model.tokenize(rest)?;
        let marker = tokens.iter().find(|token| markers.ids.contains(&token.id));
        let cut = marker
            .map(|token| next_char(rest, token.offsets.0))
            .filter(|&cut| cut < rest.len());
        let Some(cut) = cut else {
            found.extend(tokens);
            return Ok(found);
        };
        found.extend(model.tokenize(&rest[..cut])?);
        rest = &rest[cut..];
    }
}
