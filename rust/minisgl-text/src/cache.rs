//! Ids of texts that come again: the parts of a long chat that its next turn repeats.
//!
//! Invariants: what is held stays below its bytes; the least recently used goes first. A text is known by all of its
//! bytes, not by a hash.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hashbrown::HashTable;

const NUM_SHARDS: usize = 8;
/// What an entry costs beside its text and its ids, about.
const ENTRY_BYTES: usize = 96;
/// No text may take more than this part of a shard: one long prompt would drive out all others.
const MAX_SHARE: usize = 4;
const NONE: usize = usize::MAX;

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
    hasher: RandomState,
    shards: Vec<Mutex<Shard>>,
    hits: AtomicU64,
    misses: AtomicU64,
    bytes_hit: AtomicU64,
    bytes_encoded: AtomicU64,
}

impl Cache {
    pub(super) fn new(max_bytes: usize) -> Self {
        let shards = (0..NUM_SHARDS)
            .map(|_| Mutex::new(Shard::new(max_bytes / NUM_SHARDS)))
            .collect();
        Self {
            hasher: RandomState::new(),
            shards,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            bytes_hit: AtomicU64::new(0),
            bytes_encoded: AtomicU64::new(0),
        }
    }

    /// Append the ids of `text` if they are known.
    pub(super) fn get(&self, text: &str, ids: &mut Vec<u32>) -> bool {
        let hash = self.hasher.hash_one(text);
        let found = self.shard(hash).get(hash, text, ids);
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
        let hash = self.hasher.hash_one(text);
        self.shard(hash).put(hash, text, ids);
    }

    /// A text was encoded that the cache was not asked for.
    pub(super) fn count_encoded(&self, bytes: usize) {
        self.bytes_encoded.fetch_add(as_u64(bytes), Relaxed);
    }

    pub(super) fn stats(&self) -> CacheStats {
        CacheStats {
            hits: self.hits.load(Relaxed),
            misses: self.misses.load(Relaxed),
            bytes_hit: self.bytes_hit.load(Relaxed),
            bytes_encoded: self.bytes_encoded.load(Relaxed),
            bytes_held: self.shards.iter().map(|shard| as_u64(lock(shard).bytes)).sum(),
        }
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        let at = usize::try_from(hash >> 32).unwrap_or(0) % NUM_SHARDS; // the table uses the other bits
        lock(&self.shards[at])
    }
}

/// A panic while it was held leaves a shard whole: nothing in it can panic between two changes that belong together.
fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

fn as_u64(size: usize) -> u64 {
    u64::try_from(size).unwrap_or(u64::MAX)
}

struct Entry {
    text: Box<str>,
    ids: Box<[u32]>,
    hash: u64,
    newer: usize,
    older: usize,
}

impl Entry {
    fn bytes(&self) -> usize {
        bytes_of(&self.text, &self.ids)
    }
}

fn bytes_of(text: &str, ids: &[u32]) -> usize {
    text.len() + std::mem::size_of_val(ids) + ENTRY_BYTES
}

/// A table of places in `entries`, which are a list from the newest to the oldest.
struct Shard {
    max_bytes: usize,
    bytes: usize,
    table: HashTable<usize>,
    entries: Vec<Entry>,
    newest: usize,
    oldest: usize,
}

impl Shard {
    fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes,
            bytes: 0,
            table: HashTable::new(),
            entries: Vec::new(),
            newest: NONE,
            oldest: NONE,
        }
    }

    fn find(&self, hash: u64, text: &str) -> Option<usize> {
        self.table.find(hash, |&at| *self.entries[at].text == *text).copied()
    }

    fn get(&mut self, hash: u64, text: &str, ids: &mut Vec<u32>) -> bool {
        let Some(at) = self.find(hash, text) else {
            return false;
        };
        ids.extend_from_slice(&self.entries[at].ids);
        if at != self.newest {
            self.unlink(at);
            self.link(at);
        }
        true
    }

    fn put(&mut self, hash: u64, text: &str, ids: &[u32]) {
        let bytes = bytes_of(text, ids);
        if bytes > self.max_bytes / MAX_SHARE || self.find(hash, text).is_some() {
            return; // another thread may have been faster
        }
        while self.bytes + bytes > self.max_bytes {
            self.remove_oldest();
        }
        let at = self.entries.len();
        self.entries.push(Entry {
            text: text.into(),
            ids: ids.into(),
            hash,
            newer: NONE,
            older: NONE,
        });
        let entries = &self.entries;
        self.table.insert_unique(hash, at, |&at| entries[at].hash);
        self.bytes += bytes;
        self.link(at);
    }

    fn remove_oldest(&mut self) {
        let at = self.oldest;
        self.unlink(at);
        self.forget(at);
        let entry = self.entries.swap_remove(at);
        self.bytes -= entry.bytes();
        let moved = self.entries.len(); // the last entry took its place
        if moved == at {
            return;
        }
        let (hash, newer, older) = (self.entries[at].hash, self.entries[at].newer, self.entries[at].older);
        if let Some(place) = self.table.find_mut(hash, |&place| place == moved) {
            *place = at;
        }
        self.point(newer, older, at);
    }

    fn forget(&mut self, at: usize) {
        if let Ok(place) = self.table.find_entry(self.entries[at].hash, |&place| place == at) {
            place.remove();
        }
    }

    /// The neighbours of an entry point to `at`.
    fn point(&mut self, newer: usize, older: usize, at: usize) {
        match self.entries.get_mut(newer) {
            Some(entry) => entry.older = at,
            None => self.newest = at,
        }
        match self.entries.get_mut(older) {
            Some(entry) => entry.newer = at,
            None => self.oldest = at,
        }
    }

    fn unlink(&mut self, at: usize) {
        let (newer, older) = (self.entries[at].newer, self.entries[at].older);
        match self.entries.get_mut(newer) {
            Some(entry) => entry.older = older,
            None => self.newest = older,
        }
        match self.entries.get_mut(older) {
            Some(entry) => entry.newer = newer,
            None => self.oldest = newer,
        }
    }

    /// As the newest.
    fn link(&mut self, at: usize) {
        let older = self.newest;
        self.entries[at].newer = NONE;
        self.entries[at].older = older;
        self.point(NONE, older, at);
    }
}
