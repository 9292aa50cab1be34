//! Cache of encoded texts: token ids of the parts of a long chat that its next turn repeats.
//!
//! Invariants: memory stays within the limit; an entry that was not used while half of it was filled anew is evicted. A
//! text is identified by all of its bytes, not by a hash.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Approximate bytes of an entry in addition to its text and its ids.
const ENTRY_BYTES: usize = 96;
/// Divisor of the cache size for its largest entry: one long prompt must not evict all others.
const MAX_SHARE: usize = 32;

/// Counters of the encoding cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Number of cache lookups that hit.
    pub hits: u64,
    /// Number of cache lookups that missed.
    pub misses: u64,
    /// Bytes of the texts that hit.
    pub bytes_hit: u64,
    /// Bytes of the texts that were encoded, including those that bypass the cache.
    pub bytes_encoded: u64,
    /// Bytes in the cache now.
    pub bytes_held: u64,
}

/// Encoding cache, shared by threads.
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

    /// Appends the ids of `text` to `ids` if it is cached. Returns true if it was.
    pub(super) fn get(&self, text: &str, ids: &mut Vec<u32>) -> bool {
        let mut known = self.known();
        let evicted = known.0.get(text, |found| ids.extend_from_slice(found));
        let (found, stats) = (evicted.is_some(), &mut known.1);
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
            let evicted = self.known().0.put(text, ids.into(), bytes);
            drop(evicted);
        }
    }

    /// Counts `bytes` of a text that was encoded without a cache lookup.
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

    /// Locks the cache, ignoring poisoning: no panic can leave it half changed.
    fn known(&self) -> MutexGuard<'_, (Recent<Box<[u32]>>, CacheStats)> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn as_u64(size: usize) -> u64 {
    u64::try_from(size).unwrap_or(u64::MAX)
}

/// Cached values by text, each with its cost in bytes.
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

/// Cache of values by text in two generations: recently used ones, up to half of the bytes, and those before.
pub struct Recent<V> {
    max_bytes: usize,
    new: Generation<V>,
    old: Generation<V>,
}

/// Evicted generation, returned so that the caller can drop it after releasing the lock.
pub type Evicted<V> = Option<Generation<V>>;

impl<V> Recent<V> {
    /// Creates a cache of about `max_bytes` bytes at most.
    pub fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes,
            new: Generation::default(),
            old: Generation::default(),
        }
    }

    /// Looks up `text` and passes its value to `look`. Returns what was evicted, or `None` if the text is not cached.
    pub fn get(&mut self, text: &str, look: impl FnOnce(&V)) -> Option<Evicted<V>> {
        if let Some((found, _)) = self.new.known.get(text) {
            look(found);
            return Some(None);
        }
        let (text, (found, bytes)) = self.old.known.remove_entry(text)?;
        self.old.bytes -= bytes;
        look(&found);
        Some(self.add(text, found, bytes))
    }

    /// Inserts a value that costs `bytes`, unless another thread inserted one already. Returns what was evicted.
    pub fn put(&mut self, text: &str, value: V, bytes: usize) -> Evicted<V> {
        let is_new = !self.new.known.contains_key(text);
        is_new.then(|| self.add(text.into(), value, bytes))?
    }

    fn add(&mut self, text: Box<str>, value: V, bytes: usize) -> Evicted<V> {
        let is_full = self.new.bytes + bytes > self.max_bytes / 2;
        let evicted = is_full.then(|| std::mem::replace(&mut self.old, std::mem::take(&mut self.new)));
        self.new.bytes += bytes;
        self.new.known.insert(text, (value, bytes));
        evicted
    }
}
