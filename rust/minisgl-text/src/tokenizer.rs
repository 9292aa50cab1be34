//! A model's tokenizer: text to ids, ids to text.
//!
//! Invariants: the same ids as transformers gives for the same file, also from the cache. Thread-safe.

use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr as _;

use tokenizers::parallelism::MaybeParallelRefIterator as _;
use tokenizers::{PaddingParams, TruncationParams};

use super::TextError;
use super::bound::Bound;
use super::bytes::Table;
use super::cache::{Cache, CacheStats};
use super::guarded::{Guarded, Markers};
use super::normalize::Backend;
use super::pieces::{Cuts, PIECE_BYTES, Parts, Segment, is_guarded, pieces};

/// Source from which a tokenizer is read.
#[derive(Clone, Debug)]
pub enum TokenizerSource {
    /// Path of a `tokenizer.json`.
    File(PathBuf),
    /// Content of a `tokenizer.json`.
    Text(String),
}

/// Tokenizer of a model, shared by all threads.
pub struct Tokenizer {
    backend: Backend,
    table: Table,
    cache: Cache,
    cuts: Option<Cuts>,
    can_cut: bool,
    bound: Option<Bound>,
    /// Markers and the encoder that guards them. `None` if there are no markers.
    guard: Option<(Markers, Guarded)>,
    /// Special ids before and after a text. `None` if special tokens are not simply around it.
    around: Option<(Vec<u32>, Vec<u32>)>,
}

impl Tokenizer {
    /// Reads a tokenizer, with an encoding cache of at most `cache_bytes` bytes.
    pub fn new(source: &TokenizerSource, cache_bytes: usize) -> Result<Self, TextError> {
        let read = match source {
            TokenizerSource::File(path) => Backend::from_file(path),
            TokenizerSource::Text(text) => Backend::from_str(text),
        };
        let mut backend = read.map_err(|error| TextError::Tokenizer(error.to_string()))?;
        backend
            .with_truncation(None::<TruncationParams>)
            .map_err(|error| TextError::Tokenizer(error.to_string()))?
            .with_padding(None::<PaddingParams>);
        let parts = Parts::of(&backend);
        let mut tokenizer = Self {
            table: Table::new(&backend),
            cache: Cache::new(cache_bytes),
            cuts: Cuts::of(&parts),
            can_cut: parts.can_cut(),
            bound: Bound::of(&backend, &parts),
            guard: Markers::of(&parts).zip(Guarded::of(&parts, &backend)),
            around: None,
            backend,
        };
        tokenizer.around = tokenizer.special_ids_around();
        Ok(tokenizer)
    }

    /// Encodes `text` into at most `limit` ids, else `TextError::TooMany`. Text that cannot have so few is not encoded,
    /// a long one not to its end; memory is bounded if it can be split, else by `limit` if there is a [`Bound`].
    pub fn encode(&self, text: &str, add_special_tokens: bool, limit: usize) -> Result<Vec<u32>, TextError> {
        self.encode_guarded(text, &[], add_special_tokens, limit)
    }

    /// Encodes as [`Tokenizer::encode`] does, without matching added tokens across `guards` (ascending byte offsets).
    pub fn encode_guarded(
        &self,
        text: &str,
        guards: &[usize],
        add_special_tokens: bool,
        limit: usize,
    ) -> Result<Vec<u32>, TextError> {
        let count = self.min_tokens(text, limit);
        if count > limit {
            return Err(TextError::TooMany { count, at_least: true });
        }
        let around = if add_special_tokens { self.around.as_ref() } else { None };
        if add_special_tokens && around.is_none() {
            self.cache.count_encoded(text.len());
            let ids = self.encode_whole(text, true)?;
            check(&ids, limit, false)?;
            return Ok(ids);
        }
        let mut ids = around.map_or_else(Vec::new, |(before, _)| before.clone());
        let after = around.map_or(&[][..], |(_, after)| after);
        // a short text is encoded to its end, so that the error has the exact token count
        let is_long = text.len() > PIECE_BYTES;
        let limit_inside = if is_long {
            limit.saturating_sub(after.len())
        } else {
            usize::MAX
        };
        match &self.cuts {
            Some(cuts) => {
                for part in cuts.parts(text, guards) {
                    match part {
                        Segment::Token(id) => ids.push(id),
                        Segment::Text(range) if is_guarded(guards, &range) => {
                            self.cache.count_encoded(range.len());
                            self.encode_pieces(text, range, guards, limit_inside, &mut ids)?;
                        }
                        Segment::Text(range) => self.encode_part(&text[range], limit_inside, &mut ids)?,
                    }
                    check(&ids, limit_inside, true)?;
                }
            }
            None => {
                self.cache.count_encoded(text.len());
                self.encode_pieces(text, 0..text.len(), guards, limit_inside, &mut ids)?;
            }
        }
        ids.extend_from_slice(after);
        check(&ids, limit, false)?;
        Ok(ids)
    }

    /// Encodes two texts as a pair, with special tokens, as the tokenizer file defines it.
    pub fn encode_pair(&self, one: &str, other: &str) -> Result<Vec<u32>, TextError> {
        let encoded = self.backend.encode_fast((one, other), true);
        let encoding = encoded.map_err(|error| TextError::NotEncodable(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes each text as [`Tokenizer::encode`] does, on all cores. Fails with the first error.
    pub fn encode_batch(
        &self,
        texts: &[String],
        add_special_tokens: bool,
        limit: usize,
    ) -> Result<Vec<Vec<u32>>, TextError> {
        let encode = |text: &String| self.encode(text, add_special_tokens, limit);
        texts.maybe_par_iter().map(encode).collect()
    }

    /// Returns a lower bound of the token count of `text` without encoding it, not counting special tokens around it.
    /// Stops once it exceeds `limit`.
    pub fn min_tokens(&self, text: &str, limit: usize) -> usize {
        let bound = self.bound.as_ref();
        bound.map_or(0, |bound| bound.min_tokens(&self.backend, text, limit))
    }

    /// Splits `text` into pieces of at least `size` bytes, each with the ids that it has in the whole. One piece if the
    /// tokenizer allows no split.
    pub fn pieces<'a>(&self, text: &'a str, size: usize) -> impl Iterator<Item = &'a str> + use<'a> {
        pieces(text, if self.can_cut { size } else { text.len() })
    }

    /// Decodes `ids` as a whole text. Unknown ids are skipped.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TextError> {
        let decoded = self.backend.decode(ids, skip_special_tokens);
        decoded.map_err(|error| TextError::Tokenizer(error.to_string()))
    }

    /// Returns the special ids before any text, such as the beginning-of-sequence token.
    pub fn leading_ids(&self) -> &[u32] {
        self.around.as_ref().map_or(&[], |(before, _)| before)
    }

    /// Returns the ids of special tokens.
    pub fn special_ids(&self) -> impl Iterator<Item = usize> {
        self.table.special_ids()
    }

    /// Returns the bytes of one id, also of a special token. They may be part of a character.
    pub fn token_bytes(&self, id: i32) -> &[u8] {
        self.table.of(id)
    }

    /// Returns the id of the token spelled `text` in the vocabulary.
    pub fn token_id(&self, text: &str) -> Option<i32> {
        self.backend.token_to_id(text).and_then(|id| i32::try_from(id).ok())
    }

    /// Returns the id of the special token spelled `text`, or `None` if it is not special.
    pub fn special_id(&self, text: &str) -> Option<i32> {
        let is_special = self.backend.get_added_vocabulary().is_special_token(text);
        self.token_id(text).filter(|_| is_special)
    }

    /// Returns the largest id plus 1.
    pub fn num_ids(&self) -> usize {
        self.table.num_ids()
    }

    /// Returns the counters of the encoding cache.
    pub fn cache_stats(&self) -> CacheStats {
        self.cache.stats()
    }

    /// Returns true if text between special tokens is encoded separately and cached.
    pub fn caches(&self) -> bool {
        self.cuts.is_some()
    }

    pub(super) fn table(&self) -> &Table {
        &self.table
    }

    /// Encodes text without split tokens, through the cache.
    fn encode_part(&self, text: &str, limit: usize, ids: &mut Vec<u32>) -> Result<(), TextError> {
        if self.cache.get(text, ids) {
            return Ok(());
        }
        let begin = ids.len();
        self.encode_pieces(text, 0..text.len(), &[], limit, ids)?;
        self.cache.put(text, &ids[begin..]);
        Ok(())
    }

    /// Encodes a range of `text` piece by piece and appends the ids. `guards` are offsets in `text`.
    fn encode_pieces(
        &self,
        text: &str,
        range: Range<usize>,
        guards: &[usize],
        limit: usize,
        ids: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        let mut at = range.start;
        for piece in self.pieces(&text[range], PIECE_BYTES) {
            let span = at..at + piece.len();
            at = span.end;
            let guard = self.guard.as_ref().filter(|_| is_guarded(guards, &span));
            let mut piece_ids = match guard {
                None => self.encode_whole(piece, false)?,
                Some((markers, guarded)) => {
                    let inside = guards.iter().filter(|guard| span.contains(guard));
                    let inside: Vec<usize> = inside.map(|guard| guard - span.start).collect();
                    guarded.encode(&self.backend, markers, piece, &inside)?
                }
            };
            ids.append(&mut piece_ids);
            check(ids, limit, true)?;
        }
        Ok(())
    }

    /// Returns true if `text` has or ends inside a marker (an added token that is special or looks like one).
    pub fn has_markers(&self, text: &str) -> bool {
        self.guard.as_ref().is_some_and(|(markers, _)| markers.are_in(text))
    }

    /// Returns the byte offsets to guard in `text`, so that it is not encoded as markers, except those in `kept`.
    pub fn guards(&self, text: &str, kept: &[String]) -> Vec<usize> {
        self.guard
            .as_ref()
            .map_or_else(Vec::new, |(markers, _)| markers.guards(text, kept))
    }

    fn encode_whole(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encoded = self.backend.encode_fast(text, add_special_tokens);
        let encoding = encoded.map_err(|error| TextError::NotEncodable(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn special_ids_around(&self) -> Option<(Vec<u32>, Vec<u32>)> {
        let plain = self.encode_whole("a", false).ok()?;
        let around = self.encode_whole("a", true).ok()?;
        let at = around.iter().position(|id| Some(id) == plain.first())?;
        let after = around[at..].strip_prefix(plain.as_slice())?;
        Some((around[..at].to_vec(), after.to_vec()))
    }
}

fn check(ids: &[u32], limit: usize, at_least: bool) -> Result<(), TextError> {
    let count = ids.len();
    if count > limit {
        Err(TextError::TooMany { count, at_least })
    } else {
        Ok(())
    }
}
