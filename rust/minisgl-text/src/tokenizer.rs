//! A model's tokenizer: text to ids, ids to text.
//!
//! Invariants: the same ids as transformers gives for the same file, also where they come from the cache. Safe to use from
//! several threads.

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
use super::pieces::{Cuts, PIECE_BYTES, Part, Parts, is_guarded, pieces};

/// Where the tokenizer comes from.
#[derive(Clone, Debug)]
pub enum TokenizerSource {
    /// A tokenizer.json.
    File(PathBuf),
    /// The text of one.
    Text(String),
}

/// Shared by all threads.
pub struct Tokenizer {
    backend: Backend,
    table: Table,
    cache: Cache,
    cuts: Option<Cuts>,
    can_cut: bool,
    bound: Option<Bound>,
    /// None where there are no markers.
    guard: Option<(Markers, Guarded)>,
    /// What stands before and after any text with special tokens; None if they are not simply around it.
    around: Option<(Vec<u32>, Vec<u32>)>,
}

impl Tokenizer {
    /// With a cache of at most `cache_bytes`.
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
        let mut found = Self {
            table: Table::new(&backend),
            cache: Cache::new(cache_bytes),
            cuts: Cuts::of(&parts),
            can_cut: parts.can_cut(),
            bound: Bound::of(&backend, &parts),
            guard: Markers::of(&parts).zip(Guarded::of(&parts, &backend)),
            around: None,
            backend,
        };
        found.around = found.special_ids_around();
        Ok(found)
    }

    /// Ids of `text`, at most `most`. What cannot have so few is not encoded, and a long text not to its end: what that
    /// takes in memory is bounded where the text can be cut, and where it cannot, by `most` if there is a [`Bound`].
    pub fn encode(&self, text: &str, add_special_tokens: bool, most: usize) -> Result<Vec<u32>, TextError> {
        self.encode_guarded(text, &[], add_special_tokens, most)
    }

    /// [`Tokenizer::encode`] that matches no added token across one of the `guards`, byte offsets in order.
    pub fn encode_guarded(
        &self,
        text: &str,
        guards: &[usize],
        add_special_tokens: bool,
        most: usize,
    ) -> Result<Vec<u32>, TextError> {
        let count = self.min_tokens(text, most);
        if count > most {
            return Err(TextError::TooMany { count, at_least: true });
        }
        let around = if add_special_tokens { self.around.as_ref() } else { None };
        if add_special_tokens && around.is_none() {
            self.cache.count_encoded(text.len());
            let ids = self.encode_whole(text, true)?;
            check(&ids, most, false)?;
            return Ok(ids);
        }
        let mut ids = around.map_or_else(Vec::new, |(before, _)| before.clone());
        let after = around.map_or(&[][..], |(_, after)| after);
        // a short text is encoded to its end: whoever hears that it has too many tokens hears how many
        let is_long = text.len() > PIECE_BYTES;
        let most_inside = if is_long {
            most.saturating_sub(after.len())
        } else {
            usize::MAX
        };
        match &self.cuts {
            Some(cuts) => {
                for part in cuts.parts(text, guards) {
                    match part {
                        Part::Token(id) => ids.push(id),
                        Part::Text(range) if is_guarded(guards, &range) => {
                            self.cache.count_encoded(range.len());
                            self.encode_pieces(text, range, guards, most_inside, &mut ids)?;
                        }
                        Part::Text(range) => self.encode_part(&text[range], most_inside, &mut ids)?,
                    }
                    check(&ids, most_inside, true)?;
                }
            }
            None => {
                self.cache.count_encoded(text.len());
                self.encode_pieces(text, 0..text.len(), guards, most_inside, &mut ids)?;
            }
        }
        ids.extend_from_slice(after);
        check(&ids, most, false)?;
        Ok(ids)
    }

    /// Ids of two texts as the file says that they stand together, special tokens included.
    pub fn encode_pair(&self, one: &str, other: &str) -> Result<Vec<u32>, TextError> {
        let found = self.backend.encode_fast((one, other), true);
        let encoding = found.map_err(|error| TextError::NotEncodable(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// [`Tokenizer::encode`] of each, by as many threads as there are cores. The first error is that of all.
    pub fn encode_batch(
        &self,
        texts: &[String],
        add_special_tokens: bool,
        most: usize,
    ) -> Result<Vec<Vec<u32>>, TextError> {
        let encode = |text: &String| self.encode(text, add_special_tokens, most);
        texts.maybe_par_iter().map(encode).collect()
    }

    /// A number of tokens that `text` has at least, without special ones around it, known without encoding it; no more
    /// is found out than whether that is beyond `most`.
    pub fn min_tokens(&self, text: &str, most: usize) -> usize {
        let bound = self.bound.as_ref();
        bound.map_or(0, |bound| bound.min_tokens(&self.backend, text, most))
    }

    /// `text` as a long one of its kind is cut: each piece, from `size` bytes on, has the ids that it has in the whole.
    pub fn pieces<'a>(&self, text: &'a str, size: usize) -> impl Iterator<Item = &'a str> + use<'a> {
        pieces(text, if self.can_cut { size } else { text.len() })
    }

    /// The whole text of `ids`; what stands for nothing is no text.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TextError> {
        let found = self.backend.decode(ids, skip_special_tokens);
        found.map_err(|error| TextError::Tokenizer(error.to_string()))
    }

    /// Special tokens before any text, such as the one of its beginning.
    pub fn leading_ids(&self) -> &[u32] {
        self.around.as_ref().map_or(&[], |(before, _)| before)
    }

    /// Ids that are no text.
    pub fn special_ids(&self) -> impl Iterator<Item = usize> {
        self.table.special_ids()
    }

    /// What one id stands for in a text, special tokens included: maybe a part of a character.
    pub fn token_bytes(&self, id: i32) -> &[u8] {
        self.table.of(id)
    }

    /// The token that is spelled so in the vocabulary.
    pub fn token_id(&self, text: &str) -> Option<i32> {
        self.backend.token_to_id(text).and_then(|id| i32::try_from(id).ok())
    }

    /// The same, if it is special: no text.
    pub fn special_id(&self, text: &str) -> Option<i32> {
        let is_special = self.backend.get_added_vocabulary().is_special_token(text);
        self.token_id(text).filter(|_| is_special)
    }

    /// One more than the largest id.
    pub fn num_ids(&self) -> usize {
        self.table.num_ids()
    }

    /// What the cache has done so far.
    pub fn cache_stats(&self) -> CacheStats {
        self.cache.stats()
    }

    /// Whether the text between special tokens is encoded by itself, and kept.
    pub fn caches(&self) -> bool {
        self.cuts.is_some()
    }

    pub(super) fn table(&self) -> &Table {
        &self.table
    }

    /// Text without tokens to cut it at.
    fn encode_part(&self, text: &str, most: usize, ids: &mut Vec<u32>) -> Result<(), TextError> {
        if self.cache.get(text, ids) {
            return Ok(());
        }
        let begin = ids.len();
        self.encode_pieces(text, 0..text.len(), &[], most, ids)?;
        self.cache.put(text, &ids[begin..]);
        Ok(())
    }

    /// Appends the ids of a range of `text`, to which the offsets of `guards` belong.
    fn encode_pieces(
        &self,
        text: &str,
        range: Range<usize>,
        guards: &[usize],
        most: usize,
        ids: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        let mut at = range.start;
        for piece in self.pieces(&text[range], PIECE_BYTES) {
            let place = at..at + piece.len();
            at = place.end;
            let guard = self.guard.as_ref().filter(|_| is_guarded(guards, &place));
            let mut found = match guard {
                None => self.encode_whole(piece, false)?,
                Some((markers, guarded)) => {
                    let inside = guards.iter().filter(|guard| place.contains(guard));
                    let inside: Vec<usize> = inside.map(|guard| guard - place.start).collect();
                    guarded.encode(&self.backend, markers, piece, &inside)?
                }
            };
            ids.append(&mut found);
            check(ids, most, true)?;
        }
        Ok(())
    }

    /// Returns whether `text` spells a marker: an added token that is special or looks like one, or ends with the
    /// beginning of one.
    pub fn has_markers(&self, text: &str) -> bool {
        self.guard.as_ref().is_some_and(|(markers, _)| markers.are_in(text))
    }

    /// Returns the byte offsets within `text` that keep it from being read as markers, but for those of `kept`.
    pub fn guards(&self, text: &str, kept: &[String]) -> Vec<usize> {
        self.guard
            .as_ref()
            .map_or_else(Vec::new, |(markers, _)| markers.guards(text, kept))
    }

    fn encode_whole(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let found = self.backend.encode_fast(text, add_special_tokens);
        let encoding = found.map_err(|error| TextError::NotEncodable(error.to_string()))?;
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

fn check(ids: &[u32], most: usize, at_least: bool) -> Result<(), TextError> {
    let count = ids.len();
    if count > most {
        Err(TextError::TooMany { count, at_least })
    } else {
        Ok(())
    }
}
