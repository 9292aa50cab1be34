//! Ids of texts that come again: the parts of a long chat that its next turn repeats.
//!
//! Invariants: what is held stays below its bytes; what was not used while half of them came anew is forgotten. A text is
//! known by all of its bytes, not by a hash.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What an entry costs beside its text and its ids, about.
const ENTRY_BYTES: usize = 96;
/// No text may take more than this part of all: one long prompt would drive out all others.
const MAX_SHARE: usize = 32;

/// What the cache has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Texts that were known.
    pub hits: u64,
    /// Texts that were not.
    pub misses: u64,
    /// Bytes of the texts that were known.
    pub bytes_hit: u64,
    /// Bytes of the texts that were encoded, also of those that never ask the cache.
    pub bytes_encoded: u64,
    /// What is held now.
    pub bytes_held: u64,
}

/// Shared by threads.
pub(super) struct Cache {
    max_bytes: usize,
    known: Mutex<(Recent<Box<[u32]>>, CacheStats)>,
}

impl Cache {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes,
            known: Mutex::new((Recent::new(max_bytes), CacheStats::default())),
        }
    }

    /// Append the ids of `text` if they are known.
    pub(super) fn get(&self, text: &str, ids: &mut Vec<u32>) -> bool {
        let mut known = self.known();
        let forgotten = known.0.get(text, |found| ids.extend_from_slice(found));
        let (found, stats) = (forgotten.is_some(), &mut known.1);
        let (count, bytes) = if found {
            (&mut stats.hits, &mut stats.bytes_hit)
        } else {
            (&mut stats.misses, &mut stats.bytes_encoded)
        };
        *count += 1;
        *bytes += as_u64(text.len());
        drop(known);
        found
    }

    pub(super) fn put(&self, text: &str, ids: &[u32]) {
        let bytes = text.len() + std::mem::size_of_val(ids) + ENTRY_BYTES;
        if bytes <= self.max_bytes / MAX_SHARE {
            let forgotten = self.known().0.put(text, ids.into(), bytes);
            drop(forgotten);
        }
    }

    /// A text was encoded that the cache was not asked for.
    pub(super) fn count_encoded(&self, bytes: usize) {
        self.known().1.bytes_encoded += as_u64(bytes);
    }

    pub(super) fn stats(&self) -> CacheStats {
        let known = self.known();
        CacheStats {
            bytes_held: as_u64(known.0.new.bytes + known.0.old.bytes),
            ..known.1
        }
    }

    /// A panic while it was held leaves it whole: nothing can panic between two changes that belong together.
    fn known(&self) -> MutexGuard<'_, (Recent<Box<[u32]>>, CacheStats)> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn as_u64(size: usize) -> u64 {
    u64::try_from(size).unwrap_or(u64::MAX)
}

/// Values by texts, with what they cost.
pub struct Generation<V> {
    known: HashMap<Box<str>, (V, usize)>,
    bytes: usize,
}

impl<V> Default for Generation<V> {
    fn default() -> Self {
        Self {
            known: HashMap::new(),
            bytes: 0,
        }
    }
}

/// What was used of late, up to half of the bytes, and what was used before that.
pub struct Recent<V> {
    max_bytes: usize,
    new: Generation<V>,
    old: Generation<V>,
}

/// What is forgotten is given back: it may be much, and is not dropped while others wait.
pub type Forgotten<V> = Option<Generation<V>>;

impl<V> Recent<V> {
    /// It takes about so many bytes at most.
    pub fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes,
            new: Generation::default(),
            old: Generation::default(),
        }
    }

    /// None: the text is not known.
    pub fn get(&mut self, text: &str, look: impl FnOnce(&V)) -> Option<Forgotten<V>> {
        if let Some((found, _)) = self.new.known.get(text) {
            look(found);
            return Some(None);
        }
        let (text, (found, bytes)) = self.old.known.remove_entry(text)?;
        self.old.bytes -= bytes;
        look(&found);
        Some(self.add(text, found, bytes))
    }

    /// Another thread may have been faster. `bytes`: what it costs.
    pub fn put(&mut self, text: &str, value: V, bytes: usize) -> Forgotten<V> {
        let is_new = !self.new.known.contains_key(text);
        is_new.then(|| self.add(text.into(), value, bytes))?
    }

    fn add(&mut self, text: Box<str>, value: V, bytes: usize) -> Forgotten<V> {
        let is_full = self.new.bytes + bytes > self.max_bytes / 2;
        let forgotten = is_full.then(|| std::mem::replace(&mut self.old, std::mem::take(&mut self.new)));
        self.new.bytes += bytes;
        self.new.known.insert(text, (value, bytes));
        forgotten
    }
}
