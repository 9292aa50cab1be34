//! Ids of texts that come again: the parts of a long chat that its next turn repeats.
//!
//! Invariants: what is held stays below its bytes; what was not used while half of them came anew is forgotten. A text is
//! known by all of its bytes, not by a hash.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
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
    known: Mutex<Known>,
    hits: AtomicU64,
    misses: AtomicU64,
    bytes_hit: AtomicU64,
    bytes_encoded: AtomicU64,
}

impl Cache {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self {
            known: Mutex::new(Known {
                max_bytes,
                ..Known::default()
            }),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            bytes_hit: AtomicU64::new(0),
            bytes_encoded: AtomicU64::new(0),
        }
    }

    /// Append the ids of `text` if they are known.
    pub(super) fn get(&self, text: &str, ids: &mut Vec<u32>) -> bool {
        let forgotten = self.known().get(text, ids);
        let found = forgotten.is_some();
        let (count, bytes) = if found {
            (&self.hits, &self.bytes_hit)
        } else {
            (&self.misses, &self.bytes_encoded)
        };
        count.fetch_add(1, Relaxed);
        bytes.fetch_add(as_u64(text.len()), Relaxed);
        found
    }

    pub(super) fn put(&self, text: &str, ids: &[u32]) {
        let forgotten = self.known().put(text, ids);
        drop(forgotten);
    }

    /// A text was encoded that the cache was not asked for.
    pub(super) fn count_encoded(&self, bytes: usize) {
        self.bytes_encoded.fetch_add(as_u64(bytes), Relaxed);
    }

    pub(super) fn stats(&self) -> CacheStats {
        let known = self.known();
        CacheStats {
            hits: self.hits.load(Relaxed),
            misses: self.misses.load(Relaxed),
            bytes_hit: self.bytes_hit.load(Relaxed),
            bytes_encoded: self.bytes_encoded.load(Relaxed),
            bytes_held: as_u64(known.new.bytes + known.old.bytes),
        }
    }

    /// A panic while it was held leaves it whole: nothing can panic between two changes that belong together.
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn as_u64(size: usize) -> u64 {
    u64::try_from(size).unwrap_or(u64::MAX)
}

#[derive(Default)]
struct Generation {
    ids: HashMap<Box<str>, Box<[u32]>>,
    bytes: usize,
}

/// What was used of late, up to half of the bytes, and what was used before that.
#[derive(Default)]
struct Known {
    max_bytes: usize,
    new: Generation,
    old: Generation,
}

/// What is forgotten is given back: it may be much, and is not dropped while others wait.
type Forgotten = Option<Generation>;

impl Known {
    /// None: the text is not known.
    fn get(&mut self, text: &str, ids: &mut Vec<u32>) -> Option<Forgotten> {
        if let Some(found) = self.new.ids.get(text) {
            ids.extend_from_slice(found);
            return Some(None);
        }
        let (text, found) = self.old.ids.remove_entry(text)?;
        self.old.bytes -= bytes_of(&text, &found);
        ids.extend_from_slice(&found);
        Some(self.add(text, found))
    }

    /// Another thread may have been faster.
    fn put(&mut self, text: &str, ids: &[u32]) -> Forgotten {
        let fits = bytes_of(text, ids) <= self.max_bytes / MAX_SHARE;
        (fits && !self.new.ids.contains_key(text)).then(|| self.add(text.into(), ids.into()))?
    }

    fn add(&mut self, text: Box<str>, ids: Box<[u32]>) -> Forgotten {
        let bytes = bytes_of(&text, &ids);
        let is_full = self.new.bytes + bytes > self.max_bytes / 2;
        let forgotten = is_full.then(|| std::mem::replace(&mut self.old, std::mem::take(&mut self.new)));
        self.new.bytes += bytes;
        self.new.ids.insert(text, ids);
        forgotten
    }
}

fn bytes_of(text: &str, ids: &[u32]) -> usize {
    text.len() + std::mem::size_of_val(ids) + ENTRY_BYTES
}
