//! A model's tokenizer: text to ids, ids to text (`tokenizer/tokenizer.py`).
//!
//! Invariants: the same ids as Python gives for the same file, also where they come from the cache. Safe to use from
//! several threads.

use std::borrow::Cow;
use std::path::PathBuf;
use std::str::FromStr as _;

use serde::Deserialize;
use tokenizers::{PaddingParams, TruncationParams};

use super::TextError;
use super::bytes::Table;
use super::cache::{Cache, CacheStats};
use super::normalize::Backend;
use super::pieces::{Cuts, PIECE_BYTES, Part, Parts, pieces};

/// Where the tokenizer comes from.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
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
            around: None,
            backend,
        };
        found.around = found.special_ids();
        Ok(found)
    }

    /// Ids of `text`, at most `most`. A text that is longer than as many of the longest tokens is not looked at: what is
    /// encoded whole would take memory many times its size.
    pub fn encode(&self, text: &str, add_special_tokens: bool, most: usize) -> Result<Vec<u32>, TextError> {
        if text.len() > most.saturating_mul(self.table.longest()) {
            return Err(TextError::TooMany(most));
        }
        let around = if add_special_tokens { self.around.as_ref() } else { None };
        if add_special_tokens && around.is_none() {
            self.cache.count_encoded(text.len());
            let ids = self.encode_whole(text, true)?;
            return if ids.len() > most {
                Err(TextError::TooMany(ids.len()))
            } else {
                Ok(ids)
            };
        }
        let mut ids = around.map_or_else(Vec::new, |(before, _)| before.clone());
        let after = around.map_or(&[][..], |(_, after)| after);
        let most_inside = most.saturating_sub(after.len());
        match &self.cuts {
            Some(cuts) => {
                for part in cuts.parts(text) {
                    match part {
                        Part::Token(id) => ids.push(id),
                        Part::Text(text) => self.encode_part(text, most_inside, &mut ids)?,
                    }
                    check(&ids, most_inside)?;
                }
            }
            None => {
                self.cache.count_encoded(text.len());
                self.encode_pieces(text, most_inside, &mut ids)?;
            }
        }
        ids.extend_from_slice(after);
        check(&ids, most)?;
        Ok(ids)
    }

    /// What one id stands for in a text, special tokens included: maybe a part of a character.
    pub fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        Cow::Borrowed(i32::try_from(id).map_or(&[][..], |id| self.table.of(id)))
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

    pub(super) fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        self.backend.decode(ids, skip_special_tokens).unwrap_or_default()
    }

    /// Text without tokens to cut it at.
    fn encode_part(&self, text: &str, most: usize, ids: &mut Vec<u32>) -> Result<(), TextError> {
        if self.cache.get(text, ids) {
            return Ok(());
        }
        let begin = ids.len();
        self.encode_pieces(text, most, ids)?;
        self.cache.put(text, &ids[begin..]);
        Ok(())
    }

    fn encode_pieces(&self, text: &str, most: usize, ids: &mut Vec<u32>) -> Result<(), TextError> {
        if text.len() <= PIECE_BYTES || !self.can_cut {
            ids.append(&mut self.encode_whole(text, false)?);
            return check(ids, most);
        }
        for piece in pieces(text, PIECE_BYTES) {
            ids.append(&mut self.encode_whole(piece, false)?);
            check(ids, most)?;
        }
        Ok(())
    }

    fn encode_whole(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let found = self.backend.encode_fast(text, add_special_tokens);
        let encoding = found.map_err(|error| TextError::NotEncodable(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn special_ids(&self) -> Option<(Vec<u32>, Vec<u32>)> {
        let plain = self.encode_whole("a", false).ok()?;
        let around = self.encode_whole("a", true).ok()?;
        let at = around.iter().position(|id| Some(id) == plain.first())?;
        let after = around[at..].strip_prefix(plain.as_slice())?;
        Some((around[..at].to_vec(), after.to_vec()))
    }
}

fn check(ids: &[u32], most: usize) -> Result<(), TextError> {
    if ids.len() > most {
        Err(TextError::TooMany(ids.len()))
    } else {
        Ok(())
    }
}
