//! What API keys use, and whether they may use more: `server/api_keys.py`. A key of the file has a number, its place there
//! from 1; all others are number 0.
//!
//! Invariants: which key was given, and whether one was right, takes the same time to find.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use crate::config::{ApiKey, GatewayConfig};

const MINUTE_S: f64 = 60.0;

/// The number of a key; None: there is no such key. 0 if none is asked for.
pub fn number_of(given: Option<&[u8]>, config: &GatewayConfig) -> Option<usize> {
    let alone = config.api_key.iter().map(|key| (0, key.as_str()));
    let of_file = config.api_keys.iter().enumerate();
    let mut keys = of_file
        .map(|(i, one)| (i + 1, one.key.as_str()))
        .chain(alone)
        .peekable();
    if keys.peek().is_none() {
        return Some(0);
    }
    let given = given?;
    keys.fold(None, |found, (number, key)| {
        if same(given, key.as_bytes()) {
            Some(number)
        } else {
            found
        }
    })
}

/// How far from 0 the priority may be that a key asks for.
pub fn max_priority(config: &GatewayConfig, number: usize) -> i64 {
    let key = number.checked_sub(1).and_then(|at| config.api_keys.get(at));
    key.map_or(config.max_priority, |key| key.max_priority)
}

/// In a time that does not depend on where they differ.
fn same(given: &[u8], key: &[u8]) -> bool {
    given.len() == key.len() && given.iter().zip(key).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

/// The counts of one API key, on this side and on the Python server's. Any thread reads them.
#[derive(Debug, Default)]
pub struct KeyCounts {
    /// Requests without a row in the engine.
    pub num_waiting: AtomicUsize,
    /// Given to the engine.
    pub num_requests: AtomicU64,
    /// Tokens of prompts, each once.
    pub num_prompt: AtomicU64,
    /// Tokens of answers.
    pub num_generated: AtomicU64,
    /// How many requests wait in the Python server.
    pub others_waiting: AtomicUsize,
    /// Tokens that were used there.
    pub others_tokens: AtomicU64,
}

impl KeyCounts {
    /// For number 0 and each key; none without a file of keys.
    pub fn of(keys: &[ApiKey]) -> Vec<std::sync::Arc<KeyCounts>> {
        let count = if keys.is_empty() { 0 } else { keys.len() + 1 };
        (0..count).map(|_| Default::default()).collect()
    }

    /// Tokens of both sides.
    fn used(&self) -> u64 {
        let of = |one: &AtomicU64| one.load(Relaxed);
        of(&self.num_prompt) + of(&self.num_generated) + of(&self.others_tokens)
    }
}

/// Tokens per minute: full at first, filled evenly; what is used is taken out as it comes.
#[derive(Debug)]
pub struct Bucket {
    most: f64,
    level: f64,
    used: u64,
    at: Instant,
}

impl Bucket {
    /// None: without a limit.
    pub fn of(key: &ApiKey, now: Instant) -> Option<Bucket> {
        let most = key.tokens_per_minute as f64;
        (key.tokens_per_minute > 0).then_some(Bucket {
            most,
            level: most,
            used: 0,
            at: now,
        })
    }

    /// Whether there is some, after so much in all.
    fn has_some(&mut self, used: u64, now: Instant) -> bool {
        let filled = now.duration_since(self.at).as_secs_f64() * self.most / MINUTE_S;
        self.level = self.most.min(self.level + filled) - used.saturating_sub(self.used) as f64;
        (self.used, self.at) = (used, now);
        self.level > 0.0
    }
}

/// Whether the key may have as many more requests.
pub fn has_room(
    key: &ApiKey,
    counts: &KeyCounts,
    own_waiting: usize,
    num_requests: usize,
    bucket: Option<&mut Bucket>,
    now: Instant,
) -> bool {
    let most = key.max_queued_requests;
    let waiting = own_waiting + counts.others_waiting.load(Relaxed);
    let fits = most == 0 || (waiting < most && (waiting == 0 || waiting + num_requests <= most));
    fits && bucket.is_none_or(|one| one.has_some(counts.used(), now))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::time::Duration;

    #[test]
    fn tokens_are_a_bucket_that_fills_evenly() {
        let now = Instant::now();
        let key = |tokens_per_minute| ApiKey {
            name: "a".to_owned(),
            key: "x".to_owned(),
            max_queued_requests: 0,
            tokens_per_minute,
            max_priority: 3,
        };
        let mut bucket = Bucket::of(&key(60), now).unwrap();
        let after = |seconds| now + Duration::from_secs(seconds);
        assert!(bucket.has_some(59, now) && !bucket.has_some(60, now));
        assert!(bucket.has_some(60, after(1)), "one a second");
        assert!(!bucket.has_some(91, after(1)), "it may be below nothing");
        assert!(!bucket.has_some(91, after(31)) && bucket.has_some(91, after(32)));
        assert!(
            bucket.has_some(150, after(1_000)) && !bucket.has_some(151, after(1_000)),
            "it holds a minute's"
        );
        assert!(Bucket::of(&key(0), now).is_none());
    }
}
