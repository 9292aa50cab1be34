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
    use serde_json::json;
    use std::time::Duration;

    fn key(changes: serde_json::Value) -> ApiKey {
        let mut found = json!({"name": "a", "key": "x", "share": 1, "max_inflight": 0, "max_queued_requests": 0,
            "tokens_per_minute": 0, "max_priority": 3});
        for (name, value) in changes.as_object().unwrap() {
            found[name] = value.clone();
        }
        serde_json::from_value(found).unwrap()
    }

    #[test]
    fn a_queue_of_its_own_counts_both_sides() {
        let (key, counts) = (key(json!({"max_queued_requests": 3})), KeyCounts::default());
        let room = |own, num_requests| has_room(&key, &counts, own, num_requests, None, Instant::now());
        assert!(room(2, 1) && !room(2, 2) && !room(3, 1) && room(0, 9));
        counts.others_waiting.store(2, Relaxed);
        assert!(room(0, 1) && !room(0, 2) && !room(1, 1));
    }

    #[test]
    fn tokens_are_a_bucket_that_fills_evenly() {
        let now = Instant::now();
        let mut bucket = Bucket::of(&key(json!({"tokens_per_minute": 60})), now).unwrap();
        let after = |seconds| now + Duration::from_secs(seconds);
        assert!(bucket.has_some(59, now) && !bucket.has_some(60, now));
        assert!(bucket.has_some(60, after(1)), "one a second");
        assert!(!bucket.has_some(91, after(1)), "it may be below nothing");
        assert!(!bucket.has_some(91, after(31)) && bucket.has_some(91, after(32)));
        assert!(
            bucket.has_some(150, after(1_000)) && !bucket.has_some(151, after(1_000)),
            "it holds a minute's"
        );
        assert!(Bucket::of(&key(json!({})), now).is_none());
    }

    #[test]
    fn keys_have_their_places_as_numbers() {
        let keys = json!([{"name": "a", "key": "x1", "share": 1, "max_inflight": 0, "max_queued_requests": 0,
            "tokens_per_minute": 0, "max_priority": 3}]);
        let config = crate::answer::tests::config(json!({"api_keys": keys, "api_key": "flag"}));
        assert_eq!((max_priority(&config, 1), max_priority(&config, 0)), (3, 100));
        let number = |given: &'static str| number_of(Some(given.as_bytes()), &config);
        assert_eq!((number("x1"), number("flag")), (Some(1), Some(0)));
        assert_eq!((number("x"), number(""), number_of(None, &config)), (None, None, None));
        let open = crate::answer::tests::config(json!({}));
        assert_eq!(
            (number_of(None, &open), number_of(Some(b"any"), &open)),
            (Some(0), Some(0))
        );
        assert_eq!(
            (KeyCounts::of(&config.api_keys).len(), KeyCounts::of(&[]).len()),
            (2, 0)
        );
    }
}
