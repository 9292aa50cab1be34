//! What waits in the gateway, counted where Python reads it (`server/core/waiting.py`, `server/core/api_keys.py`).
//!
//! Invariants: choices count from the moment in which Python prepared them, so that what it prepares at once stays within
//! its limits; each stops counting once, when it has a row in the engine or nobody waits for it any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// The counts of one API key. Any thread reads them.
#[derive(Debug, Default)]
pub struct KeyCounts {
    /// Requests without a row in the engine.
    pub num_waiting: AtomicUsize,
    /// Their prompts have as many tokens.
    pub num_waiting_tokens: AtomicUsize,
    /// Given to the engine.
    pub num_requests: AtomicU64,
    /// Tokens of prompts, each once.
    pub num_prompt: AtomicU64,
    /// Tokens of answers.
    pub num_generated: AtomicU64,
}

/// Choices without a row in the engine, and the tokens of their prompts.
#[derive(Debug, Default)]
pub struct Waiting {
    /// How many.
    pub requests: AtomicUsize,
    /// Their prompts have as many tokens.
    pub tokens: AtomicUsize,
}

/// The room of one choice in the queue; given back when it is dropped.
#[derive(Debug)]
pub struct Room {
    waiting: Arc<Waiting>,
    key: Option<Arc<KeyCounts>>,
    tokens: usize,
}

/// The rooms of the choices of one request.
pub type Reserved = Vec<Room>;

impl Room {
    /// Takes the room of a choice with a prompt of so many tokens.
    pub fn take(waiting: &Arc<Waiting>, key: Option<&Arc<KeyCounts>>, tokens: usize) -> Room {
        waiting.requests.fetch_add(1, Relaxed);
        waiting.tokens.fetch_add(tokens, Relaxed);
        if let Some(key) = key {
            key.num_waiting.fetch_add(1, Relaxed);
            key.num_waiting_tokens.fetch_add(tokens, Relaxed);
        }
        Room {
            waiting: Arc::clone(waiting),
            key: key.cloned(),
            tokens,
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.waiting.requests.fetch_sub(1, Relaxed);
        self.waiting.tokens.fetch_sub(self.tokens, Relaxed);
        if let Some(key) = &self.key {
            key.num_waiting.fetch_sub(1, Relaxed);
            key.num_waiting_tokens.fetch_sub(self.tokens, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_is_given_back_once() {
        let (waiting, key) = (Arc::<Waiting>::default(), Arc::<KeyCounts>::default());
        let counts = || {
            let waiting = (waiting.requests.load(Relaxed), waiting.tokens.load(Relaxed));
            let key = (&key.num_waiting, &key.num_waiting_tokens);
            (waiting, (key.0.load(Relaxed), key.1.load(Relaxed)))
        };
        let mut rooms = vec![Room::take(&waiting, Some(&key), 5), Room::take(&waiting, None, 7)];
        assert_eq!(counts(), ((2, 12), (1, 5)));
        rooms.remove(0);
        assert_eq!(counts(), ((1, 7), (0, 0)));
        drop(rooms);
        assert_eq!(counts(), ((0, 0), (0, 0)));
    }
}
